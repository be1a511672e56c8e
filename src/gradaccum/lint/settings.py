"""What to report: `--select`, `--ignore`, `pyproject.toml` and `# noqa`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradaccum.errors import InputError
from gradaccum.faults import CATALOGUE

__all__ = ["INTERNAL", "SYNTAX", "Settings", "load", "silenced"]

INTERNAL = "GA000"
"""The code of a file that the linter itself failed on."""
SYNTAX = "GA001"
"""The code of a file that does not parse."""
_NOQA = re.compile(r"#\s*noqa(?P<codes>\s*:\s*[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*)?", re.IGNORECASE)
_CODE = re.compile(r"[A-Z]+[0-9]+", re.IGNORECASE)
_KEYS = {"select", "ignore", "exclude"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Codes that are reported, and files that are not walked into."""

    codes: frozenset[str]
    exclude: tuple[str, ...] = ()


def load(select: Iterable[str], ignore: Iterable[str], start: Path | None = None) -> Settings:
    """Settings of the command line over those of the nearest `pyproject.toml`.

    Raises:
        InputError: for a code that does not exist, or settings that cannot be read.
    """
    table, where = _table(start or Path.cwd())
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise InputError(
            "lint-settings",
            f"[tool.gradaccum.lint] in {where} has no setting {unknown[0]!r}.",
            got=unknown[0],
            expected=", ".join(sorted(_KEYS)),
            do="take it out, or mend its name",
        )
    for key in _KEYS:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InputError(
                "lint-settings",
                f"{key} of [tool.gradaccum.lint] in {where} cannot be read.",
                got=repr(value),
                expected='a list of strings, such as ["GA1", "GA203"]',
                do=f'{key} = ["GA1"]',
            )
    select, ignore = _given("--select", select), _given("--ignore", ignore)
    codes = {c for c, fault in CATALOGUE.items() if fault.usual} | {SYNTAX, INTERNAL}
    if select:
        codes = _expand(select)
    else:
        codes = _expand(table["select"]) if table.get("select") else codes
        codes -= _expand(table.get("ignore", []))
    codes -= _expand(ignore)
    if not codes:
        raise InputError(
            "lint-settings",
            "no code is left to look for.",
            got="everything that is selected is ignored as well",
            expected="codes that are selected and not ignored",
            do="take out what ignores them",
        )
    return Settings(frozenset(codes), tuple(table.get("exclude", [])))


def _given(option: str, values: Iterable[str]) -> list[str]:
    """What an option was given; an empty one, as from a variable that is not set, is refused."""
    values = list(values)
    if any(not value.strip(", ") for value in values):
        raise InputError(
            "lint-settings",
            f"{option} names no code.",
            got=f'{option} ""',
            expected="codes, or their beginnings, such as GA1,GA203",
            do=f"leave {option} out, or name a code",
        )
    return values


def _expand(prefixes: Iterable[str]) -> set[str]:
    every = {*CATALOGUE, SYNTAX, INTERNAL}
    found: set[str] = set()
    for part in prefixes:
        for prefix in part.replace(",", " ").split():
            matching = {code for code in every if code.startswith(prefix.upper())}
            if not matching:
                raise InputError(
                    "lint-unknown-code",
                    f"no fault has the code {prefix}.",
                    got=prefix,
                    expected="a code such as GA102, or its beginning, such as GA1",
                    do="gradaccum explain --list",
                )
            found |= matching
    return found


def _table(start: Path) -> tuple[dict, str]:
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            return _read(path), str(path)
    return {}, ""


def _read(path: Path) -> dict:
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    if b"gradaccum" not in data:
        return {}
    try:
        import tomllib as toml  # noqa: PLC0415 - 5 ms that most runs need not pay
    except ModuleNotFoundError:
        # pyrefly: ignore[missing-import] - installed on Python 3.10 only
        import tomli as toml  # noqa: PLC0415 - Python 3.10
    try:
        table = toml.loads(data.decode("utf-8"))
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            "lint-settings",
            f"{path} cannot be read.",
            got=str(error),
            expected="TOML",
            do="mend the file where the message says",
        ) from None
    section = table
    for name in ("tool", "gradaccum", "lint"):
        section = section.get(name, {})
        if not isinstance(section, dict):
            raise InputError(
                "lint-settings",
                f"[tool.gradaccum.lint] in {path} cannot be read.",
                got=f"{name} = {section!r}",
                expected=f"{name} to be a table",
                do='[tool.gradaccum.lint]\nselect = ["GA1"]',
            )
    return section


def silenced(line: str, code: str) -> bool:
    """Whether a `# noqa` on the line covers the code."""
    for match in _NOQA.finditer(line):
        if match["codes"] is None:
            return True
        if code.startswith(tuple(item.upper() for item in _CODE.findall(match["codes"]))):
            return True
    return False
