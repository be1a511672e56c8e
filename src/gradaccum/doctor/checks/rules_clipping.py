"""GA4xx: clipping and the gradient scaler."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.named import limit_is_scaled
from gradaccum.doctor.checks.patterns import clips, hook_function, lines_that
from gradaccum.doctor.checks.story import Window, place_of
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]


def _clips(window: Window) -> list[Event]:
    """Calls that can clip; an infinite bound only measures."""
    return [
        event
        for event in window.of("clip")
        if event.get("max") is None or math.isfinite(event.get("max"))
    ]


def clipped_each_time(context: Context) -> Iterator[Hit]:
    """GA401."""
    for line, windows in [*context.lines(), *_open(context)]:
        for window in windows:
            micros = context.story.micros(window)
            early = [
                event
                for event in _clips(window)
                if micros
                and micros[0].n < event.n < micros[-1].n
                and set(event.get("touched", ())) & window.params
            ]
            if not early or place_of(early[0]) is None or _refused(window):
                continue
            total = sum(place_of(e) == place_of(early[0]) for e in _clips(window))
            yield from hit(
                "GA401",
                early[0],
                f"the clip runs {total} times in an update of {len(micros)} micro-batches, on "
                f"partial sums ({plural(context.updates(windows), 'update')})",
                (micros[-1], "this micro-batch is still to be added"),
                (line, "the step"),
            )
            return
    yield from _clipping_hooks(context)


def _open(context: Context) -> list[tuple[Place | None, list[Window]]]:
    return [
        (None, [window])
        for window in context.story.open
        if all(math.isfinite(e.get("norm") or 0.0) for e in context.story.micros(window))
    ]


def _refused(window: Window) -> bool:
    return len(window.of("unscale")) > 1


def _clipping_hooks(context: Context) -> Iterator[Hit]:
    for event in context.trace.events:
        function = hook_function(place_of(event)) if event.kind == "hook" else None
        if function is None or event.get("how") != "register_hook" or not clips(function):
            continue
        params = set(event.get("params", ()))
        for window in context.story.windows:
            if len(window.fresh) >= 2 and params & window.params:
                yield from hit(
                    "GA401",
                    event,
                    f"this hook clips the gradient of each of the {len(window.fresh)} "
                    "micro-batches, not their sum",
                    (window.line, "the step that uses the sum"),
                )
                return


def clipped_scaled(context: Context) -> Iterator[Hit]:
    """GA402."""
    for line, windows in context.lines():
        for window in windows:
            scaled = [b for b in window.fresh if context.factor.get(b, 1.0) != 1.0]
            called = _clips(window)
            micros = context.story.micros(window)
            if not scaled or not called or not micros:
                continue
            mine = [e for e in called if set(e.get("touched", ())) & window.params]
            clip = next((e for e in mine if e.n > micros[-1].n), None)
            freed = [
                e
                for e in window.of("unscale")
                if micros[-1].n < e.n and e.get("optimizer") in (window.optimizer, None)
            ]
            if clip is None or not freed or freed[0].n < clip.n:
                continue
            if limit_is_scaled(place_of(clip)):
                continue
            scale = context.factor[scaled[-1]]
            yield from hit(
                "GA402",
                clip,
                f"the clip sees gradients that are still multiplied by the loss scale, {scale:g}",
                (freed[0], "they are unscaled only here"),
                (line, "the step"),
            )
            return


def unscaled_twice(context: Context) -> Iterator[Hit]:
    """GA403, or GA404 where an update was left out between two windows."""
    last: Event | None = None
    zeroed = False
    for event in context.trace.events:
        if event.kind == "scaler_update":
            last = None
        elif event.kind == "zero" and event.get("lost"):
            zeroed = True
        elif event.kind == "unscale" and event.get("enabled", True):
            if event.get("optimizer") is None and last is not None:
                if zeroed:
                    update = _update_line(context, event)
                    yield from hit(
                        "GA404",
                        update or event,
                        "after `unscale_()` neither `step()` nor `update()` of the scaler ran in "
                        "one window, so the next window's `unscale_()` is refused",
                        (last, "unscaled here, with no update after it"),
                        (event, "refused here"),
                    )
                else:
                    yield from hit(
                        "GA403",
                        event,
                        "the gradients of one window are unscaled a second time before "
                        "`scaler.update()`, which torch refuses",
                        (last, "unscaled first in the micro-batch before"),
                    )
                return
            if event.get("optimizer") is not None:
                last, zeroed = event, False


def _update_line(context: Context, event: Event) -> Event | Place | None:
    done = [e for e in context.trace.events if e.kind == "scaler_update"]
    if done:
        return done[0]
    place = place_of(event)
    lines = [one for one in lines_that(place, "update") if place and one.function == place.function]
    return lines[-1] if len(lines) == 1 else None


def updated_at_wrong_times(context: Context) -> Iterator[Hit]:
    """GA404."""
    stepped: Event | None = None
    for event in context.trace.events:
        if event.kind == "scaler_update":
            if stepped is None and event.get("failed"):
                yield from hit(
                    "GA404", event, "`scaler.update()` runs although no step has been tried since"
                )
                return
            stepped = None
        elif event.kind == "scaler_step" or (event.kind == "step" and event.get("scaler")):
            refused = event.kind == "scaler_step" and event.get("failed")
            if refused and stepped is not None:
                yield from hit(
                    "GA404",
                    event,
                    "`scaler.step()` runs again without `scaler.update()` since, which torch "
                    "refuses",
                    (stepped, "the step after which the update is missing"),
                )
                return
            stepped = event


def scale_moves(context: Context) -> Iterator[Hit]:
    """GA404: the scale changes inside a window."""
    for line, windows in context.lines():
        for window in windows:
            factors = {context.factor.get(b, 1.0) for b in window.fresh}
            micros = context.story.micros(window)
            updates = [
                e for e in window.of("scaler_update") if micros and micros[0].n < e.n < micros[-1].n
            ]
            if len(factors) > 1 and 1.0 not in factors and updates:
                yield from hit(
                    "GA404",
                    updates[0],
                    "the scale changes between micro-batches that are added to one another: "
                    + ", ".join(f"{factor:g}" for factor in sorted(factors)),
                    (line, "the step that unscales them all by one factor"),
                )
                return


def clipped_too_late(context: Context) -> Iterator[Hit]:
    """GA405."""
    events = context.trace.events
    late: list[tuple[Event, Event]] = []
    good = 0
    step: Event | None = None
    for event in events:
        if event.kind == "step" and event.get("used"):
            step = event
        elif event.kind in ("backward", "zero", "write"):
            step = None
        elif event.kind == "clip" and event.get("max") is not None:
            if not math.isfinite(event.get("max")):
                continue
            used = () if step is None else {p for g in step.get("used") for p in g["params"]}
            if step is not None and (
                set(event.get("touched", ())) & set(used) or not event.get("touched")
            ):
                late.append((event, step))
            else:
                good += 1
    if late and good <= len(late) // 2:
        event, used_by = late[0]
        yield from hit(
            "GA405",
            event,
            f"the clip runs after the step that has used the gradients: nothing is clipped "
            f"({plural(len(late), 'time')} in what was looked at)",
            (used_by, "the step"),
        )


def past_the_scaler(context: Context) -> Iterator[Hit]:
    """GA406."""
    for line, windows in context.lines():
        for window in windows:
            scaled = [b for b in window.fresh if context.factor.get(b, 1.0) != 1.0]
            step = window.step
            if not scaled or step is None or window.optimizer is None or step.get("scaler"):
                continue
            if window.of("unscale") or context.handled(window) is not None:
                continue
            scale = context.factor[scaled[-1]]
            yield from hit(
                "GA406",
                line,
                f"the optimizer steps on gradients that are still multiplied by the loss scale, "
                f"{scale:g}",
                (context.story.backwards.get(scaled[-1]), "the scaled loss"),
            )
            context.faulty.add(window.optimizer)
            return


def backward_past_the_scaler(context: Context) -> Iterator[Hit]:
    """GA202: of the losses of an update the scaler scales one and not another, and divides both."""
    scaled: set[int] = set()
    waiting = False
    for event in context.trace.events:
        waiting = waiting or event.kind == "scale"
        if event.kind == "backward":
            if waiting:
                scaled.add(event.get("b", -1))
            waiting = False
    for line, windows in context.lines():
        for window in windows:
            step, fresh = window.step, set(window.fresh)
            past = [e for e in context.story.micros(window) if e.get("b", -1) not in scaled]
            inner = [b for b in fresh & scaled if context.factor.get(b, 1.0) > 1.0]
            if step is None or not step.get("scaler") or not past or not inner or not window.whole:
                continue
            if any(not context.story.readings_of(e) for e in past):
                continue
            scale = context.factor[inner[0]]
            yield from hit(
                "GA202",
                past[0],
                "this loss is differentiated as it is, beside one that the scaler scales, and the "
                f"scaler's step divides both by {scale:g}: it weighs 1/{scale:g} "
                f"({plural(context.updates(windows), 'update')})",
                (context.story.backwards.get(inner[0]), "the loss that is scaled"),
                (line, "the step that unscales all"),
                mend="Call `scaler.scale(loss).backward()` for each loss.",
            )
            return


def used_up(context: Context) -> Iterator[Hit]:
    """GA407."""
    called = [e for e in context.trace.events if e.kind == "clip" and e.get("given") is not None]
    for event in called:
        if event.get("given") != 0 or event.get("params"):
            continue
        same = [e for e in called if place_of(e) == place_of(event)]
        empty = sum(e.get("given") == 0 for e in same)
        standing = any(
            e.kind == "backward" and e.get("arrived") for e in context.trace.events if e.n < event.n
        )
        if standing and empty * 2 > len(same) and _is_iterator(event):
            yield from hit(
                "GA407",
                event,
                f"the clip was given no parameter in {empty} of {plural(len(same), 'call')}: what "
                "it walks over was used up before",
            )
            return


def _is_iterator(event: Event) -> bool:
    return event.get("iterator", True) is not False


def clipped_twice(context: Context) -> Iterator[Hit]:
    """GA411."""
    for event in context.trace.events:
        if event.kind != "clip" or not event.get("duplicates"):
            continue
        yield from hit(
            "GA411",
            event,
            "the clip was given the same parameter more than once: its gradient counts that often "
            "in the norm, and is multiplied that often",
        )
        return


RULES = (
    clipped_twice,
    unscaled_twice,
    updated_at_wrong_times,
    past_the_scaler,
    backward_past_the_scaler,
    clipped_each_time,
    clipped_scaled,
    scale_moves,
    clipped_too_late,
    used_up,
)
