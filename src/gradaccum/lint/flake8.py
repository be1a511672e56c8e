"""The linter as a flake8 plugin: the same findings under the same codes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from gradaccum.faults import CATALOGUE
from gradaccum.lint.judge import judge
from gradaccum.lint.program import Program, parse

__all__ = ["Checker"]


class Checker:
    """flake8 makes one of these for each file."""

    name = "gradaccum"
    version = "0.1"

    def __init__(self, tree: ast.AST, filename: str = "<stdin>", lines: Sequence[str] = ()) -> None:
        self._path = filename
        self._text = "".join(lines) or ast.unparse(tree)

    def run(self) -> Iterator[tuple[int, int, str, type]]:
        """Yield line, column, message and this class for each finding."""
        program = Program()
        module = parse(self._text, self._path)
        program.add(module)
        for one in judge(program, module):
            if CATALOGUE[one.code].usual:
                yield one.line, one.column, f"{one.code} {one.message}", type(self)
