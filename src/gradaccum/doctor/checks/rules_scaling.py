"""GA2xx and the window's length: what the weights of an update say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.origin import divided_at, divided_by_count, made
from gradaccum.doctor.checks.patterns import divided_late
from gradaccum.doctor.checks.source import gate, gate_counts, gate_divides
from gradaccum.doctor.checks.story import Window, inside, place_of, usual
from gradaccum.doctor.checks.weights import Series, close
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]


def _plain(context: Context, windows: list[Window]) -> list[tuple[Window, list[Series]]]:
    """Windows whose weights are those of their graphs."""
    found = []
    for window in windows:
        terms = context.series(window)
        if window.whole and terms and context.handled(window) is None and not window.stale:
            found.append((window, terms))
    return found


def _one_line(context: Context, window: Window) -> bool:
    return len({place_of(event) for event in context.story.micros(window)}) == 1


def not_divided(context: Context) -> Iterator[Hit]:
    """GA201."""
    for line, windows in context.lines():
        told = _plain(context, windows)
        alike = [
            (window, terms)
            for window, terms in told
            if len(window.fresh) == usual(windows) >= 2 and _one_line(context, window)
        ]
        for window, terms in alike:
            late = divided_late(place_of(context.story.micros(window)[-1]))
            why = "divided late" if late else context.are_micros(window, line)
            whole = [one for one in terms if one.known and _undivided(one, why)]
            shared = _stepped_between(context, window)
            alone = len(whole) == len(terms) == 1
            if why and not shared and (alone or _none_divided(terms, len(window.fresh))):
                yield from _whole(context, line, windows, window, late)
                context.wrong += [(other, 1 / len(other.fresh), "") for other, _ in alike]
                break
            if beside := _beside(terms, len(window.fresh), bool(why)):
                yield from _partly(context, window, *beside)
                path = beside[1].path
                context.wrong += [(other, 1 / len(other.fresh), path) for other, _ in alike]
                break
    for window in context.story.open:
        terms = context.series(window)
        if len(window.fresh) >= 2 and window.whole and terms and _one_line(context, window):
            sure = bool(context.are_micros(window, None))
            if beside := _beside(terms, len(window.fresh), sure):
                yield from _partly(context, window, *beside)
                break


def _stepped_between(context: Context, window: Window) -> bool:
    """Whether another optimizer has stepped on this window's micro-batches before it was full."""
    micros = context.story.micros(window)
    return any(
        event.get("optimizer") != window.optimizer
        and micros[0].n < event.n < micros[-1].n
        and any(set(window.fresh) & set(g["backwards"]) for g in event.get("used", ()))
        for event in window.of("step")
    )


def _whole(
    context: Context, line: Place, windows: list[Window], window: Window, late: Place | None
) -> list[Hit]:
    count = len(window.fresh)
    last = context.story.micros(window)[-1]
    message = (
        f"each of the {count} micro-batches of an update weighs 1, not 1/{count}: "
        f"the update is {count} times the mean ({plural(context.updates(windows), 'update')})"
    )
    if late is not None:
        message += "; the loss is divided only after its backward has run"
    return hit(
        "GA201",
        late or last,
        message,
        (last, "backward of the undivided loss"),
        (line, f"one update for all {count} micro-batches"),
    )


def _partly(context: Context, window: Window, right: Series, other: Series) -> list[Hit]:
    count = len(window.fresh)
    last = context.story.micros(window)[-1]
    composed = divided_at(place_of(last))
    return hit(
        "GA201",
        composed or last,
        f"over the {count} micro-batches one term of the loss adds up to its mean, another is not "
        f"divided: `{other.terms[0].name}` weighs {_figure(other.weights[0])} in each and "
        f"{_figure(other.total)} in all, `{right.terms[0].name}` {_figure(right.weights[0])} and "
        f"{_figure(right.total)}",
        (last if composed else None, "the backward of this loss"),
        (window.line, f"one update for {count} micro-batches"),
        severity="warning" if other.terms[0].factors else "",
    )


def _undivided(one: Series, why: str) -> bool:
    """A mean, or a sum over its own count, that no factor scales."""
    mean = one.terms[0].reduction == "mean" or one.terms[0].masked
    mean = mean or why == "divided elsewhere"
    return (
        mean
        and all(close(abs(weight), one.weights[0]) for weight in one.weights)
        and (close(abs(one.weights[0]), 1.0) or why == "divided elsewhere")
    )


def _none_divided(terms: list[Series], count: int) -> bool:
    """Whether no term of several is divided by the micro-batches, and one counts in full.

    What may be a division by the micro-batches leaves it open.
    """
    if len(terms) < 2 or not all(one.known and any(one.weights) for one in terms):
        return False
    steady = all(close(w, one.weights[0]) for one in terms for w in one.weights)
    means = all(one.terms[0].reduction in ("mean", "none") for one in terms)
    if not steady or not means or any(_may_divide(one, count) for one in terms if _scaled(one)):
        return False
    return any(close(one.weights[0], 1.0) and not one.terms[0].factors for one in terms)


def _scaled(one: Series) -> bool:
    return bool(one.terms[0].factors)


def _beside(terms: list[Series], count: int, sure: bool) -> tuple[Series, Series] | None:
    """A term that adds up to 1 over the window, and one that each micro-batch adds in full.

    Args:
        terms: of the window.
        count: its micro-batches.
        sure: whether that is what they are. If not, a coefficient 1/count is only a coefficient.
    """
    known = [one for one in terms if one.known]
    right = [
        one for one in known if close(one.total, 1.0) and all(abs(w) < 0.99 for w in one.weights)
    ]
    if not sure:
        right = [one for one in right if count not in one.shares or count in one.divisors]
    for one in known:
        full = all(close(abs(weight), 1.0) for weight in one.weights)
        if right and full and one.terms[0].reduction in ("mean", "none"):
            return right[0], one
        divided = [other for other in right if other.divided_by(count)]
        if divided and one not in right and not one.terms[0].factors:
            return divided[0], one
        beside = [other for other in divided if count in other.divisors]
        same = all(close(weight, one.weights[0]) for weight in one.weights)
        if beside and sure and same and one.weights[0] and not _may_divide(one, count):
            return beside[0], one
    return None


def _may_divide(one: Series, count: int) -> bool:
    """Whether something on the way to a term may be its division by the micro-batches."""
    return count in one.divisors | one.shares or bool(one.divisors)


def _figure(value: float) -> str:
    return f"{value:.3g}"


def divided_twice(context: Context) -> Iterator[Hit]:
    """GA202."""
    for line, windows in context.lines():
        for window, terms in _plain(context, windows):
            count = len(window.fresh)
            if count < 2 or count != usual(windows):
                continue
            twice = [
                one
                for one in terms
                if one.known and one.divided_by(count) >= 2 and close(one.total, 1 / count)
            ]
            # A mean over as many heads as there are micro-batches is a division of its own.
            if twice and len(twice) == len(terms) and not close(sum(o.total for o in twice), 1.0):
                last = context.story.micros(window)[-1]
                yield from hit(
                    "GA202",
                    divided_at(place_of(last)) or last,
                    f"the loss is divided by {count} twice: each micro-batch weighs "
                    f"1/{count * count} instead of 1/{count}"
                    f" ({plural(context.updates(windows), 'update')})",
                    (line, f"one update for {count} micro-batches"),
                )
                context.wrong += [
                    (other, float(count), "")
                    for other, _ in _plain(context, windows)
                    if len(other.fresh) == count
                ]
                break


def mean_of_means(context: Context) -> Iterator[Hit]:
    """GA203."""
    seen = set()
    for window in [*context.story.windows, *context.story.open]:
        micros = context.story.micros(window)
        if len(window.fresh) < 2 or not micros or not window.whole:
            continue
        place = place_of(micros[-1])
        for one in context.series(window):
            counts = one.counts
            uneven = one.terms[0].masked and len(set(counts)) > 1 and None not in counts
            same = one.known and all(close(w, one.weights[0]) for w in one.weights)
            if not uneven or not same or place in seen or not one.weights[0]:
                continue
            if place_of(micros[0]) != place:
                continue
            seen.add(place)
            few, many = min(c for c in counts if c is not None), max(c or 0 for c in counts)
            lines = made(place)
            yield from hit(
                "GA203",
                lines[0][0] if lines and not gate(lines[0][0], place) else micros[-1],
                f"micro-batches with {few:g} to {many:g} loss terms weigh the same "
                f"({_figure(abs(one.weights[0]))}), so that a term of the smallest weighs "
                + (f"{many / few:.3g} times as much as one of the largest" if few else "nothing"),
                (micros[-1] if lines else None, "the backward of this loss"),
                (window.line, "the update of the window"),
            )


def undefined_mean(context: Context) -> Iterator[Hit]:
    """GA203, or GA206 where the gradient too is spoilt: nothing of a micro-batch counts."""
    found: list[tuple[int, int, Event]] = []
    for window in [*context.story.windows, *context.story.open]:
        micros = context.story.micros(window)
        for number, event in enumerate(micros, 1):
            if len(micros) >= 2 and _of_nothing(context, event, micros):
                found.append((number, len(micros), event))
    spoilt = [one for one in found if _spoils(one[2])]
    if not found:
        return
    number, of, event = (spoilt or found)[0]
    line = divided_by_count(place_of(event)) if spoilt else None
    lines = made(place_of(event))
    yield from hit(
        "GA206" if spoilt else "GA203",
        line or (lines[0][0] if len(lines) == 1 else event),
        f"the loss of micro-batch {number} of {of} is not a number: none of its terms counts, and "
        + ("a sum divided by their count is 0/0" if line else "a mean of nothing is 0/0")
        + (", which makes the gradients of the whole window NaN" if spoilt else ""),
        (event, "the backward of this loss"),
        severity="error",
    )


def _of_nothing(context: Context, event: Event, micros: list[Event]) -> bool:
    """Whether a loss is NaN for want of terms, beside others of its line that are finite."""
    loss, reading = event.get("loss"), context.story.readings.get(event.get("b"))
    if not isinstance(loss, float) or not math.isnan(loss) or reading is None:
        return False
    values = [m.get("loss") for m in micros if place_of(m) == place_of(event)]
    return any(isinstance(one, float) and math.isfinite(one) for one in values) and any(
        term.count == 0 or (term.weight is None and "not finite" in term.why)
        for term in reading.terms
    )


def _spoils(event: Event) -> bool:
    norm = event.get("norm")
    return isinstance(norm, float) and math.isnan(norm)


def wrong_length(context: Context) -> Iterator[Hit]:
    """GA303, GA302, GA204: windows that are not as long as what their loss is divided by."""
    for line, windows in context.lines():
        if line in context.settled:
            continue
        told = [
            (window, _means(terms))
            for window, terms in _plain(context, windows)
            if _one_line(context, window)
        ]
        if not told or not all(terms for _, terms in told):
            continue
        micro = context.story.micros(told[0][0])[-1]
        lengths = [len(window.fresh) for window, _ in told]
        hooked = all(inside(w.step, context.story) for w, _ in told if w.step is not None)
        every = _divisor([terms for _, terms in told], lengths, line, place_of(micro), hooked)
        if every is None or all(length == every for length in lengths):
            continue
        seen = _Lengths(line, lengths, every, micro, told[0][0])
        found = _judge(context, windows, seen)
        if found:
            context.wrong += [
                (window, every / len(window.fresh), one.path)
                for window, terms in told
                for one in terms
                if every in one.divisors | one.shares
            ]
        yield from found


def _divisor(
    told: list[list[Series]],
    lengths: list[int],
    line: Place,
    backward: Place | None,
    hooked: bool,
) -> int | None:
    """The number of micro-batches that a window's loss is divided by; `None` if it is not known.

    What divides a loss may be anything's number: heads, a temperature, a penalty's weight. It is
    that of the micro-batches where most windows have as many, where the first has and the rest of
    an epoch is added to the others, or where the source divides by what the step's test counts to.
    A coefficient is believed only for the last reason. Where backward itself steps (`hooked`) there
    are none of these, and a loss of one term is taken at its word.
    """
    divided = frozenset.intersection(*(_shared(terms, "divisors") for terms in told))
    counts = Counter(lengths)
    most = max(counts.values())
    usual_ones = [n for n in divided if counts[n] == most]
    if not usual_ones and lengths[0] in divided and min(lengths) == lengths[0]:
        usual_ones = [lengths[0]]
    if not usual_ones and hooked and all(len(terms) == 1 for terms in told):
        usual_ones = list(divided)
    if len(usual_ones) == 1:
        return usual_ones[0]
    scaled = frozenset.intersection(*(_shared(terms, "shares") for terms in told))
    proven = [n for n in divided if gate_divides(line, backward, n)]
    proven += [n for n in scaled - divided if gate_divides(line, backward, None)]
    return proven[0] if len(proven) == 1 else None


def _shared(terms: list[Series], how: str) -> frozenset[int]:
    """Numbers for all terms of a loss; else those of a term beside which others are not divided."""
    each: list[frozenset[int]] = [getattr(one, how) for one in terms]
    return frozenset.intersection(*each) or (
        frozenset().union(*each) if how == "divisors" else frozenset()
    )


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Windows of one update line beside the number that their loss is divided by."""

    line: Place
    sizes: list[int]
    every: int
    micro: Event
    first: Window

    @property
    def shown(self) -> str:
        """The sizes, as far as they are worth reading."""
        return ", ".join(map(str, self.sizes[:8])) + (", ..." if len(self.sizes) > 8 else "")

    def hit(self, code: str, rest: str) -> list[Hit]:
        """A finding at the condition that decides when to update, or at the update."""
        message = (
            f"updates hold {self.shown} micro-batches while the loss is divided by "
            f"{self.every}{rest}"
        )
        condition = None if code == "GA102" else gate(self.line, place_of(self.micro))
        return hit(
            code,
            condition or self.line,
            message,
            (self.micro, f"the loss is divided by {self.every}"),
            (self.line if condition else None, "the step"),
        )

    def short(self, context: Context, sizes: list[int]) -> list[Hit]:
        """Tails that were divided by more than they hold: seen to happen, so more than advice."""
        every, kinds = self.every, sorted(set(sizes))
        parts = ", ".join(f"{size}/{every}" for size in kinds)
        ones = "short one is" if len(sizes) == 1 else "short ones are"
        evidence = []
        for size in kinds[:3]:
            found = [w for w in context.story.windows if w.line == self.line]
            micros = [context.story.micros(w) for w in found if len(w.fresh) == size]
            what = (
                f"each micro-batch of an update of {size} weighs {_figure(1 / every)} and should "
                f"weigh {'1' if size == 1 else f'1/{size}'}: it is {size}/{every} of the mean"
            )
            evidence.append((micros[0][-1] if micros and micros[0] else self.micro, what))
        return hit(
            "GA204",
            self.line,
            f"updates hold {self.shown} micro-batches while the loss is divided by {every}: the "
            f"{ones} {parts} of the mean ({plural(len(sizes), 'update')})",
            *evidence,
            severity="warning",
        )


def _judge(context: Context, windows: list[Window], seen: _Lengths) -> list[Hit]:
    sizes, every = seen.sizes, seen.every
    full, longest = sizes.count(every), max(sizes)
    short = [size for size in sizes if size < every]
    if any(window.step is not None and inside(window.step, context.story) for window in windows):
        return seen.hit(
            "GA102", ": the optimizer steps inside every backward, so nothing accumulates"
        )
    if longest > every and full:
        context.settled.add(seen.line)
        return seen.hit(
            "GA302",
            ": what an epoch leaves over is added to the next epoch's first window, which is "
            f"{longest / every:.3g} times the mean",
        )
    if short and full and sizes[0] < every and full + sizes.count(sizes[0]) >= len(sizes):
        context.settled.add(seen.line)
        return seen.hit("GA303", f": the first is {sizes[0]}/{every} of the mean")
    if short and full and longest == every:
        return seen.short(context, short)
    if short and len(sizes) > 1 and context.gated(seen.first, seen.line):
        context.settled.add(seen.line)
        return seen.hit("GA303", "")
    if len(sizes) == 1 and sizes[0] >= 2 and short:
        return seen.short(context, sizes)
    return []


def _means(terms: list[Series]) -> list[Series]:
    """Terms whose weight is that of a mean; a sum's own divisor may be anything's number."""
    kinds = ("mean", "none")
    found = [one for one in terms if one.terms[0].reduction in kinds or one.terms[0].masked]
    return [one for one in found if one.known and any(one.weights)]


def irregular(context: Context) -> Iterator[Hit]:
    """GA303: a test by remainder whose divisor moves."""
    for line, windows in context.lines():
        if line in context.settled or len(windows) < 4:
            continue
        if not all(window.whole and _one_line(context, window) for window in windows):
            continue
        lengths = [len(window.fresh) for window in windows]
        inner = set(lengths[1:])
        if len(inner) < 3 or not context.gated(windows[0], line) or not gate_counts(line):
            continue
        shown = ", ".join(map(str, lengths[:8]))
        yield from hit(
            "GA303",
            context.gate(windows[-1]) or line,
            f"updates hold {shown} micro-batches: the test for the step is by remainder, and what "
            "it divides by changes from one to the next",
            (line, "the step"),
        )


RULES = (divided_twice, not_divided, mean_of_means, undefined_mean, wrong_length, irregular)
