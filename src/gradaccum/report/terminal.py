"""A diagnosis for the terminal: the verdict first, and one quiet line where all is well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from gradaccum.records import Finding
from gradaccum.records.diagnosis import Diagnosis, TermSeen, WindowSeen
from gradaccum.report import text as lines
from gradaccum.report.amounts import duration, number, plural
from gradaccum.report.seen import happened, updates, window_name
from gradaccum.report.visible import tame
from gradaccum.report.weights import LOST, OFF, named, state

__all__ = ["text"]

_NAME = "gradaccum doctor"
_MOST_WINDOWS = 3
_MOST_FINDINGS = 20
_MOST_RUNS = 8


def text(diagnosis: Diagnosis, colour: bool = False) -> str:
    """The verdict, the findings with their lines, the weights that are off, one line of summary.

    Args:
        diagnosis: of one run.
        colour: whether the terminal takes ANSI colours.

    Returns:
        Text without a line break at its end.
    """
    shown = tame(diagnosis)
    heavy = [item for item in shown.findings if item.severity != "note"]
    notes = [_note(item) for item in shown.findings if item.severity == "note"]
    verdict = f"{shown.verdict}{_ending(shown)}"
    if not heavy:
        return "\n".join([f"{_NAME}: {verdict}", *notes])
    worst = "error" if any(item.severity == "error" for item in heavy) else "warning"

    def excerpt(path: str, line: int) -> str:
        return shown.sources.get(path, {}).get(line, "")

    parts = [
        f"{_NAME}: {lines.painted(verdict, worst, colour)}",
        "",
        *(lines.one(item, excerpt, colour) for item in heavy[:_MOST_FINDINGS]),
        *notes,
        *_weights(shown.windows),
        _summary(shown, heavy),
    ]
    return "\n".join(parts)


def _ending(diagnosis: Diagnosis) -> str:
    run = diagnosis.run
    if run.ended == "finished" and not run.exit_code:
        return ""
    if run.ended == "unfinished":
        return " (the trace has no end: the run was killed, or the file was cut)"
    return f" ({run.ended}, exit code {run.exit_code})"


def _note(finding: Finding) -> str:
    where = f"{finding.path}:{finding.line}: " if finding.path else ""
    return f"{_NAME}: {where}note {finding.code} {finding.title}: {finding.message}"


def _weights(windows: Sequence[WindowSeen]) -> Iterable[str]:
    """The first windows in which a term weighed what it should not."""
    last = len(windows) - 1
    wrong = [
        row
        for place, window in enumerate(windows)
        for row in _wrong(window, window_name(window, place == last))
    ]
    yield from wrong[:_MOST_WINDOWS]
    if len(wrong) > _MOST_WINDOWS:
        yield f"{len(wrong) - _MOST_WINDOWS:,} more like these in the windows that were looked at"
    if wrong:
        yield ""


def _wrong(window: WindowSeen, title: str) -> Iterable[str]:
    rows = [
        (name, term, state(term, micro))
        for micro in window.microbatches
        for name, term in named(micro)
    ]
    for wrong in dict.fromkeys(name for name, _, found in rows if found in (OFF, LOST)):
        own = [(term, found) for name, term, found in rows if name == wrong]
        saw = _runs(_weight(item, found) for item, found in own)
        right = _runs(number(item.expected) for item, _ in own)
        yield f"{title}, weights of {wrong or 'the loss'}: {saw}; should be {right}"


def _weight(term: TermSeen, found: str) -> str:
    if found == LOST:
        return "lost"
    return "unknown" if term.weight is None else number(term.weight)


def _runs(values: Iterable[str]) -> str:
    """Values that repeat, counted.

    Examples:
        >>> _runs(["1", "1", "1", "0.5"])
        '1 (3 times), 0.5'
    """
    counted = [(value, len(list(same))) for value, same in groupby(values)]
    said = [value if count == 1 else f"{value} ({count} times)" for value, count in counted]
    return ", ".join(said if len(said) <= _MOST_RUNS else [*said[:_MOST_RUNS], "..."])


def _summary(diagnosis: Diagnosis, findings: Sequence[Finding]) -> str:
    passes = happened(diagnosis, "backward")
    left = len(findings) - _MOST_FINDINGS
    more = f" {plural(left, 'more finding')} in the JSON and HTML reports." if left > 0 else ""
    return (
        f"{plural(passes, 'backward pass')}, {plural(updates(diagnosis), 'update')} in "
        f"{duration(diagnosis.run.seconds)}: {lines.counted(diagnosis.findings)}.{more} Run "
        f"`gradaccum explain {findings[0].code}` for the first, or --html FILE for the page."
    )
