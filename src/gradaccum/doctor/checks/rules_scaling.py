"""GA2xx and the window's length: what the weights of an update say."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.source import gate_counts, microbatches
from gradaccum.doctor.checks.story import Window, inside, place_of, usual
from gradaccum.doctor.checks.weights import Series, close

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
    places = {place_of(event) for event in context.story.micros(window)}
    steps = {event.get("step") for event in context.story.micros(window)}
    return len(places) == 1 and steps == {None}


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
            count = len(window.fresh)
            last = context.story.micros(window)[-1]
            whole = [one for one in terms if one.known and _undivided(one)]
            if len(whole) == len(terms) == 1 and context.are_micros(window, line):
                yield from hit(
                    "GA201",
                    last,
                    f"each of the {count} micro-batches of an update weighs 1, not 1/{count}: "
                    f"the update is {count} times the mean"
                    f" ({plural(context.updates(windows), 'update')})",
                    (line, f"one update for all {count} micro-batches"),
                )
                context.wrong.append(window)
                break
            beside = _beside(terms, count)
            if beside is not None:
                right, other = beside
                yield from hit(
                    "GA201",
                    last,
                    f"one term of the loss is divided by the {count} micro-batches, another is "
                    f"not: `{other.terms[0].name}` weighs {_figure(other.weights[0])} in each and "
                    f"{_figure(other.total)} in the update, `{right.terms[0].name}` "
                    f"{_figure(right.weights[0])} and {_figure(right.total)}",
                    (line, f"one update for {count} micro-batches"),
                )
                break


def _undivided(one: Series) -> bool:
    """A mean, or a sum over its own count, that no factor scales."""
    return all(close(abs(weight), 1.0) for weight in one.weights) and (
        one.terms[0].reduction == "mean" or one.terms[0].masked
    )


def _beside(terms: list[Series], count: int) -> tuple[Series, Series] | None:
    """A term that adds up to 1 over the window, and one that each micro-batch adds in full."""
    known = [one for one in terms if one.known]
    right = [
        one for one in known if close(one.total, 1.0) and all(abs(w) < 0.99 for w in one.weights)
    ]
    for one in known:
        full = all(close(abs(weight), 1.0) for weight in one.weights)
        if right and full and one.terms[0].reduction in ("mean", "none"):
            return right[0], one
        divided = [other for other in right if other.divided_by(count)]
        if divided and one not in right and not one.terms[0].factors:
            return divided[0], one
    return None


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
            if twice:
                yield from hit(
                    "GA202",
                    context.story.micros(window)[-1],
                    f"the loss is divided by {count} twice: each micro-batch weighs "
                    f"1/{count * count} instead of 1/{count}"
                    f" ({plural(context.updates(windows), 'update')})",
                    (line, f"one update for {count} micro-batches"),
                )
                context.wrong.append(window)
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
            yield from hit(
                "GA203",
                micros[-1],
                f"micro-batches with {few:g} to {many:g} loss terms weigh the same "
                f"({_figure(abs(one.weights[0]))}), so that a term of the smallest weighs "
                + (f"{many / few:.3g} times as much as one of the largest" if few else "nothing"),
                (window.line, "the update of the window"),
            )


def undefined_mean(context: Context) -> Iterator[Hit]:
    """GA203: a micro-batch of which nothing counts has no mean."""
    for window in [*context.story.windows, *context.story.open]:
        micros = context.story.micros(window)
        if len(micros) < 2:
            continue
        for event in micros:
            loss = event.get("loss")
            reading = context.story.readings.get(event.get("b"))
            if not isinstance(loss, float) or not math.isnan(loss) or reading is None:
                continue
            others = [m for m in micros if place_of(m) == place_of(event)]
            fine = [
                m
                for m in others
                if isinstance(m.get("loss"), float) and math.isfinite(m.get("loss"))
            ]
            terms = [t for m in fine for t in context.story.readings_of(m)]
            if fine and any(term.masked for term in terms):
                number = micros.index(event) + 1
                yield from hit(
                    "GA203",
                    event,
                    f"the loss of micro-batch {number} of {len(micros)} is not a number: none of "
                    "its terms counts, and a mean of nothing is 0/0",
                    severity="error",
                )
                return


def wrong_length(context: Context) -> Iterator[Hit]:
    """GA303, GA302, GA204: windows that are not as long as what their loss is divided by."""
    for line, windows in context.lines():
        told = [
            (window, one.divisor, len(window.fresh))
            for window, terms in _plain(context, windows)
            for one in terms[:1]
            if _one_line(context, window)
        ]
        sizes = [(size, divisor) for _, divisor, size in told if divisor]
        if not sizes or len(sizes) != len(told):
            continue
        divisors = {divisor for _, divisor in sizes}
        if len(divisors) != 1:
            continue
        every = divisors.pop()
        lengths = [size for size, _ in sizes]
        if all(length == every for length in lengths):
            continue
        micro = context.story.micros(told[0][0])[-1]
        evidence = (micro, f"the loss is divided by {every}")
        yield from _judge(context, line, windows, lengths, every, evidence, told[0][0])


def _judge(context, line, windows, lengths, every, evidence, first):  # type: ignore[no-untyped-def]
    short = [length for length in lengths if length < every]
    long = [length for length in lengths if length > every]
    shown = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
    if windows[0].step is not None and any(inside(w.step, context.story) for w in windows if w.step):
        yield from hit(
            "GA102",
            line,
            f"the optimizer steps inside every backward, so nothing accumulates: updates of "
            f"{shown} micro-batches, while the loss is divided by {every}",
            evidence,
        )
        return
    full = lengths.count(every)
    if long and (full or not short):
        yield from hit(
            "GA302",
            line,
            f"updates hold {shown} micro-batches while the loss is divided by {every}: what an "
            "epoch leaves over is added to the next epoch's first window, which is "
            f"{max(long) / every:.3g} times the mean",
            evidence,
        )
        context.settled.add(line)
    elif lengths[0] < every and full >= 1 and full >= len(lengths) - lengths.count(lengths[0]):
        if len(lengths) > 1:
            yield from hit(
                "GA303",
                line,
                f"updates hold {shown} micro-batches while the loss is divided by {every}: the "
                f"first is {lengths[0]}/{every} of the mean",
                evidence,
            )
            context.settled.add(line)
    elif short and full and not long:
        yield from hit(
            "GA204",
            line,
            f"the last, short window of {short[0]} is divided by {every}: its update is "
            f"{short[0]}/{every} of the mean"
            f" ({plural(len(short), 'update')} of {len(lengths)} that were looked at)",
            evidence,
        )
        context.settled.add(line)
    elif short and len(lengths) > 1 and max(lengths) >= 1 and context.gated(first, line):
        yield from hit(
            "GA303",
            line,
            f"updates hold {shown} micro-batches while the loss is divided by {every}",
            evidence,
        )
        context.settled.add(line)
    elif len(lengths) == 1 and lengths[0] >= 2:
        yield from hit(
            "GA204",
            line,
            f"the window of {lengths[0]} micro-batches is divided by {every}: the update is "
            f"{lengths[0]}/{every} of the mean",
            evidence,
        )


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
            line,
            f"updates hold {shown} micro-batches: the test for the step is by remainder, and what "
            "it divides by changes from one to the next",
        )


__all__ += ["microbatches"]
RULES = (divided_twice, not_divided, mean_of_means, undefined_mean, wrong_length, irregular)
