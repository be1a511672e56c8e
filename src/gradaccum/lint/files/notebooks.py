"""The code of a notebook as one text that Python parses, with IPython's own syntax taken out."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass, field

__all__ = ["Code", "code_of"]

_PYTHON_CELLS = ("%%time", "%%capture", "%%prun", "%%memit", "%%mprun", "%%snakeviz")
"""Cell magics whose cell is Python."""
_ASSIGNED = re.compile(r"(\s*[\w., ]+=\s*)[!%]\s*\w.*")
_HELP = re.compile(r"\s*[\w.]+\?{1,2}\s*")


@dataclass(slots=True)
class Code:
    """All code cells, one after the other."""

    text: str
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Number of each code cell, and the line of the text that it begins in."""
    broken: list[tuple[int, int, str]] = field(default_factory=list)
    """Cells that do not parse, which are left out: line, column, reason."""


def code_of(data: bytes) -> Code:
    """The code cells of a notebook; raises what `json` raises where it is none."""
    cells = json.loads(data.decode("utf-8-sig"))["cells"]
    code = Code("")
    lines: list[str] = []
    number = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        number += 1
        source = cell["source"]
        text = "".join(source) if isinstance(source, list) else str(source)
        code.starts.append((number, len(lines) + 1))
        plain, problem = _python(text)
        if problem is not None:
            line, column, reason = problem
            code.broken.append((len(lines) + line, column, reason))
        lines.extend(plain)
    code.text = "\n".join(lines) + "\n"
    return code


def _python(cell: str) -> tuple[list[str], tuple[int, int, str] | None]:
    """A cell's lines as Python; what cannot be made so is left empty, with the reason."""
    lines = cell.split("\n")
    if cell.startswith("%%") and not cell.startswith(_PYTHON_CELLS):
        return ["" for _ in lines], None
    moved = _without_margin(lines)
    problem = None
    for plain in (lines, moved, _without_magics(moved)):
        problem = _problem("\n".join(plain))
        if problem is None:
            return plain, None
    return ["" for _ in lines], problem


def _without_margin(lines: list[str]) -> list[str]:
    """Lines without the indent of the first, which IPython takes away as well."""
    first = next((line for line in lines if line.strip()), "")
    margin = first[: len(first) - len(first.lstrip())]
    return [line.removeprefix(margin) for line in lines]


def _without_magics(lines: list[str]) -> list[str]:
    plain: list[str] = []
    goes_on = False
    for line in lines:
        start = line.lstrip()
        indent = line[: len(line) - len(start)]
        if goes_on:
            plain.append("")
            goes_on = line.rstrip().endswith("\\")
            continue
        assigned = _ASSIGNED.fullmatch(line)
        if assigned is not None:
            plain.append(assigned[1] + "None")
        elif start.startswith(("%", "!", "?")) or _HELP.fullmatch(line):
            plain.append(indent + "pass")
        else:
            plain.append(line)
            continue
        goes_on = line.rstrip().endswith("\\")
    return plain


def _problem(text: str) -> tuple[int, int, str] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except SyntaxError as error:
            return error.lineno or 1, max(error.offset or 1, 1) - 1, error.msg
        except (ValueError, RecursionError, MemoryError) as error:
            return 1, 0, str(error)
    return None
