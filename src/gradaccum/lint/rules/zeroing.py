"""GA102 to GA105: what is cleared too early, or left over from somewhere else."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.lint.facts import (
    FINITE,
    Facts,
    View,
    Window,
    certain,
    common_loop,
    counted,
    is_model_root,
    tensor_of,
)
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Num, Thing

__all__ = ["RULES"]


def zeroed_inside(facts: Facts, view: View) -> Iterator[Hit]:
    """GA102 and GA103."""
    if facts.opaque:
        return
    for window in view.windows:
        if not window.lost or "closure" in window.step.flags:
            continue
        marks = [mark for mark, _ in window.lost]
        if not all(certain(view, facts, mark) for mark in [*marks, *window.fresh]):
            continue
        inner = [
            (mark, zero)
            for mark, zero in window.lost
            if not _detour(mark, zero, window)
            and not _next_epoch(mark, zero)
            and not _by_chance(facts, mark, zero, window)
            and (
                len(zero.loops) >= len(mark.loops)
                or (not window.fresh and zero.loops == window.step.loops)
            )
        ]
        if not inner or _by_hand(window):
            continue
        if window.fresh:
            inner = [(mark, zero) for mark, zero in inner if _meant(mark, window, facts)]
            if not inner:
                continue
        mark, zero = inner[-1]
        if zero.loops and common_loop(mark, zero) is None:
            continue
        if window.fresh:
            share = f"{len(marks)} of {len(marks) + len(window.fresh)}"
            yield hit(
                "GA102",
                zero,
                f"zeroed inside the window: {share if counted(facts) else 'some of its'} "
                "micro-batches are wiped before the step that should consume them",
                (mark, "this backward is wiped"),
                (window.step, "the step comes only afterwards"),
            )
        else:
            code = "GA102" if "accumulate" in zero.flags else "GA103"
            yield hit(
                code,
                zero,
                "zeroed between backward and step: the step sees no gradient",
                (mark, "this backward is wiped"),
                (window.step, "the step finds nothing"),
            )


def _next_epoch(mark: Event, zero: Event) -> bool:
    """Whether the loop of a pass was over before the zeroing came: GA302 says it better."""
    at = len(mark.loops) - 1
    return (
        at >= 0
        and len(zero.loops) > at
        and (
            mark.loops[at].node is zero.loops[at].node
            and mark.loops[at].entry != zero.loops[at].entry
        )
    )


def _detour(mark: Event, zero: Event, window: Window) -> bool:
    """Whether a pass and its zeroing come together, where no micro-batch of the window comes."""
    usual = {key for event in window.fresh for key in event.unsure}
    return bool(window.fresh) and any(
        key in zero.unsure and key not in usual for key in mark.unsure
    )


def _by_chance(facts: Facts, mark: Event, zero: Event, window: Window) -> bool:
    """Whether it is for the data to say if the zeroing comes at all: or only between windows."""
    shared = {*mark.unsure, *window.step.unsure}
    return any(
        facts.trace.decisions.get(key, (True, False))[1] for key in zero.unsure if key not in shared
    )


def _by_hand(window: Window) -> bool:
    return any(event.kind in ("set_grad", "autograd_grad") for event in window.since)


def _meant(mark: Event, window: Window, facts: Facts) -> bool:
    """Whether a wiped pass was meant for this window: it ran where a pass of the window ran.

    The same line in the same loop, or one beside it whose loss is divided for the window as well.
    """

    def place(event: Event) -> list[object]:
        return [loop.node for loop in event.loops]

    def shared(event: Event) -> set[str]:
        return {item.key for item in tensor_of(event).divisors} & facts.trace.window_keys

    return bool(mark.loops) and any(
        place(event) == place(mark)
        and (event.node is mark.node or bool(shared(event) & shared(mark)))
        for event in window.fresh
    )


def hook_steps(facts: Facts, view: View) -> Iterator[Hit]:
    """GA102: an optimizer that steps inside backward, in a loop that accumulates."""
    divisors = {
        item.key for event in facts.backwards if event.tensor for item in event.tensor.divisors
    }
    values = {
        item.value for event in facts.backwards if event.tensor for item in event.tensor.divisors
    }
    counts = [event for event in facts.backwards if event.loops]
    if not counts or any("accelerate" in event.flags for event in counts):
        return  # a prepared optimizer steps once a window, wherever it is called
    runs = float(sum(1 for event in counts if event.loops[-1].entry == counts[0].loops[-1].entry))
    if not divisors & facts.trace.window_keys and runs not in values:
        return
    for window in view.windows:
        if "hook" in window.step.flags and window.fresh:
            yield hit(
                "GA102",
                window.step,
                "this hook steps and clears in every backward, so nothing accumulates although "
                "the loss is divided for a window",
                (window.fresh[-1], "each backward runs the hook"),
            )
            return


def never_accumulates(facts: Facts, view: View) -> Iterator[Hit]:
    """GA102: Accelerate was told of a window, and nothing ever opens one."""
    if facts.opaque or any("accumulate" in event.flags for event in facts.backwards):
        return
    for window in view.windows[1:]:
        if len(window.fresh) != 1:
            continue
        mark = window.fresh[0]
        engine = mark.thing
        told = engine.kwargs.get("gradient_accumulation_steps") if engine is not None else None
        if engine is None or engine.kind != "accelerator" or not isinstance(told, (Num, Thing)):
            continue
        if isinstance(told, Num) and told.value < 2:
            continue
        if mark.loops == window.step.loops and not window.step.unsure:
            yield hit(
                "GA102",
                window.step,
                "the engine divides the loss for a window, but nothing enters `accumulate()`, so "
                "every micro-batch steps",
                (mark, "divided here by the length of the window"),
            )
            return


def stale_start(facts: Facts, view: View) -> Iterator[Hit]:
    """GA104."""
    if facts.driven or facts.opaque or len(view.windows) < 2:
        return
    first = view.windows[0]
    outside = [event for event in first.fresh if len(event.loops) < len(first.step.loops)]
    inside = [event for event in first.fresh if event.loops and event not in outside]
    later = {event.node for window in view.windows[1:] for event in window.fresh}
    if inside and outside and not any(event.node in later for event in outside):
        if all(certain(view, facts, event) for event in first.fresh):
            yield hit(
                "GA104",
                outside[0],
                "this gradient is still there when the first window opens, and is added to it",
                (first.step, "the first step consumes it as well"),
            )


def other_losses_gradient(facts: Facts, view: View) -> Iterator[Hit]:
    """GA104: what another optimizer's loss left behind."""
    if facts.opaque or len(facts.views) < 2:
        return
    steps = [window.step for other in facts.views for window in other.windows]
    frozen = {event.thing for event in facts.trace.events if event.kind == "freeze"}
    order = {id(event): index for index, event in enumerate(facts.trace.events)}
    for window in view.windows:
        if len(window.fresh) < 2 or not certain(view, facts, window.fresh[-1]):
            continue
        last = window.fresh[-1]
        for mark in window.fresh[:-1]:
            tensor = mark.tensor
            if tensor is None or not tensor.models or mark.node is last.node:
                continue
            if "accumulate" in mark.flags:
                continue  # an engine that counts for several models is not followed closely enough
            meant = [
                step
                for step in steps
                if step.thing is not view.optimizer
                and step.thing is not None
                and step.thing.models & tensor.models
                and order[id(mark)] < order[id(step)] < order[id(last)]
            ]
            owned = view.optimizer.models & tensor.models
            if meant and owned and not owned & frozen and common_loop(mark, last) is not None:
                yield hit(
                    "GA104",
                    window.step,
                    "this step also consumes what another optimizer's loss left in these "
                    "parameters",
                    (mark, "this backward reaches them"),
                    (meant[0], "the optimizer it was meant for steps here"),
                )
                return


def unowned(facts: Facts, view: View) -> Iterator[Hit]:
    """GA105."""
    if len(facts.views) != 1 or not view.optimizer.models:
        return
    frozen = {event.thing for event in facts.trace.events if event.kind == "freeze"}
    cleared = [event for event in facts.trace.events if event.kind == "zero"]
    if any(event.thing is not view.optimizer for event in cleared):
        return
    for window in view.windows:
        for event in window.since:
            if event.kind != "clip" or event.thing is None or not window.fresh:
                continue
            if event.thing.kind != "params" or event.thing.uses & {"filtered", "master"}:
                continue
            for whole in event.thing.models:
                parts = whole.models
                outside = {part for part in parts if part not in view.optimizer.models} - frozen
                if parts & view.optimizer.models and outside and whole not in view.optimizer.models:
                    reached = window.fresh[-1].tensor
                    if reached is not None and (
                        whole in reached.models or outside & reached.models
                    ):
                        yield hit(
                            "GA105",
                            event,
                            "parameters that no optimizer owns get gradients that nobody clears; "
                            "they grow, and this clip measures them",
                            (window.step, "the optimizer owns only a part of the model"),
                        )
                        return


def overwritten(facts: Facts) -> Iterator[Hit]:
    """GA102: `p.grad = g` in a loop whose step comes only afterwards."""
    if any(event.kind == "backward" for event in facts.trace.events):
        return
    writes = [event for event in facts.trace.events if event.kind == "set_grad" and event.loops]
    steps = [event for event in facts.trace.events if event.kind == "step"]
    for event in writes:
        again = [
            other
            for other in writes
            if other.node is event.node
            and len(other.loops) > 1
            and other.loops[0] != event.loops[0]
        ]
        after = [step for step in steps if not step.loops]
        if again and after and len(steps) == 1 and not is_model_root(event.loops[0].node):
            yield hit(
                "GA102",
                event,
                "each micro-batch overwrites the gradient of the one before: only the last counts",
                (after[0], "the step comes only after the loop"),
            )
            return


def never_recovers(facts: Facts, view: View) -> Iterator[Hit]:
    """GA104: cleared only where the norm was finite."""
    if facts.opaque or facts.driven or len(view.windows) < 2:
        return
    for window in view.windows[1:]:
        cleared = [event for event in window.since if event.kind == "zero"]
        if len(cleared) != 1 or not window.fresh:
            continue
        zero = cleared[0]
        doubt = [
            key
            for key in zero.unsure
            if key in window.step.unsure and any(word in key for word in FINITE)
        ]
        if doubt and not any(key in window.fresh[-1].unsure for key in doubt):
            yield hit(
                "GA104",
                zero,
                "cleared only where the norm is finite: after one NaN the gradients stay NaN and "
                "no update ever comes again",
                (window.fresh[-1], "backward adds to what was not cleared"),
            )
            return


RULES = (
    never_recovers,
    zeroed_inside,
    hook_steps,
    never_accumulates,
    stale_start,
    other_losses_gradient,
    unowned,
)
