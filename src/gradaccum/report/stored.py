"""A diagnosis as JSON, and back: what a run was judged by, to be kept, compared and shown again."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from gradaccum.errors import InputError, shown
from gradaccum.records.diagnosis import Diagnosis

__all__ = ["VERSION", "dump", "load"]

VERSION = 1
_KIND = "diagnosis"
# JSON knows neither; strict readers refuse the bare words that Python would write
_ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dump(diagnosis: Diagnosis) -> str:
    """`{"version": 1, "kind": "diagnosis", "verdict": ..., "findings": [...], ...}`, strict JSON.

    Numbers that JSON has no word for are the strings `"nan"`, `"inf"` and `"-inf"`.
    """
    table = {"version": VERSION, "kind": _KIND, **_plain(asdict(diagnosis))}
    return json.dumps(table, indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def load(text: str, name: str = "the file") -> Diagnosis:
    """Read what `dump` wrote.

    Fields that this version does not know are ignored, so that a later one may add to them.

    Args:
        text: what was read.
        name: what to call it in an error: its path.

    Raises:
        InputError: if the text is cut, broken, of a newer version or something else altogether.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{name} is not whole, or not JSON.", _reason(text, error)) from None
    if not isinstance(table, dict):
        raise _refused(f"{name} is JSON, but not a report.", shown(table))
    version = table.get("version")
    if type(version) is int and version > VERSION:
        raise InputError(
            "report-newer",
            f"{name} was written by a newer gradaccum.",
            got=f"version {version}",
            expected=f"at most version {VERSION}",
            do="pip install --upgrade gradaccum",
        )
    if type(version) is not int or version != VERSION or table.get("kind") != _KIND:
        raise _refused(f"{name} is JSON, but not the doctor's report.", _summary(table))
    try:
        return _read(Diagnosis, table, "")
    except _Misfit as misfit:
        raise _refused(f"{name} is a report with a part that does not fit.", str(misfit)) from None


def _refused(problem: str, got: str) -> InputError:
    return InputError(
        "report-unreadable",
        problem,
        got=got,
        expected=f"what `gradaccum doctor --json FILE` writes, version {VERSION}",
        do="run `gradaccum doctor --json FILE ...` again",
    )


def _reason(text: str, error: Exception) -> str:
    if not text.strip():
        return "an empty file"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, line {error.lineno} of {text.count(chr(10)) + 1}"
    return "brackets nested too deeply" if isinstance(error, RecursionError) else str(error)


def _summary(table: Mapping[str, Any]) -> str:
    if "files" in table and "findings" in table:
        return "the linter's report"
    return shown(dict(list(table.items())[:3]))


class _Misfit(Exception):
    """A value that does not fit its field; says where it stands."""


def _read(kind: Any, value: Any, where: str) -> Any:
    """The value as the annotation `kind` says, or a misfit."""
    if kind is float:
        return _number(value, where)
    if kind in (str, int, bool):
        if type(value) is not kind:
            raise _Misfit(f"{where or 'it'} is {shown(value)}, not {kind.__name__}")
        return value
    if is_dataclass(kind):
        return _record(kind, value, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _read(next(arg for arg in args if arg is not type(None)), value, where)
    if origin is tuple:
        return _tuple(args, value, where)
    return _mapping(args, value, where)


def _number(value: Any, where: str) -> float:
    if isinstance(value, str) and value in _ODD:
        return _ODD[value]
    if type(value) not in (int, float):
        raise _Misfit(f"{where} is {shown(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise _Misfit(f"{where} is a number too large") from None


def _record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _Misfit(f"{where} is {shown(value)}, not an object")
    hints, given = get_type_hints(kind), {}
    for item in fields(kind):
        place = f"{where}.{item.name}" if where else item.name
        if item.name in value:
            given[item.name] = _read(hints[item.name], value[item.name], place)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise _Misfit(f"{place} is missing")
    return kind(**given)


def _tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _Misfit(f"{where} is {shown(value)}, not a list")
    kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(value):
        raise _Misfit(f"{where} has {len(value)} items, not {len(kinds)}")
    return tuple(
        _read(kind, item, f"{where}[{place}]")
        for place, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _mapping(args: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _Misfit(f"{where} is {shown(value)}, not an object")
    keys, values = args
    return {
        _key(keys, key, where): _read(values, item, f"{where}[{key!r}]")
        for key, item in value.items()
    }


def _key(kind: Any, key: str, where: str) -> Any:
    if kind is str:
        return key
    try:
        return int(key)
    except ValueError:
        raise _Misfit(f"{where} has {shown(key)} where a number should stand") from None
