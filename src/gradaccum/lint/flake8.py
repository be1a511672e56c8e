"""The linter as a flake8 plugin: the same findings under the same codes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from gradaccum.lint.engine import lint_source
from gradaccum.lint.files.program import Program
from gradaccum.lint.files.sources import Source
from gradaccum.lint.settings import INTERNAL, SYNTAX, load

__all__ = ["Checker"]


class Checker:
    """flake8 makes one of these for each file."""

    name = "gradaccum"
    version = version("gradaccum")

    def __init__(self, tree: ast.AST, filename: str = "<stdin>", lines: Sequence[str] = ()) -> None:
        self._path = filename
        self._text = "".join(lines) or ast.unparse(tree)

    def run(self) -> Iterator[tuple[int, int, str, type]]:
        """Yield line, column, message and this class for each finding."""
        settings = load([], [SYNTAX, INTERNAL], Path.cwd())  # what does not parse is flake8's E999
        for one in lint_source(Source(self._path, self._text.encode()), Program(), settings):
            yield one.line, one.column - 1, f"{one.code} {one.message}", type(self)
