"""From a place in a trace to a finding with the catalogue's words."""

from __future__ import annotations

from dataclasses import dataclass

from gradaccum.doctor.trace.model import Event, Place
from gradaccum.faults import find
from gradaccum.records.finding import Evidence, Finding

__all__ = ["Hit", "figure", "finding", "hit", "plural"]


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule found."""

    code: str
    place: Place
    message: str
    evidence: tuple[tuple[Place, str], ...] = ()
    severity: str = ""
    """Where it is not the catalogue's."""
    mend: str = ""
    """Where it is not the catalogue's."""


def hit(
    code: str,
    where: Event | Place | None,
    message: str,
    *evidence: tuple[Event | Place | None, str],
    severity: str = "",
    mend: str = "",
) -> list[Hit]:
    """One finding, or none where the line is not known."""
    place = _place(where)
    if place is None:
        return []
    lines = []
    for thing, what in evidence:
        spot = _place(thing)
        if spot is not None and (spot, what) not in lines:
            lines.append((spot, what))
    return [Hit(code, place, message, tuple(lines), severity, mend)]


def _place(where: Event | Place | None) -> Place | None:
    if isinstance(where, Event):
        return where.user or where.at
    return where


def finding(one: Hit) -> Finding:
    """The record that linter and doctor share."""
    fault = find(one.code)
    assert fault is not None, one.code
    return Finding(
        one.code,
        one.severity or fault.severity,
        one.place.path,
        one.place.line,
        1,
        fault.title,
        one.message,
        tuple(Evidence(place.path, place.line, what) for place, what in one.evidence),
        one.mend or fault.mend,
    )


def figure(value: float) -> str:
    """A weight, as short as it can be read."""
    return f"{value:.3g}"


def plural(count: int, word: str) -> str:
    """`1 update`, `2 updates`."""
    if count == 1:
        return f"1 {word}"
    return f"{count:,} {word[:-1]}ies" if word.endswith("ry") else f"{count:,} {word}s"
