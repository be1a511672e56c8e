"""Files, globs, notebooks and standard input: from what was asked for to texts and line tables."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradaccum.errors import InputError
from gradaccum.lint.files.notebooks import code_of
from gradaccum.report.rows import rows

__all__ = ["Cell", "Source", "collect", "piped", "read"]

SKIP = frozenset({"__pycache__", "node_modules", "venv", "env", "site-packages", "build", "dist"})
"""Folders that a walk through a folder leaves out; naming one lints it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Where a notebook's cell begins in the text that is linted."""

    number: int
    first: int


@dataclass(slots=True)
class Source:
    """One text to lint."""

    path: str
    data: bytes
    cells: tuple[Cell, ...] = ()
    lines: list[str] = field(default_factory=list)
    broken: tuple[tuple[int, int, str], ...] = ()
    """Cells of a notebook that do not parse: line, column, reason."""

    def place(self, line: int) -> tuple[str, int]:
        """The path and line that a reader knows for a line of the text."""
        where = None
        for cell in self.cells:
            if cell.first <= line:
                where = cell
        if where is None:
            return self.path, line
        return f"{self.path}:cell {where.number}", line - where.first + 1

    def text(self, line: int) -> str:
        """One line of the text, without its ending; empty beyond the end."""
        if not self.lines:
            self.lines = [row.rstrip("\r\n") for row in rows(self.data)] or [""]
        return self.lines[line - 1] if 0 < line <= len(self.lines) else ""


def collect(
    arguments: Sequence[str], exclude: Sequence[str] = (), *, named: bool = False
) -> tuple[list[Path], list[InputError]]:
    """The files that arguments name, in order and once each, and what could not be found.

    Args:
        arguments: files, folders, patterns.
        exclude: patterns of what is left out of folders.
        named: leave out files that are named themselves as well.
    """
    found: dict[str, Path] = {}
    problems: list[InputError] = []
    for argument in arguments:
        try:
            inside = _named(argument, exclude)
        except InputError as problem:  # noqa: PERF203 - one bad path must not stop the others
            problems.append(problem)
        except (OSError, ValueError) as error:
            problems.append(
                _problem(argument, str(error), "a readable path", slug="lint-unreadable")
            )
        else:
            for path in inside:
                if not (named and _excluded(path, exclude)):
                    found.setdefault(os.path.abspath(path), path)
    return list(found.values()), problems


def _named(argument: str, exclude: Sequence[str]) -> list[Path]:
    path = Path(argument)
    if path.is_dir():
        inside = list(_walk(path, exclude))
        if not inside:
            got, expected = "a folder without Python", "a folder with .py or .ipynb files"
            if exclude and any(_walk(path, ())):
                got, expected = "a folder of which `exclude` leaves nothing", "one with files left"
            raise _problem(argument, got, expected, slug="lint-no-python")
        return inside
    if path.exists():
        return [path]
    if not glob.has_magic(argument):
        got, expected = "a path that does not exist", "a file, folder, pattern, or -"
        raise _problem(argument, got, expected, slug="lint-no-path")
    matches = sorted(glob.glob(argument, recursive=True))
    if not matches:
        got, expected = "a pattern that no file matches", "a pattern of existing files"
        raise _problem(argument, got, expected, slug="lint-no-match")
    inside = []
    for inner in map(Path, matches):
        inside += _walk(inner, exclude) if inner.is_dir() else [inner]
    return inside


def _excluded(path: Path, exclude: Sequence[str]) -> bool:
    """Whether a pattern matches a file or a folder that it lies in, below the working one."""
    inner = Path(os.path.relpath(path))
    return any(one.match(pattern) for one in (inner, *inner.parents) for pattern in exclude)


def _problem(path: str, got: str, expected: str, *, slug: str) -> InputError:
    # The other files are still linted, so each of these is said in one line.
    sentence = f"cannot lint {path}: got {got}, expected {expected}."
    return InputError(slug, sentence, got=got, expected=expected, do=f"leave out {path}")


def _walk(folder: Path, exclude: Sequence[str]) -> Iterable[Path]:
    stack = [folder]
    while stack:
        here = stack.pop()
        try:
            entries = sorted(here.iterdir(), reverse=True)
        except OSError:
            continue
        files: list[Path] = []
        for entry in entries:
            if any(entry.match(pattern) for pattern in exclude):
                continue
            if entry.is_dir():
                if (
                    not entry.name.startswith(".")
                    and entry.name not in SKIP
                    and not entry.is_symlink()
                ):
                    stack.append(entry)
            elif entry.suffix in (".py", ".ipynb") and entry.is_file():  # a pipe would never end
                files.append(entry)
        yield from reversed(files)


def read(path: Path) -> Source:
    """Read one file; raises `InputError` in one line where it is no source."""
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise _problem(
            str(path), reason.lower(), "a file that may be read", slug="lint-unreadable"
        ) from None
    if path.suffix == ".ipynb":
        return _notebook(str(path), data)
    if b"\0" in data and path.suffix != ".py":
        raise _problem(str(path), "a binary file", "Python source", slug="lint-binary")
    return Source(str(path), data)


def piped(name: str, data: bytes) -> Source:
    """What came by standard input, called `name`; a notebook if it is called like one."""
    return _notebook(name, data) if name.endswith(".ipynb") else Source(name, data)


def _notebook(path: str, data: bytes) -> Source:
    """The code cells of a notebook as one text."""
    try:
        code = code_of(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "it has no list of cells, as those before nbformat 4"
        if isinstance(error, json.JSONDecodeError):
            why = f"line {error.lineno} column {error.colno}: {error.msg}"
        elif isinstance(error, UnicodeDecodeError):
            why = "it is not UTF-8"
        raise _problem(
            path,
            f"a broken notebook ({why})",
            "a notebook in nbformat 4 JSON",
            slug="lint-notebook",
        ) from None
    cells = tuple(Cell(number, first) for number, first in code.starts)
    return Source(path, code.text.encode(), cells, broken=tuple(code.broken))
