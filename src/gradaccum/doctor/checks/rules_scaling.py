"""GA2xx: what the weights of an update say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, figure, hit, plural
from gradaccum.doctor.checks.origin import computed, divided_at, divided_by_count, made
from gradaccum.doctor.checks.patterns import divided_late
from gradaccum.doctor.checks.source import gate
from gradaccum.doctor.checks.story import Window, place_of, usual
from gradaccum.doctor.checks.sums import window_in_one
from gradaccum.doctor.checks.weights import Series, close, series
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]


def not_divided(context: Context) -> Iterator[Hit]:
    """GA201."""
    for line, windows in context.lines():
        told = context.plain(windows)
        alike = [
            (window, terms)
            for window, terms in told
            if len(window.fresh) == usual(windows) >= 2 and context.one_line(window)
        ]
        for window, terms in alike:
            late = divided_late(place_of(context.story.micros(window)[-1]))
            why = "divided late" if late else context.are_micros(window, line)
            whole = [one for one in terms if one.known and _undivided(one, why)]
            shared = _stepped_between(context, window)
            alone = len(whole) == len(terms) == 1
            if why and not shared and (alone or _none_divided(terms, len(window.fresh))):
                others = [(w, t) for w, t in told if len(w.fresh) >= 2 and context.one_line(w)]
                whole_ones = [w for w, t in others if all(_weighs_one(one) for one in t)]
                long = others if not alone else [(w, ()) for w in whole_ones]
                yield from _whole(context, line, windows, window, late)
                context.wrong += [(other, 1 / len(other.fresh), "") for other, _ in long]
                break
            if beside := _beside(terms, len(window.fresh), bool(why)):
                yield from _partly(context, window, *beside)
                path = beside[1].path
                context.wrong += [(other, 1 / len(other.fresh), path) for other, _ in alike]
                break
        for window in windows if not alike else ():
            if apart := _apart(context, line, window):
                yield from apart
                break
    for window in context.story.open:
        terms = context.series(window)
        if len(window.fresh) >= 2 and window.whole and terms and context.one_line(window):
            sure = bool(context.are_micros(window, None))
            if beside := _beside(terms, len(window.fresh), sure):
                yield from _partly(context, window, *beside)
                break


def summed_in_one(context: Context) -> Iterator[Hit]:
    """GA201: the losses of a window are added up, differentiated together, and never divided."""
    for line, windows in context.lines():
        if any(len(w.fresh) != 1 or not w.whole or context.handled(w) for w in windows):
            continue
        micros = [context.story.micros(w)[0] for w in windows if context.story.micros(w)]
        count = window_in_one(place_of(micros[0])) if len(micros) == len(windows) else 0
        if count < 2:
            continue
        told = [context.story.readings_of(event) for event in micros]
        full = [terms for terms in told if len(terms) == count]
        scale = context.factor.get(micros[0].get("b", -1), 1.0)
        means = all(
            one.reduction == "mean" and one.weight is not None and close(abs(one.weight / scale), 1)
            for terms in full
            for one in terms
        )
        if len(full) < 2 or 2 * len(full) < len(told) or not means:
            continue
        yield from hit(
            "GA201",
            micros[0],
            f"the losses of {count} micro-batches are added up and differentiated together, each a "
            f"mean that weighs 1, not 1/{count}: the update is {count} times the mean "
            f"({plural(context.updates(windows), 'update')})",
            (line, f"one update for all {count} micro-batches"),
        )
        return


def _apart(context: Context, line: Place, window: Window) -> list[Hit]:
    """Losses with a backward of their own in every micro-batch, of which one is not divided."""
    by: dict[Place | None, list[int]] = {}
    for event in context.story.micros(window):
        by.setdefault(place_of(event), []).append(event.get("b"))
    count = len(next(iter(by.values()), ()))
    if len(by) < 2 or count < 2 or any(len(numbers) != count for numbers in by.values()):
        return []
    if not context.gated(window, line) or not window.whole or context.handled(window) is not None:
        return []
    terms: list[Series] = []
    places: list[Place | None] = []
    for place, numbers in by.items():
        part = series(context.story, replace(window, fresh=numbers), context.factor)
        terms += part
        places += [place] * len(part)
    found = _beside(terms, count, True)
    if found is None:
        return []
    right, other = found
    return hit(
        "GA201",
        places[[one is other for one in terms].index(True)],
        f"of the losses that each of the {count} micro-batches differentiates, one adds up to its "
        f"mean, and this one is not divided: `{other.terms[0].name}` weighs "
        f"{figure(other.weights[0])} in each and {figure(other.total)} in all, "
        f"`{right.terms[0].name}` {figure(right.weights[0])} and {figure(right.total)}",
        (places[[one is right for one in terms].index(True)], "the one that is divided"),
        (line, f"one update for {count} micro-batches"),
        severity="warning" if other.terms[0].factors else "",
    )


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
    lengths = sorted({len(w.fresh) for w in windows if w.whole and len(w.fresh) > 1})
    others = ", ".join(map(str, [n for n in lengths if n != count][:4]))
    message = (
        f"each of the {count} micro-batches of an update weighs 1, not 1/{count}: "
        f"the update is {count} times the mean ({plural(context.updates(windows), 'update')}"
        + (f", some of {others} micro-batches)" if others else ")")
    )
    if late is not None:
        message += "; the loss is divided only after its backward has run"
    return hit(
        "GA201",
        late or (last if place_of(last) is not None else line),
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
        f"divided: `{other.terms[0].name}` weighs {figure(other.weights[0])} in each and "
        f"{figure(other.total)} in all, `{right.terms[0].name}` {figure(right.weights[0])} and "
        f"{figure(right.total)}",
        (last if composed else None, "the backward of this loss"),
        (window.line, f"one update for {count} micro-batches"),
        severity="warning" if other.terms[0].factors else "",
    )


def _weighs_one(one: Series) -> bool:
    return one.known and all(close(abs(weight), 1.0) for weight in one.weights)


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


def divided_twice(context: Context) -> Iterator[Hit]:
    """GA202."""
    for line, windows in context.lines():
        for window, terms in context.plain(windows):
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
                    for other, _ in context.plain(windows)
                    if len(other.fresh) == count
                ]
                break


def mean_of_means(context: Context) -> Iterator[Hit]:
    """GA203."""
    found: dict[Place | None, list[tuple[Window, Series]]] = {}
    ragged: dict[Place | None, list[bool]] = {}
    for window in [*context.story.windows, *context.story.open]:
        micros = context.story.micros(window)
        if len(window.fresh) < 2 or not micros or not window.whole:
            continue
        place = place_of(micros[-1])
        for one in context.series(window):
            uneven = len(set(one.counts)) > 1 and None not in one.counts
            same = one.known and all(close(w, one.weights[0]) for w in one.weights)
            if place_of(micros[0]) != place or not same or not one.weights[0]:
                continue
            if uneven and (one.terms[0].masked or one.terms[0].reduction == "mean"):
                found.setdefault(place, []).append((window, one))
            ragged.setdefault(place, []).append(uneven and _apart_by(one) >= 2.0)
    for place, told in found.items():
        # a last batch that is shorter is everybody's; others in each window are not
        if not any(one.terms[0].masked for _, one in told):
            if not all(ragged[place]) or len(ragged[place]) < 2:
                continue
        else:
            told = [(window, one) for window, one in told if one.terms[0].masked]
        yield from _uneven(context, *max(told, key=lambda pair: _apart_by(pair[1])))


def _apart_by(one: Series) -> float:
    counts = [count for count in one.counts if count is not None]
    return max(counts) / min(counts) if min(counts) else math.inf


def _uneven(context: Context, window: Window, one: Series) -> list[Hit]:
    """The window in which the counts of a mean lie farthest apart."""
    last = context.story.micros(window)[-1]
    place = place_of(last)
    few, many = min(c for c in one.counts if c is not None), max(c or 0 for c in one.counts)
    line = computed(place)
    return hit(
        "GA203",
        line if line and not gate(line, place) else last,
        f"micro-batches with {few:g} to {many:g} loss terms weigh the same "
        f"({figure(abs(one.weights[0]))}), so that a term of the smallest weighs "
        + (f"{many / few:.3g} times as much as one of the largest" if few else "nothing"),
        (last if line else None, "the backward of this loss"),
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
    if not found:
        yield from _batch_of_nothing(context)
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


def _batch_of_nothing(context: Context) -> list[Hit]:
    """GA206: the same, of an update of one batch, where the source divides by a count."""
    alone = [m[0] for w in context.story.windows if len(m := context.story.micros(w)) == 1]
    for number, event in enumerate(alone):
        before = [e for e in alone[:number] if place_of(e) == place_of(event)]
        line = divided_by_count(place_of(event)) if before else None
        if line is None or not _of_nothing(context, event, [*before, event]) or not _spoils(event):
            continue
        return hit(
            "GA206",
            line,
            f"the loss of batch {number + 1} is not a number, after {len(before)} that were: "
            "nothing of it counts, a sum divided by its count is 0/0, and the step makes the "
            "weights NaN",
            (event, "the backward of this loss"),
            severity="error",
        )
    return []


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


RULES = (divided_twice, not_divided, summed_in_one, mean_of_means, undefined_mean)
