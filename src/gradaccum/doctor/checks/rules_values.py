"""What torch refuses or computes otherwise than meant: sparse, complex, padded, dropped values."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.named import masked_mean
from gradaccum.doctor.checks.origin import made
from gradaccum.doctor.checks.patterns import divides_by_all, squares_gradient
from gradaccum.doctor.checks.story import place_of
from gradaccum.doctor.checks.weights import Series, close

__all__ = ["RULES"]


def sparse_norm(context: Context) -> Iterator[Hit]:
    """GA410: a clip by norm that was refused, with a sparse gradient among what it was given."""
    refused = [
        e
        for e in context.trace.events
        if e.kind == "clip" and e.get("via") == "norm" and e.get("sparse") and e.get("failed")
    ]
    if refused:
        yield from hit(
            "GA410",
            refused[0],
            "a sparse gradient is among those that this clip was given, and torch refuses to take "
            f"its norm: nothing was clipped ({plural(len(refused), 'call')} in what was looked at)",
        )


def other_masks(context: Context) -> Iterator[Hit]:
    """GA505."""
    events = context.trace.events
    made = [e for e in events if e.kind == "checkpoint" and not e.get("preserve", True)]
    later = [e for e in events if made and e.kind == "backward" and e.n > made[0].n]
    if later:  # without a backward nothing is computed again
        names = ", ".join(f"`{name}`" for name in made[0].get("drops", ())[:3])
        yield from hit(
            "GA505",
            made[0],
            f"{names} draws a mask inside a checkpoint that does not keep the state of the random "
            "numbers: backward computes it again with another mask, and so the gradient is not "
            f"that of the loss ({plural(len(made), 'checkpoint')} in what was looked at)",
            (later[0], "this backward draws the other masks"),
        )


def complex_norm(context: Context) -> Iterator[Hit]:
    """GA408: the run has complex gradients, and the source sums their squares."""
    trace = context.trace
    got = [p for p in trace.params if p.arrivals]
    narrow = [p for p in got if p.dtype.startswith("complex")]
    backwards = [e for e in trace.events if e.kind == "backward"]
    if not narrow or not backwards:
        return
    names = {p.name.rpartition(".")[2] for p in narrow if p.name}
    names -= {p.name.rpartition(".")[2] for p in got if p not in narrow}
    place = squares_gradient(place_of(backwards[-1]), names, all_of_them=len(narrow) == len(got))
    yield from hit(
        "GA408",
        place,
        f"the gradients are {narrow[0].dtype}, and a sum of the squares of complex numbers is no "
        "norm: they cancel",
        (backwards[-1], "these gradients are complex"),
    )


def padding_counted(context: Context) -> Iterator[Hit]:
    """GA207: sums over what counts, each divided by a number of all slots."""
    for window in [*context.story.windows, *context.story.open]:
        micros = context.story.micros(window)
        if len(micros) < 2 or not window.whole or context.handled(window) is not None:
            continue
        place = place_of(micros[-1])
        if len({place_of(event) for event in micros}) != 1:
            continue
        for one in context.series(window):
            slots = _slots(one)
            line = None if slots is None else divides_by_all(place)
            if slots is None or line is None:
                continue
            divisor, besides = slots
            total = sum(count or 0.0 for count in one.counts)
            counts = ", ".join(f"{count:g}" for count in one.counts[:6])
            yield from hit(
                "GA207",
                line,
                f"{counts} values count in the {len(micros)} micro-batches of an update, and each "
                f"sum is divided by all {divisor:g} slots: a value weighs "
                f"1/{divisor * besides:g} where 1/{total:g} is its share of the window",
                (micros[-1], "the backward of this loss"),
            )
            return


def _slots(one: Series) -> tuple[float, float] | None:
    """What each sum is divided by, where it is more than the values that it has, which vary.

    The second number is what the loss is divided by besides: 1, or the micro-batches.
    """
    if one.terms[0].reduction != "sum" or not one.known or len(set(one.counts)) < 2:
        return None
    found: set[tuple[float, float]] = set()
    for term, scale in zip(one.terms, one.scales, strict=True):
        divisors = [factor.value for factor in term.factors if factor.how == "div"]
        micros = float(len(one.terms))
        besides = micros if len(divisors) == 2 and micros in divisors else 1.0
        if besides != 1.0:
            divisors.remove(besides)
        if len(divisors) != 1 or not term.count or term.each is None:
            return None
        whole = divisors[0] == round(divisors[0]) and divisors[0] >= term.count
        if not whole or not close(abs(term.each) / scale * divisors[0] * besides, 1.0):
            return None
        found.add((divisors[0], besides))
    return found.pop() if len(found) == 1 else None


def mean_over_masked(context: Context) -> Iterator[Hit]:
    """GA207, as a note: a mean over all slots of what a mask has set to zero."""
    for window in context.story.windows:
        for event in context.story.micros(window):
            place = place_of(event)
            masked = [
                one
                for one in context.story.readings_of(event)
                if one.masked and one.reduction == "mean" and one.count and one.each
            ]
            line = masked_mean(place) if masked and place is not None else None
            if line is None:
                continue
            one = masked[0]
            share = one.count * abs(one.each) if one.count and one.each else 1.0
            if share > 0.999:
                continue
            yield from hit(
                "GA207",
                line,
                f"the mean is over all slots, of which {one.count:g} count: their mean weighs "
                f"{share:.3g}, and another share where the padding differs",
                (event, "the backward of this loss"),
                severity="note",
                mend="Divide by `mask.sum()` instead of taking the mean of all.",
            )
            return


def tokens_and_batches(context: Context) -> Iterator[Hit]:
    """GA202: sums divided by the count of the whole window, and by its micro-batches besides.

    A constant may equal one window's count by chance: windows of different counts must tell.
    """
    for line, windows in context.lines():
        told = [(w, t) for w, t in context.plain(windows) if context.one_line(w)]
        totals = [_twice(terms[0]) if len(terms) == 1 else None for _, terms in told]
        if None in totals or len(set(totals)) < 2:
            continue
        window = told[0][0]
        size, micros = len(window.fresh), context.story.micros(window)
        lines = made(place_of(micros[-1]))
        yield from hit(
            "GA202",
            lines[0][0] if lines else micros[-1],
            f"sums are divided by the {totals[0]:g} values of the whole window, and by its {size} "
            f"micro-batches as well: the update is 1/{size} of the mean "
            f"({plural(context.updates(windows), 'update')})",
            (micros[-1], "the backward of this loss"),
            (line, "the step"),
            mend="Divide by the values of the window alone.",
        )
        return


def _twice(one: Series) -> float | None:
    """The count of a window whose sums are divided by it, and by the micro-batches besides."""
    size, counts = len(one.terms), [count or 0.0 for count in one.counts]
    if size < 2 or not one.known or one.terms[0].reduction != "sum" or size not in one.divisors:
        return None
    parts = zip(counts, one.weights, strict=True)
    same = all(close(abs(weight) * sum(counts) * size, count) for count, weight in parts if count)
    return sum(counts) if same and close(one.total, 1 / size) else None


RULES = (
    mean_over_masked,
    tokens_and_batches,
    sparse_norm,
    other_masks,
    complex_norm,
    padding_counted,
)
