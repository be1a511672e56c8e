"""The source around a finding: its line marked, and under each line what happened there."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from markupsafe import Markup, escape
from pygments import lex
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String

from gradaccum.records import Evidence, Finding

__all__ = ["Line", "Part", "excerpt", "shorten"]

_AROUND = 2
_LONGEST = 200
_MOST_LINES = 40
_CLASSES = (
    (Comment, "c"), (Keyword, "k"), (String, "s"), (Number, "n"), (Name.Builtin, "b"),
    (Name.Function, "f"), (Name.Decorator, "f"),
)  # fmt: skip
Sources = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of source as it is shown."""

    number: int
    code: Markup
    marked: bool
    """Whether the finding stands here."""
    notes: tuple[str, ...]
    """What happened here."""


@dataclass(frozen=True, slots=True)
class Part:
    """Lines of one file, in runs that follow each other."""

    path: str
    runs: tuple[tuple[Line, ...], ...]


def excerpt(finding: Finding, sources: Sources) -> tuple[tuple[Part, ...], tuple[Evidence, ...]]:
    """The source of a finding and its evidence by file, and the evidence without source."""
    places = [(finding.path, finding.line), *((item.path, item.line) for item in finding.evidence)]
    known = [(path, line) for path, line in places if line in sources.get(path, {})]
    named: dict[str, list[int]] = {}
    for path, line in known:
        named.setdefault(path, []).append(line)
    parts = [
        Part(path, tuple(_lines(path, numbers, finding, sources)))
        for path, numbers in named.items()
    ]
    rest = tuple(item for item in finding.evidence if (item.path, item.line) not in known)
    return tuple(parts), rest


def _lines(
    path: str, named: list[int], finding: Finding, sources: Sources
) -> Iterable[tuple[Line, ...]]:
    source = sources[path]
    around = range(-_AROUND, _AROUND + 1)
    wanted = sorted({line + step for line in named for step in around if line + step in source})
    for run in _runs(wanted[:_MOST_LINES]):
        shown = _highlighted([source[number][:_LONGEST] for number in run])
        yield tuple(
            Line(number, code, (path, number) == (finding.path, finding.line),
                 _notes(path, number, finding))
            for number, code in zip(run, shown, strict=True)
        )  # fmt: skip


def _notes(path: str, number: int, finding: Finding) -> tuple[str, ...]:
    here = (path, number)
    return tuple(item.what for item in finding.evidence if (item.path, item.line) == here)


def _runs(numbers: list[int]) -> Iterable[list[int]]:
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def _highlighted(lines: list[str]) -> list[Markup]:
    """Each line as HTML; the lexer sees them together, so that a long string stays one."""
    done, row = [], Markup()
    for kind, text in lex("\n".join(lines), PythonLexer(stripnl=False, ensurenl=False)):
        name = next((short for token, short in _CLASSES if kind in token), "")
        for place, piece in enumerate(text.split("\n")):
            if place:
                done.append(row)
                row = Markup()
            if piece:
                row += (
                    Markup('<span class="{}">{}</span>').format(name, piece)
                    if name
                    else escape(piece)
                )
    done.append(row)
    return done


def shorten(paths: Iterable[str]) -> dict[str, str]:
    """How each path is shown: without the folder that all share, and packages by their own name.

    Examples:
        >>> shorten(["/home/me/project/train.py", "/home/me/project/src/loop.py"])
        {'/home/me/project/train.py': 'train.py', '/home/me/project/src/loop.py': 'src/loop.py'}
    """
    unique = list(dict.fromkeys(paths))
    own = [path for path in unique if os.path.isabs(path) and not _packaged(path)]
    shared = _shared(own)
    return {path: _packaged(path) or _below(path, shared, path in own) for path in unique}


def _shared(paths: list[str]) -> str:
    try:
        found = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    except ValueError:  # on different drives
        return ""
    return "" if found == os.path.dirname(found) else found


def _packaged(path: str) -> str:
    _, found, rest = path.replace("\\", "/").rpartition("/site-packages/")
    return rest if found else ""


def _below(path: str, shared: str, own: bool) -> str:
    return os.path.relpath(path, shared) if own and shared else path
