"""GA4xx: clip, unscale and scaler."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.lint.facts import Facts, View, Window, certain, owned, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.trace import Event

__all__ = ["GLOBAL", "RULES"]


def clip_each(facts: Facts, view: View) -> Iterator[Hit]:
    """GA401."""
    if facts.opaque:
        return
    for window in view.windows:
        if len(window.fresh) < 2 or not owned(view, facts, window):
            continue
        clips: dict[object, list[Event]] = {}
        seen = False
        for event in window.since:
            if event.kind == "backward":
                seen = True
            elif event.kind == "clip" and seen:
                clips.setdefault(event.node, []).append(event)
        for events in clips.values():
            depth = len(events[0].loops)
            turns = {mark.loops[:depth] for mark in window.fresh}
            between = turns & {event.loops for event in events}
            if len(events) > 1 and between and len(events) >= len(turns) - 1:
                yield hit(
                    "GA401",
                    events[0],
                    "clipped after every micro-batch: the partial sum is cut again and again, "
                    "and the last micro-batches weigh most",
                    (window.fresh[0], "backward"),
                    (window.step, "the update comes once a window"),
                )


def clip_scaled(facts: Facts, view: View) -> Iterator[Hit]:
    """GA402."""
    for window in view.windows:
        if "scaler" not in window.step.flags or not window.fresh:
            continue
        if not any(tensor_of(event).scaler is not None for event in window.fresh):
            continue
        seen = False
        for event in window.since:
            if event.kind == "backward":
                seen = True
            elif event.kind == "unscale":
                break
            elif event.kind == "clip" and seen:
                if event.thing is not None and "master" in event.thing.uses:
                    continue
                if "rescaled" in event.flags or "accelerate" in event.flags:
                    continue
                yield hit(
                    "GA402",
                    event,
                    "clips gradients that are still multiplied by the loss scale "
                    "(65536 at first): every update shrinks to almost nothing",
                    (window.fresh[-1], "backward of the scaled loss"),
                    (window.step, "only here the scaler unscales"),
                )


def unscale_twice(facts: Facts, view: View) -> Iterator[Hit]:
    """GA403 and GA404 (update left out where the step is skipped)."""
    last: Event | None = None
    for event in facts.trace.events:
        if event.kind == "scaler_update":
            if last is not None:
                extra = [key for key in event.unsure if key not in last.unsure]
                changing = [
                    key for key in extra if facts.trace.decisions.get(key, (True, False))[1]
                ]
                if changing and event.loops == last.loops:
                    yield hit(
                        "GA404",
                        event,
                        "where the step is skipped, `update()` is skipped too: the next "
                        "`unscale_()` raises",
                        (last, "unscaled in any case"),
                    )
            last = None
        elif event.kind == "unscale" and event.thing is view.optimizer:
            if last is not None and event.node is last.node and last.loops != event.loops:
                steps = [(window.step, "the step, where it belongs") for window in view.windows]
                yield hit(
                    "GA403",
                    event,
                    "unscaled again before `update()`: the second call raises",
                    (last, "first unscaled here"),
                    *steps[:1],
                )
                return
            last = event


def update_cadence(facts: Facts, view: View) -> Iterator[Hit]:
    """GA404."""
    if facts.opaque:
        return
    scaled = [window for window in view.windows if "scaler" in window.step.flags]
    updates = [event for event in facts.trace.events if event.kind == "scaler_update"]
    if len(scaled) < 2:
        return
    for window in scaled:
        if len(window.fresh) < 2:
            continue
        inside = [event for event in window.since if event.kind == "scaler_update"]
        # the update that belongs to the step before comes first in this window
        if len(inside) > 2 and any(event.loops == mark.loops for event in inside
                                   for mark in window.fresh):  # fmt: skip
            yield hit(
                "GA404",
                inside[-1],
                "the scale may change inside the window, so its micro-batches are summed "
                "with different scales",
                (window.step, "the step comes once a window"),
            )
            return
    if not updates and not _escapes(facts):
        yield hit(
            "GA404",
            scaled[0].step,
            "`update()` is never called: the scale never adapts, and an overflow is never left",
        )


def _escapes(facts: Facts) -> bool:
    return any(
        event.kind == "escape" and event.thing is not None
        and (event.thing.kind == "scaler" or event.thing.uses & {"scale", "scaler"})
        for event in facts.trace.events
    )  # fmt: skip


def clip_late(facts: Facts, view: View) -> Iterator[Hit]:
    """GA405."""
    if facts.opaque:
        return
    for before, window in zip(view.windows, [*view.windows[1:], None], strict=False):
        if "hook" in before.step.flags:
            return
        since = window.since if window is not None else _after(view, before)
        for event in since:
            if event.kind in ("backward", "set_grad", "autograd_grad", "escape"):
                break
            if event.kind == "clip" and event.loops == before.step.loops and before.fresh:
                if any(other.kind == "clip" for other in before.since):
                    break
                yield hit(
                    "GA405",
                    event,
                    "clips after the step has already consumed the gradients",
                    (before.step, "the step"),
                )
                return


def clip_nothing(facts: Facts, view: View) -> Iterator[Hit]:
    """GA405: a clip that comes only where nothing has been computed yet."""
    early: list[Event] = []
    fills = ("backward", "set_grad", "autograd_grad", "escape")
    for window in view.windows:
        marks = [event for event in window.since if event.kind in (*fills, "clip")]
        if not window.fresh or not marks or "hook" in window.step.flags:
            return
        clips = [event for event in marks if event.kind == "clip"]
        if not clips or any(event.kind != "clip" for event in marks[: len(clips)]):
            return  # one of them comes after a backward
        if not all(certain(view, facts, event) for event in window.fresh):
            return
        early.append(clips[0])
    if len(early) > 1 and not facts.opaque and all(event.loops for event in early):
        yield hit(
            "GA405",
            early[0],
            "clips before the backward: what it measures was stepped already, or is zero",
            (view.windows[0].fresh[0], "backward comes only here"),
            (view.windows[0].step, "steps what nothing has clipped"),
        )


def _after(view: View, window: Window) -> list[Event]:
    return view.events[view.events.index(window.step) + 1 :]


def bypass(facts: Facts, view: View) -> Iterator[Hit]:
    """GA406."""
    for window in view.windows:
        if "scaler" in window.step.flags or "closure" in window.step.flags:
            continue
        scaled = [event for event in window.fresh if tensor_of(event).scaler is not None]
        if not scaled or any(event.kind in ("unscale", "grad_scale", "escape", "set_grad")
                             for event in window.since):  # fmt: skip
            continue
        if not all(tensor_of(event).scaler.kind == "scaler" for event in scaled):  # type: ignore[union-attr]
            continue
        yield hit(
            "GA406",
            window.step,
            "steps past the scaler: the gradients are still multiplied by the loss scale",
            (scaled[-1], "backward of the scaled loss"),
        )
        return


def used_up(facts: Facts, view: View) -> Iterator[Hit]:
    """GA407."""
    for event in view.events:
        thing = event.thing
        if event.kind == "clip" and thing is not None:
            again = "once" in thing.uses and len(event.loops) > thing.depth
            if again or "spent" in event.flags:
                yield hit(
                    "GA407",
                    event,
                    "this iterator is used up by the first call; later calls clip nothing"
                    if again
                    else "this iterator was used up before, by what walked over it first: "
                    "the clip finds nothing",
                )
                return


def value_hook(facts: Facts, view: View) -> Iterator[Hit]:
    """GA401: a tensor hook that clips each micro-batch's own gradient."""
    hooks = [event for event in facts.trace.events if event.kind == "grad_hook"]
    for event in hooks:
        if event.flags & {"clamp", "clamp_", "clip"} and view.usual() > 1:
            yield hit(
                "GA401",
                event,
                "this hook clamps the gradient of every micro-batch, not that of the window",
            )
            return


RULES = (
    clip_each,
    clip_scaled,
    unscale_twice,
    update_cadence,
    clip_late,
    clip_nothing,
    bypass,
    used_up,
    value_hook,
)
GLOBAL = ()
