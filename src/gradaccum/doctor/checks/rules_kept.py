"""GA501 and GA502: graphs that outlive the pass that made them."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.kept import (
    carried_over,
    kept_by_hook,
    kept_in_loop,
    kept_on_self,
    made_outside,
)
from gradaccum.doctor.checks.patterns import keeps
from gradaccum.doctor.checks.story import place_of
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]

_SURE = 8
"""Passes that live on from which on no line of the source is needed to know."""


def _over_windows(context: Context, same: list[Event]) -> bool:
    """Whether passes belong to several windows: else they may be kept until the end of one."""
    numbers = {e.get("b") for e in same}
    used = {id(w) for w in context.story.windows if set(w.fresh) & numbers}
    cleared = {w.order for w in context.story.open if set(w.fresh) & numbers}
    return len(used) + len(cleared) >= 3


def keeps_graphs(context: Context) -> Iterator[Hit]:
    """GA501: the losses themselves are kept."""
    backwards = [e for e in context.trace.events if e.kind == "backward" and "kept" in e.data]
    for number, event in enumerate(backwards):
        kept = event.get("kept")
        same = [e for e in backwards[: number + 1] if place_of(e) == place_of(event)]
        if kept < 3 or kept < min(len(same) - 1, 60) or len(same) < 4:
            continue
        if not _over_windows(context, same):
            continue
        where = keeps(place_of(event)) or kept_in_loop(place_of(event))
        yield from hit(
            "GA501",
            where or event,
            f"the graphs of all of the last {kept} losses are still alive: something keeps them",
            (event, "the backward of such a loss"),
        )
        return
    yield from _keeps_parts(context)


def _keeps_parts(context: Context) -> Iterator[Hit]:
    """GA501: something that the passes computed is kept, though their losses are not."""
    backwards = [e for e in context.trace.events if e.kind == "backward" and "held" in e.data]
    if any(e.get("create") or e.get("retain") for e in backwards):
        return  # these keep graphs themselves, and are told of by what they use
    for number, event in enumerate(backwards):
        held = event.get("held")
        same = [e for e in backwards[: number + 1] if place_of(e) == place_of(event)]
        if held < 4 or held < min(number, 60) or len(same) < 5:
            continue
        if not _over_windows(context, same):
            continue
        place = place_of(event)
        where = kept_in_loop(place)
        if place is not None:
            where = where or kept_on_self(place.path) or kept_by_hook(place.path)
        if where is None and held < _SURE:
            continue
        yield from hit(
            "GA501",
            where or event,
            f"what all of the last {held} passes computed is still alive, with its graph: "
            "something keeps it",
            (event, "the backward of such a pass"),
            mend="Keep `value.detach()`, or `value.item()` of a single number.",
        )
        return


def keeps_what_validates(context: Context) -> Iterator[Hit]:
    """GA501: a validation records graphs, and adds up what it computes."""
    runs: list[list[Event]] = []
    events = [e for e in context.trace.events if e.kind in ("forward", "backward", "grad", "step")]
    for event in events:
        place = place_of(event)
        if event.kind == "forward" and runs and runs[-1] and place_of(runs[-1][0]) == place:
            runs[-1].append(event)
        else:
            runs.append([event] if event.kind == "forward" else [])
    trained = {p.function for e in events if e.kind != "forward" and (p := place_of(e)) is not None}
    for number, run in enumerate(runs):
        place = place_of(run[0]) if run else None
        if place is None or len(run) < 3 or any(e.get("nograd") for e in run):
            continue
        later = runs[number + 1 : number + 2]
        if place.function in trained or place.function == "<module>" or (later and not later[0]):
            continue  # what follows may differentiate it
        where = kept_in_loop(place)
        if where is None or where.function != place.function:
            continue
        yield from hit(
            "GA501",
            where,
            f"{plural(len(run), 'forward')} that nothing differentiates record their graphs, and "
            "this keeps them all until it is over",
            (run[0], "such a forward"),
            mend="Validate under `with torch.no_grad():`, and add up `loss.item()`.",
        )
        return


def differentiated_again(context: Context) -> Iterator[Hit]:
    """GA502: a backward that was refused, since an earlier one had used up a part of its graph."""
    refused = [
        e
        for e in context.trace.events
        if e.kind == "backward" and "graph a second time" in e.get("failed", "")
    ]
    if not refused:
        return
    event = refused[-1]
    place = place_of(event)
    before = [e for e in context.trace.events if e.kind == "backward" and e.n < event.n]
    where: Place | None = None
    if place is not None:
        where = carried_over(place) or kept_in_loop(place)
        where = where or made_outside(place) or kept_on_self(place.path)
    yield from hit(
        "GA502",
        where or event,
        "this loss is made of what an earlier pass computed, too, whose graph is gone: its "
        "backward is refused. `retain_graph=True` would hide that, and use weights that are gone",
        (before[-1] if before else None, "this backward has used up the graph"),
        (event, "refused here"),
        severity="error",
        mend="Start each pass from `detach()`ed values, or compute what it shares anew.",
    )


RULES = (keeps_graphs, keeps_what_validates, differentiated_again)
