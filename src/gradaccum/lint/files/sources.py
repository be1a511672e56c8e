"""Files, globs, notebooks and standard input: from what was asked for to texts and line tables."""

from __future__ import annotations

import glob
import io
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradaccum.errors import InputError
from gradaccum.lint.files.notebooks import code_of

__all__ = ["Cell", "Source", "collect", "read"]

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
            self.lines = _decode(self.data).splitlines() or [""]
        return self.lines[line - 1] if 0 < line <= len(self.lines) else ""


def _decode(data: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding, "replace")
    except (SyntaxError, LookupError):
        return data.decode("utf-8", "replace")


def collect(
    arguments: Sequence[str], exclude: Sequence[str] = ()
) -> tuple[list[Path], list[InputError]]:
    """The files that arguments name, in order and once each, and what could not be found."""
    found: dict[Path, None] = {}
    problems: list[InputError] = []
    for argument in arguments:
        path = Path(argument)
        try:
            if path.is_dir():
                inside = list(_walk(path, exclude))
                if not inside:
                    got, expected = "a folder without Python", "a folder with .py or .ipynb files"
                    problems.append(_problem(argument, got, expected, slug="lint-no-python"))
                found.update(dict.fromkeys(inside))
            elif path.exists():
                found[path] = None
            elif glob.has_magic(argument):
                matches = sorted(glob.glob(argument, recursive=True))
                if not matches:
                    got, expected = "a pattern that no file matches", "a pattern of existing files"
                    problems.append(_problem(argument, got, expected, slug="lint-no-match"))
                for match in matches:
                    inner = Path(match)
                    found.update(
                        dict.fromkeys(_walk(inner, exclude) if inner.is_dir() else [inner])
                    )
            else:
                got, expected = "a path that does not exist", "a file, folder, pattern, or -"
                problems.append(_problem(argument, got, expected, slug="lint-no-path"))
        except (OSError, ValueError) as error:
            problems.append(
                _problem(argument, str(error), "a readable path", slug="lint-unreadable")
            )
    return list(found), problems


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
            elif entry.suffix in (".py", ".ipynb"):
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


def _notebook(path: str, data: bytes) -> Source:
    """The code cells of a notebook as one text."""
    try:
        code = code_of(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _problem(
            path, "a broken notebook", "a notebook in nbformat 4 JSON", slug="lint-notebook"
        ) from None
    cells = tuple(Cell(number, first) for number, first in code.starts)
    return Source(path, code.text.encode(), cells, broken=tuple(code.broken))
