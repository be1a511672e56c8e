"""What a script does to gradients itself, and what it tells of the losses that made them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from gradaccum.doctor.checks.certain import divided_log, divisor_of_gradient, is_count
from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.story import place_of, usual

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


RULES = (divided_each_time, logged_too_small)
