"""The weight that each micro-batch's loss had in its update, and the one it should have had."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gradaccum.doctor.checks.story import Story, Window, usual
from gradaccum.doctor.reading import Term
from gradaccum.doctor.trace.model import Event
from gradaccum.records.diagnosis import TermSeen

__all__ = ["Series", "chart", "close", "handled", "scales", "series"]


@dataclass(frozen=True, slots=True)
class Series:
    """One loss term through the micro-batches of a window."""

    path: str
    terms: tuple[Term, ...]
    scales: tuple[float, ...]
    """The scaler's factor at each, which unscaling takes out again."""

    @property
    def weights(self) -> list[float]:
        """Weight of the term's mean at each micro-batch; `nan` where unknown."""
        return [
            math.nan if term.weight is None else term.weight / scale
            for term, scale in zip(self.terms, self.scales, strict=True)
        ]

    @property
    def total(self) -> float:
        """Sum of the weights: 1 for a mean over the window, N if nothing divides."""
        return math.fsum(abs(weight) for weight in self.weights)

    @property
    def counts(self) -> list[float | None]:
        """Loss values that counted, at each micro-batch."""
        return [term.count for term in self.terms]

    def divided_by(self, number: int) -> int:
        """How often a factor 1/number stands on the way to the term, at every micro-batch.

        A coefficient and a division are not the same thing twice, so the two are counted apart.
        """
        return min(max(_times(term, how, number) for how in ("div", "mul")) for term in self.terms)

    @property
    def divisors(self) -> frozenset[int]:
        """Whole numbers, 2 or more, that something divides the loss by at every micro-batch."""
        return _common(self.terms, "div")

    @property
    def shares(self) -> frozenset[int]:
        """Those whose inverse is a coefficient at every micro-batch: perhaps a division."""
        return _common(self.terms, "mul")

    @property
    def known(self) -> bool:
        """Whether every weight is known."""
        return all(term.weight is not None for term in self.terms)


def _times(term: Term, how: str, number: int) -> int:
    values = [one.value for one in term.factors if one.how == how and one.value]
    return sum(close(value if how == "div" else 1 / value, number) for value in values)


def _common(terms: tuple[Term, ...], how: str) -> frozenset[int]:
    found = None
    for term in terms:
        values = [one.value for one in term.factors if one.how == how and one.value]
        numbers = [value if how == "div" else 1 / value for value in values]
        whole = {round(n) for n in numbers if math.isfinite(n) and close(n, round(n))}
        found = whole if found is None else found & whole
    return frozenset(number for number in found or () if number >= 2)


def close(first: float, second: float) -> bool:
    """Whether two weights are the same but for rounding, in bfloat16 at worst."""
    return abs(first - second) <= 4e-3 * abs(second)


def scales(story: Story) -> dict[int, float]:
    """For each backward the factor that a scaler has put on its loss; 1 where none has."""
    found: dict[int, float] = {}
    waiting = False
    for event in story.trace.events:
        if event.kind == "scale":
            waiting = True
        elif event.kind == "backward":
            number = event.get("b")
            reading = story.readings.get(number)
            if waiting and reading is not None and reading.terms:
                first = [term.factors[0] for term in reading.terms if term.factors]
                if first and first[0].how == "mul" and len(first) == len(reading.terms):
                    found[number] = first[0].value
            waiting = False
    return found


def series(story: Story, window: Window, factor: dict[int, float]) -> list[Series]:
    """The terms that every micro-batch of a window has, each with its weights."""
    numbers = [b for b in window.fresh if b in story.readings]
    if len(numbers) != len(window.fresh) or not numbers:
        return []
    readings = [story.readings[b] for b in numbers]
    if any(not reading.terms for reading in readings):
        return []
    found = []
    for term in readings[0].terms:
        same = [
            [other for other in reading.terms if (other.path, other.name) == (term.path, term.name)]
            for reading in readings
        ]
        if all(len(others) == 1 for others in same):
            given = tuple(factor.get(b, 1.0) for b in numbers)
            found.append(Series(term.path, tuple(others[0] for others in same), given))
    return found


def handled(window: Window) -> Event | None:
    """Where the script itself changed gradients before the update, so that weights are its own."""
    for event in window.of("write"):
        if event.get("target") == "grad" and set(event.get("params", ())) & window.params:
            return event
    return None


def chart(
    story: Story, factor: dict[int, float], wrong: Iterable[tuple[Window, float, str]] = ()
) -> dict[int, tuple[TermSeen, ...]]:
    """Terms by backward, with the weight each should have had.

    Args:
        story: the windows.
        factor: a scaler's factor at each backward.
        wrong: windows, what weights should have been multiplied by, and of which term (its path).
    """
    mistaken: dict[int, list[tuple[float, str]]] = {}
    for window, times, path in [*wrong, *_left_over(story, factor)]:
        mistaken.setdefault(id(window), []).append((times, path))
    found: dict[int, tuple[TermSeen, ...]] = {}
    for window in [*story.windows, *story.open]:
        touched = handled(window)
        expected = _expected(story, window, factor, mistaken.get(id(window), []))
        for number in window.fresh:
            reading = story.readings.get(number)
            if reading is None or number in found:
                continue
            found[number] = tuple(
                _seen(term, factor.get(number, 1.0), expected.get((number, term.path)), touched)
                for term in reading.terms
            )
    return found


def _left_over(story: Story, factor: dict[int, float]) -> list[tuple[Window, float, str]]:
    """Short windows that no step used: each ought to have been an update like the others."""
    length = usual(story.windows)
    full = {
        one.path: one.total
        for window in story.windows
        if len(window.fresh) == length and window.whole
        for one in series(story, window, factor)
        if one.known
    }
    return [
        (window, full[one.path] / one.total, one.path)
        for window in story.open
        if len(window.fresh) < length and window.whole
        for one in series(story, window, factor)
        if one.known and one.total and one.path in full
    ]


def _seen(term: Term, scale: float, expected: float | None, touched: Event | None) -> TermSeen:
    weight = None if term.weight is None else term.weight / scale
    why = term.why
    if touched is not None and weight is not None:
        place = touched.user or touched.at
        where = "" if place is None else f" at line {place.line}"
        weight, why = None, f"the script changed the gradients itself{where}"
    return TermSeen(term.name, weight, expected, term.count, why)


def _expected(
    story: Story, window: Window, factor: dict[int, float], wrong: list[tuple[float, str]]
) -> dict[tuple[int, str], float]:
    """Each micro-batch's share: by its count where they are known, of what the update sums to."""
    found: dict[tuple[int, str], float] = {}
    if not window.whole:  # what it sums to was not seen
        return found
    for one in series(story, window, factor):
        if not one.known or not one.total:
            continue
        counts = [count for count in one.counts if count]
        alike = len(counts) != len(one.terms)
        shares = [1.0] * len(one.terms) if alike else counts
        times = [times for times, path in wrong if path in ("", one.path)]
        total = one.total * (times[0] if times else 1.0)
        for number, share, weight in zip(window.fresh, shares, one.weights, strict=True):
            sign = math.copysign(1.0, weight)
            found[number, one.path] = sign * total * share / math.fsum(shares)
    return found
