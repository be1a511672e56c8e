"""Text of any origin, made safe to look at: what cannot be seen is spelt out.

A script's name, a source line or an exception may hold characters that hide themselves, turn the
text around them or command the terminal. Everything that a report shows goes through here first.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, TypeVar

__all__ = ["one_line", "tame", "visible"]

# control, format (the bidirectional ones among them), surrogate, line and paragraph separators
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # emoji and several scripts need them
_LONGEST = 2000

Record = TypeVar("Record")


def visible(text: str) -> str:
    r"""The text with every hidden character spelt out, as in `<U+202E>`; tabs become spaces.

    Examples:
        >>> visible("cod\u202ecod.py\x1b[2J")
        'cod<U+202E>cod.py<U+001B>[2J'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in _joiners_at(text, place)
        else "    "
        if char == "\t"
        else _spelt(char)
        for place, char in enumerate(text)
    )


def _joiners_at(text: str, place: int) -> str:
    # between two ASCII characters a joiner has no use but to hide
    beside = text[max(place - 1, 0) : place] + text[place + 1 : place + 2]
    return "" if beside.isascii() else _JOINERS


def _spelt(char: str) -> str:
    return f"<U+{ord(char):04X}>" if unicodedata.category(char) in _HIDDEN else char


@lru_cache(maxsize=8192)  # paths and lines stand in every event
def one_line(text: str, longest: int = _LONGEST) -> str:
    """The text on one line, hidden characters spelt out, cut if it is longer than `longest`."""
    start = text[: longest + 1]
    plain = visible(" ".join(start.splitlines()) if "\n" in start else start)
    return plain if len(plain) <= longest else plain[: longest - 3] + "..."


def tame(record: Record, longest: int = _LONGEST) -> Record:
    """A record with every text in it, however deep, made visible and cut to `longest`."""
    found: Any = record
    if found is None or isinstance(found, bool | int | float):
        return record
    if isinstance(found, str):
        return one_line(found, longest)  # type: ignore[return-value]
    if isinstance(found, tuple):
        return tuple(tame(item, longest) for item in found)  # type: ignore[return-value]
    if isinstance(found, Mapping):
        return {tame(key, longest): tame(value, longest) for key, value in found.items()}  # type: ignore[return-value]
    return type(found)(*(tame(getattr(found, name), longest) for name in _names(type(found))))


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))
