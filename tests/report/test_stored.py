"""A diagnosis as JSON: the same when it is read back, and one clear error for anything else."""

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.errors import InputError
from gradaccum.records import Finding
from gradaccum.report import machine
from gradaccum.report.stored import VERSION, dump, load
from tests.report import samples


def plain(value):
    """The same value with NaN, which equals nothing, as a word."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", samples.ALL)
def test_read_back_it_is_the_same(name):
    made = samples.ALL[name]()
    assert plain(asdict(load(dump(made)))) == plain(asdict(made))


def test_the_json_is_strict_and_says_what_it_is():
    def refuse(word):
        raise AssertionError(word)

    table = json.loads(dump(samples.hostile()), parse_constant=refuse)
    assert (table["version"], table["kind"]) == (VERSION, "diagnosis")
    assert table["findings"][0]["code"] == "GA201"
    assert table["windows"][0]["norm"] == "nan"


def test_a_field_of_a_later_minor_version_is_ignored():
    table = json.loads(dump(samples.clean()))
    table["later"] = 1
    table["windows"][0]["later"] = {"a": []}
    assert load(json.dumps(table)) == samples.clean()


def test_a_field_with_a_default_may_be_missing():
    table = json.loads(dump(samples.clean()))
    del table["memory"]
    assert load(json.dumps(table)).memory == ()


def test_every_cut_is_one_clear_error():
    whole = dump(samples.tutorial())
    for end in range(0, len(whole), 211):
        with pytest.raises(InputError, match=r"run\.json is not whole, or not JSON") as caught:
            load(whole[:end], "run.json")
        assert "gradaccum doctor --json FILE" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an empty file"),
        ("\x00\x01", "Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"version": ' + "9" * 5000 + "}", "is not whole, or not JSON"),
        ("[1, 2]", "JSON, but not a report"),
        ("{}", "not the doctor's report"),
        ('{"version": 1, "kind": "plan"}', "not the doctor's report"),
        ('{"version": true, "kind": "diagnosis"}', "not the doctor's report"),
        (machine.to_json([Finding("GA102", "error", "a.py", 1, 1, "t", "m")], 1), "the linter's"),
        ('{"version": 1, "kind": "diagnosis"}', "run is missing"),
    ],
)
def test_what_is_no_report_is_one_clear_error(text, says):
    with pytest.raises(InputError) as caught:
        load(text, "run.json")
    assert says in str(caught.value)
    assert "run.json" in str(caught.value)


def test_a_newer_file_says_so():
    table = json.loads(dump(samples.clean()))
    table["version"] = VERSION + 1
    with pytest.raises(InputError, match="newer gradaccum") as caught:
        load(json.dumps(table))
    assert "pip install --upgrade" in str(caught.value)


def test_a_part_that_does_not_fit_is_named():
    table = json.loads(dump(samples.clean()))
    table["windows"][3]["microbatches"][1]["line"] = "eleven"
    with pytest.raises(InputError, match=r"windows\[3\]\.microbatches\[1\]\.line"):
        load(json.dumps(table))


_JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just(10**400),
    st.lists(st.none(), max_size=2), st.dictionaries(st.text(max_size=2), st.none(), max_size=2),
)  # fmt: skip


@given(st.data())
def test_a_value_of_any_other_kind_is_read_or_refused_but_never_breaks(data):
    table = json.loads(dump(samples.tutorial()))
    here = table
    while True:
        keys = sorted(here) if isinstance(here, dict) else range(len(here))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(here[key], dict | list) and here[key]) or data.draw(st.booleans()):
            break
        here = here[key]
    here[key] = data.draw(_JUNK)
    try:
        load(json.dumps(table))
    except InputError as error:
        assert error.got  # noqa: PT017 - a refusal is one of the two right outcomes
