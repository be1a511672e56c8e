"""GA305, GA311, GA312: schedulers, beside the updates that they are meant for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.named import counts_epochs
from gradaccum.doctor.checks.source import same_loop
from gradaccum.doctor.checks.story import place_of, usual
from gradaccum.doctor.trace.model import Event

__all__ = ["RULES"]


def scheduled_too_often(context: Context) -> Iterator[Hit]:
    """GA305."""
    for _, windows in context.lines():
        number = windows[0].optimizer
        long = [w for w in windows if len(w.fresh) >= 2 and w.whole]
        bad = []
        for window in long:
            steps = [e for e in window.of("schedule") if e.get("optimizer") == number]
            first = context.story.micros(window)
            between = [e for e in steps if first and e.n > first[0].n]
            if between and len(steps) >= len(window.fresh) - 1 and len(steps) >= 1:
                if len(between) >= len(window.fresh) - 1:
                    bad.append((window, between))
        if bad and 2 * len(bad) >= len(long) and len({place_of(e) for e in bad[0][1]}) == 1:
            window, steps = bad[0]
            if len(steps) < 2 and len(bad) < 2 and len(window.fresh) > 2:
                continue
            yield from hit(
                "GA305",
                steps[0],
                f"the scheduler steps with every micro-batch, {len(window.fresh)} times an update "
                f"({plural(context.updates([w for w, _ in bad]), 'update')})",
                (window.line, f"the optimizer steps once for {len(window.fresh)} micro-batches"),
            )


def scheduled_past_a_skip(context: Context) -> Iterator[Hit]:
    """GA311."""
    events = context.trace.events
    skipped: Event | None = None
    for event in events:
        if (
            event.kind == "scaler_step"
            and event.get("stepped") is False
            and not event.get("failed")
        ):
            skipped = event
        elif event.kind in ("step", "backward"):
            skipped = None
        elif event.kind == "schedule" and skipped is not None and not event.get("failed"):
            yield from hit(
                "GA311",
                event,
                "the scheduler steps although the scaler has just skipped the optimizer's step: "
                "the schedule runs ahead of the updates",
                (skipped, "this step was skipped: the gradients were not finite"),
            )
            return


def planned_for_another_length(context: Context) -> Iterator[Hit]:
    """GA312."""
    events = context.trace.events
    for made in (e for e in events if e.kind == "scheduler"):
        steps = [
            e
            for e in events
            if e.kind == "schedule" and e.get("scheduler") == made.get("scheduler")
        ]
        total = made.get("total")
        if made.get("kind") == "OneCycleLR" and total and len(steps) > total:
            yield from hit(
                "GA312",
                made,
                f"the schedule was planned for {plural(total, 'step')}, and the loop makes more",
                (steps[total], "this step is refused"),
            )
            return
        again = _in_two_places(context, steps)
        if again:
            yield from again
            return
        if made.get("kind") == "CosineAnnealingLR" and total:
            yield from _rising_again(context, made, steps, total)
        if steps and context.trace.complete and not context.trace.error:
            found = list(_still_warming_up(context, made, steps))
            found = found or list(_in_microbatches(context, made, steps))
            found = found or _in_epochs(context, made, steps)
            yield from found or _stepped_by_epoch(context, made, steps)


def _in_two_places(context: Context, steps: list[Event]) -> list[Hit]:
    """One scheduler that two lines step, one right after the other each time."""
    places = [place_of(e) for e in steps]
    if len(steps) < 4 or len(set(places)) != 2 or places[0] == places[1]:
        return []
    pairs = list(zip(steps[::2], steps[1::2], strict=False))
    if any((place_of(a), place_of(b)) != (places[0], places[1]) for a, b in pairs):
        return []
    if any(a.n < e.n < b.n for a, b in pairs for e in context.steps):
        return []
    return hit(
        "GA312",
        steps[1],
        "the scheduler steps here as well as at another line, with no update between: it runs "
        f"twice as fast as it was planned ({plural(len(steps), 'step')} in what was looked at)",
        (steps[0], "it has just stepped here"),
        mend="Step it at one of the two lines.",
    )


def _rising_again(context: Context, made: Event, steps: list[Event], total: int) -> list[Hit]:
    """A cosine that has come to its end and goes on, back up and down again."""
    count = max(_made(context, steps), len(steps))
    if count < 2 * total or len(steps) <= total:
        return []
    return hit(
        "GA312",
        made,
        f"the schedule is at its end after {plural(total, 'step')}, and the loop makes {count:,}: "
        f"from there on the rate rises again, {count / total:.3g} half waves in all",
        (steps[0], "it steps here, perhaps for each batch where epochs were counted"),
    )


def _made(context: Context, steps: list[Event]) -> int:
    """Steps that a scheduler made in the whole run, as far as that is known."""
    others = {e.get("scheduler") for e in context.trace.events if e.kind == "schedule"}
    return context.trace.totals.get("schedule", 0) if len(others) == 1 else len(steps)


def _in_microbatches(context: Context, made: Event, steps: list[Event]) -> Iterator[Hit]:
    """A schedule as long as all micro-batches, which steps once an update."""
    windows = [w for w in context.story.windows if w.optimizer == made.get("optimizer")]
    size, count = usual(windows), _made(context, steps)
    backwards = context.trace.totals.get("backward", 0)
    if size < 2 or count < 2 or 2 * count > backwards:
        return
    planned = made.get("total") or _length(made, steps, count)
    if planned is None or not (planned == backwards or planned == count * size):
        return
    base, last = made.get("base"), steps[-1].get("lr")
    rate = "" if last is None else f", at a rate of {last:.3g}"
    rate += f" of {base:.3g}" if rate and base and made.get("kind") != "OneCycleLR" else ""
    yield from hit(
        "GA312",
        made,
        f"the schedule is as long as all {planned:,} micro-batches, but steps once an update: it "
        f"ends after {count:,} steps, {count / planned:.2f} of its way{rate}",
        (steps[-1], "the last step of the schedule"),
        (windows[-1].line, f"one update for {size} micro-batches"),
    )


def _in_epochs(context: Context, made: Event, steps: list[Event]) -> list[Hit]:
    """A schedule whose length is told in epochs, and which steps with every batch of one."""
    count, last = _made(context, steps), steps[-1].get("lr")
    length = counts_epochs(place_of(made), place_of(steps[-1]), count)
    updated = [e for e in context.steps if e.get("optimizer") == made.get("optimizer")]
    beside = bool(updated) and same_loop(place_of(updated[-1]), place_of(steps[-1]))
    if not length or not beside or count < 4 or len({place_of(e) for e in steps}) != 1:
        return []
    base = made.get("base")
    rate = "" if last is None or not base else f": it ends at a rate of {last:.3g} of {base:.3g}"
    return hit(
        "GA312",
        steps[0],
        f"the schedule's length, `{length}`, counts epochs, and it steps with every batch, "
        f"{count:,} times in all{rate}",
        (made, "made for as many epochs"),
        mend="Step it once an epoch, or multiply its length by the updates of an epoch.",
    )


def _stepped_by_epoch(context: Context, made: Event, steps: list[Event]) -> list[Hit]:
    """A schedule as long as all updates, which steps more seldom."""
    total, count = made.get("total"), _made(context, steps)
    updates = next(
        (o.steps for o in context.trace.optimizers if o.index == made.get("optimizer")), 0
    )
    if not total or total < 8 or made.get("kind") in ("LinearLR", "ConstantLR"):
        return []
    if total != updates or 2 * count > total:
        return []
    last = steps[-1].get("lr")
    rate = "" if last is None else f", and the rate ends at {last:.3g}"
    return hit(
        "GA312",
        steps[0],
        f"the schedule is planned for all {total:,} updates, but is stepped {count:,} times: it "
        f"ends after {count / total:.2f} of its way{rate}",
        (made, f"planned for {total:,} steps"),
        mend="Step it right after `optimizer.step()`, or plan it for the epochs.",
    )


def _length(made: Event, steps: list[Event], count: int) -> int | None:
    """The step at which a rate that falls in a straight line, or as a cosine, would be zero."""
    base, rates = made.get("base"), [e.get("lr") for e in steps]
    if not base or len(rates) < 4 or len(rates) != count or None in rates:
        return None
    parts = [min(max(rate / base, 0.0), 1.0) for rate in rates[-3:]]
    for way in (parts, [1 - math.acos(2 * part - 1) / math.pi for part in parts]):
        slope = way[1] - way[2]
        straight = abs((way[0] - way[1]) - slope) <= 1e-4 * abs(slope)
        if slope > 1e-9 and straight and way[2] > 0:
            return round(count + way[2] / slope)
    return None


def _still_warming_up(context: Context, made: Event, steps: list[Event]) -> Iterator[Hit]:
    """A warm-up that counts micro-batches while the schedule counts updates."""
    number = made.get("optimizer")
    windows = [w for w in context.story.windows if w.optimizer == number]
    size = usual(windows)
    rates = [e.get("lr") for e in steps]
    count = context.trace.totals.get("schedule", 0)
    if size < 2 or count < 5 or len(rates) < 5 or None in rates:
        return
    rising = all(a < b for a, b in pairwise(rates))
    first = rates[0]
    slope = (rates[-1] - first) / (count - 1)
    straight = all(abs(b - a - slope) <= 1e-6 * abs(slope) for a, b in pairwise(rates[:4]))
    reached = count * slope
    peak = made.get("base")
    if rising and straight and peak and abs(reached * size - peak) <= 0.02 * peak:
        yield from hit(
            "GA312",
            made,
            f"the warm-up is as long as all {count * size:,} micro-batches, but the schedule steps "
            f"once an update: after {plural(count, 'update')} the rate is {rates[-1]:.3g}, "
            f"{rates[-1] / peak:.2f} of {peak:g}",
            (steps[-1], "the last step of the schedule"),
        )


RULES = (scheduled_past_a_skip, planned_for_another_length, scheduled_too_often)
