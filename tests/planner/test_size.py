"""Numbers of bytes as people write them."""

import re

import pytest

from gradaccum.errors import InputError
from gradaccum.planner.size import parse_size
from gradaccum.records.fit import show_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * 1024**3),
        ("900MB", 900 * 10**6),
        ("1.5 gib", 3 * 2**29),
        (" 4k ", 4000),
        ("4KiB", 4096),
        ("2T", 2 * 10**12),
        ("7", 7),
        ("7B", 7),
        ("0.5KB", 500),
        ("1.000001MB", 1000001),
        (4096, 4096),
        ("auto", "auto"),
        ("AUTO ", "auto"),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


NO_SIZES = ["", "GiB", "-1GB", "1e9", "12 apples", "1,5GB", "1iB", "0", "0.1", "9" * 40, "nan"]
NO_SIZES += ["inf", "\u0661GB", "1 G B", 0, -5, 1.5, None, True, b"1GB", [1]]


@pytest.mark.parametrize("text", NO_SIZES, ids=repr)
def test_what_is_no_size(text):
    with pytest.raises(InputError, match=re.escape('"12GiB" or "900MB"')) as caught:
        parse_size(text)
    assert caught.value.slug == "memory-size"


def test_the_argument_is_named():
    with pytest.raises(InputError, match="`limit` is not a number of bytes"):
        parse_size("x", name="limit")


def test_large_sizes_keep_every_byte():
    assert parse_size("9007199254740993") == 2**53 + 1
    assert parse_size("9.007199254740993PB"[:-2] + "TB") == 9007199254740


def test_bytes_for_people():
    assert [show_bytes(size) for size in (0, 1023, 1024, 10 * 2**20, 5 * 2**40)] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "10.0 MiB",
        "5.0 TiB",
    ]
