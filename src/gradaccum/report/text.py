"""Findings for people: the line marked, and the lines it is judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradaccum.records import Evidence, Finding
from gradaccum.report.amounts import plural
from gradaccum.report.visible import one_line, visible

__all__ = ["counted", "one", "painted", "render"]

_COLOURS = {"error": "31", "warning": "33", "note": "36"}
_WIDEST = 160
Excerpt = Callable[[str, int], str]


def render(findings: Sequence[Finding], files: int, excerpt: Excerpt, colour: bool = False) -> str:
    """All findings and one line of summary."""
    parts = [one(finding, excerpt, colour) for finding in findings]
    parts.append(_summary(findings, files))
    return "\n".join(parts)


def one(finding: Finding, excerpt: Excerpt, colour: bool) -> str:
    """One finding: where and what, its line marked, its evidence beside the lines, its mend."""
    head = f"{one_line(finding.path)}:{finding.line}:{finding.column}: "
    kind = painted(f"{finding.severity} {finding.code}", finding.severity, colour)
    lines = [f"{head}{kind} {one_line(finding.title)}: {one_line(finding.message)}"]
    shown = _clean(excerpt(finding.path, finding.line))
    if shown.strip():
        lines.append(f"{finding.line:>6} | {shown}")
        indent = len(shown) - len(shown.lstrip())
        start = max(indent, min(finding.column - 1, len(shown) - 1))
        lines.append(f"       | {' ' * start}{'^' * max(1, len(shown.rstrip()) - start)}")
    for item in finding.evidence:
        lines.extend(_evidence(item, finding, excerpt))
    if finding.mend:
        lines.append(f"       = mend: {one_line(finding.mend)}")
    return "\n".join([*lines, ""])


def _evidence(item: Evidence, finding: Finding, excerpt: Excerpt) -> list[str]:
    what, there = one_line(item.what), _clean(excerpt(item.path, item.line))
    if not item.path or (item.path, item.line) == (finding.path, finding.line):
        return [f"       = {what}"]
    if item.path == finding.path and there.strip():
        return [f"{item.line:>6} | {there}   <- {what}"]
    where = f"       = {one_line(item.path)}:{item.line}: {what}"
    return [where, f"{item.line:>6} | {there}"] if there.strip() else [where]


def painted(text: str, severity: str, colour: bool) -> str:
    """The text in the colour of a severity, bold, where colours are wanted."""
    return f"\x1b[1;{_COLOURS.get(severity, '36')}m{text}\x1b[0m" if colour else text


def _clean(line: str) -> str:
    # a file's control characters must not reach the terminal
    plain = visible(line.expandtabs(4))
    return plain if len(plain) <= _WIDEST else plain[: _WIDEST - 3] + "..."


def counted(findings: Sequence[Finding]) -> str:
    """How many findings there are of each severity."""
    counts = {kind: sum(item.severity == kind for item in findings) for kind in _COLOURS}
    return ", ".join(plural(count, kind) for kind, count in counts.items() if count)


def _summary(findings: Sequence[Finding], files: int) -> str:
    looked = f"{files} file{'s' if files != 1 else ''}"
    if not findings:
        return f"{looked}: no fault found."
    said = counted(findings)
    return f"{looked}: {said}. Run `gradaccum explain {findings[0].code}` for the first."
