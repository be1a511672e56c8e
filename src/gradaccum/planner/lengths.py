"""Lengths as people hand them over, checked: from Python, a tensor, an array or a file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gradaccum.errors import InputError, PlanError

__all__ = ["checked_lengths", "read_lengths", "whole_number"]


@runtime_checkable
class _Listable(Protocol):
    def tolist(self) -> Any: ...


def checked_lengths(
    lengths: Iterable[Any], *, kind: type[InputError] = PlanError, slug: str = "plan-lengths"
) -> tuple[int, ...]:
    """The lengths as Python integers, each at least 1.

    A tensor or an array is read once, through its `tolist`, so that neither has to be imported.

    Raises:
        InputError: (a `kind`) if there are none, or one is not a whole number of at least 1.
    """
    values: object = lengths.tolist() if isinstance(lengths, _Listable) else lengths
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise kind(
            slug,
            "Lengths must be a sequence of whole numbers, one for each sample.",
            got=_shown(lengths),
            expected="an iterable of ints, or a tensor or array of one dimension",
            do="lengths=[len(sample) for sample in samples], or mask.sum(1)",
        )
    found = list(values)
    if not found:
        raise kind(
            slug,
            "There are no lengths, so there is nothing to plan.",
            got="an empty sequence",
            expected="one length for each sample, at least one",
            do="leave out batches and filters that give no sample",
        )
    checked = []
    for position, value in enumerate(found):
        length = value if type(value) is int else _as_int(value)
        if length is None or length < 1:
            raise kind(
                slug,
                f"The length at position {position} is not a whole number of at least 1.",
                got=f"lengths[{position}] = {_shown(value)}",
                expected="an int >= 1: the sample's size without padding",
                do=_advice(value),
            )
        checked.append(length)
    return tuple(checked)


def whole_number(name: str, value: object, *, least: int) -> int:
    """`value` as an int of at least `least`.

    Raises:
        PlanError: if it is not.
    """
    number = _as_int(value)
    if number is None or number < least:
        raise PlanError(
            "plan-argument",
            f"`{name}` must be a whole number of at least {least}.",
            got=f"{name}={_shown(value)}",
            expected=f"an int >= {least}",
            do=f"{name}={least} is the least",
        )
    return number


def read_lengths(path: str) -> tuple[int, ...]:
    """Lengths from a text file, `-` for standard input.

    The file holds a JSON list, or whole numbers separated by newlines, blanks or commas.

    Raises:
        PlanError: if the file cannot be read, holds no number, or something else than numbers.
    """
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        binary = isinstance(error, UnicodeDecodeError)
        reason = "not UTF-8 text" if binary else getattr(error, "strerror", None) or str(error)
        raise PlanError(
            "plan-file",
            "The file of lengths cannot be read.",
            got=f"{path}: {reason}",
            expected="a text file with one whole number a line, or a JSON list of them",
            do="wc -w docs/*.md | head -n -1 | awk '{print $1}' | gradaccum plan -",
        ) from None
    if text.lstrip().startswith("["):
        return checked_lengths(_json_list(path, text))
    words = [
        (line, word)
        for line, content in enumerate(text.splitlines(), start=1)
        for word in content.replace(",", " ").split()
    ]
    return checked_lengths([_number(path, line, word) for line, word in words])


def _number(path: str, line: int, word: str) -> int:
    # `int` alone would also take "1_000", and refuses numbers of more than 4,300 digits.
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", word):
        raise PlanError(
            "plan-file",
            "The file of lengths holds something that is not a whole number.",
            got=f"{path}, line {line}: {word[:40]!r}",
            expected="whole numbers separated by newlines, blanks or commas",
            do="take it out, or put it in the unit that lengths are counted in",
        )
    return int(word)


def _json_list(path: str, text: str) -> list[object]:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            "plan-file",
            "The file of lengths starts like a JSON list and is none.",
            got=f"{path}: {error}",
            expected="[12, 7, 30]",
            do="leave out the bracket for plain numbers, or mend the JSON",
        ) from None


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # pyrefly: ignore[bad-argument-type] - refusing is what it is for
    except TypeError:
        return None


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _advice(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return "pass whole numbers: lengths.long() for a tensor, int(length) elsewhere"
    if isinstance(value, list):
        return "pass lengths of one dimension, such as mask.sum(1)"
    if value == 0:
        return "take out samples without elements before planning"
    return "give each sample's own number of elements, such as len(sample)"
