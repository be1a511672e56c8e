"""Changes that plant a fault in a right loop: a tagged line is moved, doubled, edited, left out."""

import re
from collections.abc import Callable

from gradaccum.faults import CATALOGUE
from gradaccum.lint.files.program import Program
from gradaccum.lint.judge import judge

from .good_loops import HEAD

Change = Callable[[list[str]], list[str] | None]
"""New lines, or nothing where the loop has no such line."""


def codes(text: str) -> set[str]:
    program = Program({"loop.py": HEAD + text})
    module = program.load("loop.py")
    assert module is not None, text
    return {one.code for one in judge(program, module) if CATALOGUE[one.code].usual}


def at(lines: list[str], tag: str) -> int | None:
    found = [index for index, line in enumerate(lines) if line.endswith(f"#{tag}")]
    return found[0] if len(found) == 1 else None


def indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def remove(tag: str) -> Change:
    def change(lines: list[str]) -> list[str] | None:
        index = at(lines, tag)
        if index is None:
            return None
        lines[index] = indent(lines[index]) + "pass"
        return lines

    return change


def move(tag: str, other: str, after: bool = True) -> Change:
    def change(lines: list[str]) -> list[str] | None:
        source, target = at(lines, tag), at(lines, other)
        if source is None or target is None or in_other_function(lines, source, target):
            return None
        line = indent(lines[target]) + lines[source].lstrip()
        lines[source] = indent(lines[source]) + "pass"
        lines.insert(target + after, line)
        return lines

    return change


def in_other_function(lines: list[str], first: int, second: int) -> bool:
    low, high = sorted((first, second))
    return any(line.lstrip().startswith("def ") for line in lines[low:high])


def insert(tag: str, text: str, after: bool = True) -> Change:
    def change(lines: list[str]) -> list[str] | None:
        index = at(lines, tag)
        if index is None:
            return None
        names = {"LOSS": name_of(lines, "D"), "MODEL": name_of(lines, "M")}
        if any(key in text and value is None for key, value in names.items()):
            return None
        made = text
        for key, value in names.items():
            made = made.replace(key, value or "")
        lines.insert(index + after, indent(lines[index]) + made)
        return lines

    return change


def name_of(lines: list[str], tag: str) -> str | None:
    index = at(lines, tag)
    return lines[index].split("=")[0].strip() if index is not None else None


def replace(tag: str, old: str, new: str) -> Change:
    def change(lines: list[str]) -> list[str] | None:
        index = at(lines, tag)
        if index is None or not re.search(old, lines[index]):
            return None
        lines[index] = re.sub(old, new, lines[index])
        return lines

    return change


def twice(tag: str) -> Change:
    def change(lines: list[str]) -> list[str] | None:
        index = at(lines, tag)
        if index is None:
            return None
        lines.insert(index, lines[index])
        return lines

    return change


def both(first: Change, second: Change) -> Change:
    def change(lines: list[str]) -> list[str] | None:
        middle = first(lines)
        return second(middle) if middle is not None else None

    return change
