"""What a script does to gradients itself, and what it tells of the losses that made them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from gradaccum.doctor.checks.certain import divided_log, divisor_of_gradient, is_count
from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.patterns import sends_gradient
from gradaccum.doctor.checks.source import gated
from gradaccum.doctor.checks.story import place_of, usual
from gradaccum.doctor.checks.sums import own_sum, plain_mean
from gradaccum.doctor.checks.weights import close
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]


def divided_each_time(context: Context) -> Iterator[Hit]:
    """GA202: the sum so far is divided after every micro-batch, the first ones again and again."""
    for line, windows in context.lines():
        bad = []
        for window in windows:
            micros = context.story.micros(window)
            if len(micros) < 2 or not window.whole or window.optimizer is None:
                continue
            writes = [
                e
                for e in window.of("write")
                if e.get("target") == "grad" and set(e.get("params", ())) & window.params
            ]
            gaps = [[e for e in writes if a.n < e.n < b.n] for a, b in pairwise(micros)]
            if not all(gaps) or len({place_of(gap[-1]) for gap in gaps}) != 1:
                continue
            by = divisor_of_gradient(place_of(gaps[0][-1]))
            if by is not None and is_count(by, line, len(micros)):
                bad.append((window, gaps[0][-1], micros))
        if not bad or 2 * len(bad) < len(windows):
            continue
        window, event, micros = bad[0]
        count = len(micros)
        yield from hit(
            "GA202",
            event,
            f"the sum of the gradients so far is divided by {count} after each of {count} "
            f"micro-batches: the first weighs 1/{count**count}, the last 1/{count} "
            f"({plural(context.updates([w for w, _, _ in bad]), 'update')})",
            (micros[1], "the next micro-batch is added to what was divided"),
            (line, "the step"),
            mend="Divide the gradients once, right before the step, or each loss before its "
            "backward.",
        )


def logged_too_small(context: Context) -> Iterator[Hit]:
    """GA205: losses divided for their backward are summed, and divided by their number again."""
    for line, windows in context.lines():
        count = usual(windows)
        for window in windows:
            micros = context.story.micros(window)
            place = place_of(micros[-1]) if len(micros) >= 2 else None
            if place is None or len(micros) != count or not context.gated(window, line):
                continue
            found = divided_log(place, line)
            if found is not None:
                added, shown = found
                yield from hit(
                    "GA205",
                    added,
                    f"each loss is added to the log after it was divided by the {count} "
                    "micro-batches of its update, and the sum is divided by the number of losses: "
                    f"the log shows 1/{count} of their mean",
                    (shown, "divided by the losses' number here"),
                    (line, f"one update for {count} micro-batches"),
                    mend="Add the loss before it is divided, or divide the sum by the updates.",
                )
                return
            break


def _sets_gradients(context: Context) -> dict[Place, list[list[Event]]]:
    """Lines that set `.grad`, each with what was differentiated before each of its updates."""
    found: dict[Place, list[list[Event]]] = {}
    passes: list[Event] = []
    written: Place | None = None
    for event in context.trace.events:
        place = place_of(event)
        if event.kind in ("backward", "grad") and not event.get("nested"):
            passes.append(event)
        elif event.kind == "write" and event.get("target") == "grad" and place is not None:
            written = place
        elif event.kind == "step":
            if written is not None:
                found.setdefault(written, []).append(passes)
            passes, written = [], None
    return found


def never_cleared(context: Context) -> Iterator[Hit]:
    """GA101: a sum of gradients in the script's own tensors, which nothing clears."""
    for place, updates in _sets_gradients(context).items():
        own = own_sum(place) if len(updates) >= 2 else None
        if own is None or own.cleared or not all(updates[1:]):
            continue
        yield from hit(
            "GA101",
            own.added,
            "gradients are added to a sum here that nothing clears: each update after the first "
            f"uses those of the earlier ones again ({plural(len(updates), 'update')} in what was "
            "looked at)",
            (place, "the sum becomes the gradient here"),
            mend="Clear the sum after each step.",
        )
        return


def sum_not_divided(context: Context) -> Iterator[Hit]:
    """GA201: a sum of gradients in the script's own tensors, and nothing divides."""
    for place, updates in _sets_gradients(context).items():
        own = own_sum(place) if len(updates) >= 2 else None
        if own is None or not own.cleared or own.divided:
            continue
        counts = {len(passes) for passes in updates[:-1]}
        steps = [e for e in context.steps if e.n > updates[0][-1].n] if updates[0] else []
        if counts != {len(updates[0])} or len(updates[0]) < 2 or not steps:
            continue
        micros, line = updates[0], place_of(steps[0])
        if line is None or gated(line, place_of(micros[-1])) is not True:
            continue
        if not all(_undivided(context, event) for event in micros):
            continue
        yield from hit(
            "GA201",
            place,
            f"the gradients of {len(micros)} micro-batches are summed, each of a mean, and nothing "
            f"divides: the update is {len(micros)} times the mean "
            f"({plural(len(updates), 'update')} in what was looked at)",
            (own.added, "added up here"),
            (line, "the step"),
            mend="Divide the sum by the number of micro-batches where `.grad` is set.",
        )
        return


def _undivided(context: Context, event: Event) -> bool:
    """Whether a pass differentiates means as they are."""
    if event.kind == "grad":
        return plain_mean(place_of(event))
    terms = context.story.readings_of(event)
    scale = context.factor.get(event.get("b", -1), 1.0)
    return bool(terms) and all(
        one.reduction == "mean" and one.weight is not None and close(one.weight / scale, 1.0)
        for one in terms
    )


def exchanged_each_time(context: Context) -> Iterator[Hit]:
    """GA601: a script sends the sum so far between its ranks after every micro-batch."""
    for line, windows in context.lines():
        for window in windows:
            micros = context.story.micros(window)
            writes = [e for e in window.of("write") if e.get("target") == "grad"]
            gaps = [[e for e in writes if a.n < e.n < b.n] for a, b in pairwise(micros)]
            if len(micros) < 2 or not window.whole or not all(gaps):
                continue
            sent = next((x for e in gaps[0] if (x := sends_gradient(place_of(e)))), None)
            if sent is None:
                continue
            place, divided = sent
            yield from hit(
                "GA601",
                place,
                f"ranks exchange their gradients {len(micros)} times an update instead of once"
                + (
                    ""
                    if divided
                    else ", and sum what they have summed before: the first micro-batch is "
                    "multiplied by the ranks with each time"
                )
                + f" ({plural(context.updates(windows), 'update')})",
                (micros[1], "the next micro-batch is added to what was exchanged"),
                (line, "the step"),
                severity="" if divided else "error",
                mend="Exchange the sum of the window once, right before the step.",
            )
            return


RULES = (exchanged_each_time, divided_each_time, logged_too_small, never_cleared, sum_not_divided)
