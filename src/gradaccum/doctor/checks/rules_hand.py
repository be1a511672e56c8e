"""Updates that a script makes itself beside an optimizer that it made: told, and no fault."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.story import Window, place_of
from gradaccum.doctor.trace.model import Opt

__all__ = ["RULES"]


def _beside_an_optimizer(context: Context) -> tuple[list[Window], Opt] | None:
    """Updates by hand of what an optimizer owns that never steps.

    Only those are told: somebody made the optimizer to be used. A loop that has none knows what it
    does.
    """
    hands = [window for window in context.story.windows if window.optimizer is None]
    for one in context.trace.optimizers:
        owned = frozenset(one.params)
        mine = [w for w in hands if w.params and w.params <= owned]
        if len(mine) >= 2 and not one.steps and len(mine) == len(context.story.windows):
            return mine, one
    return None


def past_the_optimizer(context: Context) -> Iterator[Hit]:
    """GA309, as a note: which line updates, and which optimizer does not."""
    found = _beside_an_optimizer(context)
    if found is None:
        return
    windows, one = found
    step = windows[0].step
    data = step is not None and str(step.get("how", "")).startswith("data.")
    through = ", through `.data`, which is not wrong in what it computes" if data else ""
    count, params = _count(context, windows), plural(len(windows[0].params), "parameter")
    yield from hit(
        "GA309",
        windows[0].line,
        f"{plural(count, 'update')} of {params} are made by this line, outside any "
        f"optimizer{through}; {one.kind}, which owns them, never steps",
        (one.user or one.at, f"{one.kind} is made here"),
        severity="note",
        mend="Call `optimizer.step()` instead, or do without the optimizer: its momentum, weight "
        "decay and schedule have no part in an update by hand.",
    )


def _count(context: Context, windows: list[Window]) -> int:
    return (
        len(windows) if context.story.whole else max(len(windows), context.story.counted(windows))
    )


def nothing_added_up(context: Context) -> Iterator[Hit]:
    """GA102, as a note: each pass clears the gradients and is an update of its own."""
    found = _beside_an_optimizer(context)
    if found is None:
        return
    windows, _ = found
    if any(len(window.fresh) != 1 or window.stale for window in windows):
        return
    zeros = [event for w in windows for event in w.of("zero") if event.get("lost")]
    if len(zeros) < len(windows) - 1 or len({place_of(event) for event in zeros}) != 1:
        return
    first, micros = zeros[0], context.story.micros(windows[0])
    yield from hit(
        "GA102",
        first,
        f"{plural(_count(context, windows), 'update')} of one micro-batch each: the gradients are "
        "zeroed here in each pass, so nothing is accumulated. That is right for ordinary training",
        (micros[-1] if micros else None, "each update uses this one backward"),
        (windows[0].line, "the update of that pass"),
        severity="note",
        mend="To accumulate over the passes, clear the gradients and update once for all of them.",
    )


RULES = (past_the_optimizer, nothing_added_up)
