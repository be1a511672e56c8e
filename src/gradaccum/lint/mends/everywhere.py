"""`--fix` and `--diff` over all the files of a run."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from gradaccum.lint.engine import Result, lint, lint_source
from gradaccum.lint.files.program import Program
from gradaccum.lint.files.sources import Source
from gradaccum.lint.mends.apply import mend
from gradaccum.lint.settings import Settings
from gradaccum.records import Finding
from gradaccum.report.rows import rows

__all__ = ["Mended", "difference", "mended"]


@dataclass(slots=True)
class Mended:
    """What mending a run's files came to."""

    texts: dict[str, bytes] = field(default_factory=dict)
    """The new text of each file that changes."""
    left: Result = field(default_factory=Result)
    """The findings that are left for a person, and the texts that they are in."""


def mended(result: Result, settings: Settings) -> Mended:
    """Mend what is certain in every file; nothing is written."""
    found = Mended()
    for path, source in result.texts.items():
        own = [item for item in result.findings if item.path == path]
        if own:
            new, _ = mend(source, own, lambda text: _again(text, result, settings))
            if new != source.data:
                found.texts[path] = new
    now = [
        Source(path, found.texts[path]) if path in found.texts else source
        for path, source in result.texts.items()
    ]
    found.left = lint(now, settings) if found.texts else result
    return found


def _again(text: Source, result: Result, settings: Settings) -> list[Finding]:
    """What is found in a file, with the others beside it to be followed into."""
    known = {**result.texts, text.path: text}
    program = Program({path: source.data for path, source in known.items()})
    return [item for item in lint_source(text, program, settings, known) if item.path == text.path]


def difference(path: str, old: bytes, new: bytes) -> str:
    """A unified diff."""
    lines = difflib.unified_diff(rows(old), rows(new), path, path)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
