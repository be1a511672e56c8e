"""Findings for people: the line marked, and the lines it is judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradaccum.records import Finding

__all__ = ["render"]

_COLOURS = {"error": "31", "warning": "33", "note": "36"}
Excerpt = Callable[[str, int], str]


def render(findings: Sequence[Finding], files: int, excerpt: Excerpt, colour: bool = False) -> str:
    """All findings and one line of summary."""
    parts = [_one(finding, excerpt, colour) for finding in findings]
    parts.append(_summary(findings, files))
    return "\n".join(parts)


def _one(finding: Finding, excerpt: Excerpt, colour: bool) -> str:
    head = f"{finding.path}:{finding.line}:{finding.column}: "
    kind = f"{finding.severity} {finding.code}"
    if colour:
        kind = f"\x1b[1;{_COLOURS[finding.severity]}m{kind}\x1b[0m"
    lines = [f"{head}{kind} {finding.title}: {finding.message}"]
    shown = _clean(excerpt(finding.path, finding.line))
    if shown.strip():
        lines.append(f"{finding.line:>6} | {shown}")
        indent = len(shown) - len(shown.lstrip())
        start = max(indent, min(finding.column - 1, len(shown) - 1))
        lines.append(f"       | {' ' * start}{'^' * max(1, len(shown.rstrip()) - start)}")
    for item in finding.evidence:
        there = _clean(excerpt(item.path, item.line))
        if there.strip():
            lines.append(f"{item.line:>6} | {there}   <- {item.what}")
    if finding.mend:
        lines.append(f"       = mend: {finding.mend}")
    return "\n".join([*lines, ""])


def _clean(line: str) -> str:
    # a file's control characters must not reach the terminal
    plain = "".join(c if c.isprintable() else " " for c in line.expandtabs(4))
    return plain if len(plain) <= 160 else plain[:157] + "..."


def _summary(findings: Sequence[Finding], files: int) -> str:
    looked = f"{files} file{'s' if files != 1 else ''}"
    if not findings:
        return f"{looked}: no fault found."
    counts = {kind: sum(item.severity == kind for item in findings) for kind in _COLOURS}
    said = ", ".join(
        f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in counts.items() if count
    )
    return f"{looked}: {said}. Run `gradaccum explain {findings[0].code}` for the first."
