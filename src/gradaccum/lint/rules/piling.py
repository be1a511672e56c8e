"""GA101: gradients that pile up, because nothing clears them between two steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.lint.facts import (
    Facts,
    View,
    Window,
    certain,
    common_loop,
    is_model_root,
    zeroes,
)
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.trace import Event, Loop
from gradaccum.lint.walk.values import Num

__all__ = ["RULES"]


def never_zeroed(facts: Facts, view: View) -> Iterator[Hit]:
    """GA101."""
    if facts.driven or facts.opaque or len(view.windows) < 2:
        return
    others = [other.optimizer for other in facts.views]
    trace = facts.trace
    if any(
        event.kind in ("zero", "set_grad") and zeroes(event, view.optimizer, others) is not False
        for event in trace.events
        if event.loops
    ):
        return
    for window in view.windows[1:]:
        if not window.fresh or not window.held or "closure" in window.step.flags:
            continue
        if any(event.kind == "escape" and _may_zero(event, view) for event in window.since):
            continue
        if not all(certain(view, facts, event) for event in window.fresh):
            continue
        if not window.step.loops or common_loop(window.fresh[-1], window.held[-1]) is None:
            continue
        if _fresh_leaf(window) or "hook" in window.step.flags:
            continue
        yield hit(
            "GA101",
            window.step,
            "the gradients that this step consumes are never cleared: "
            "every update adds those of all batches before it",
            (window.fresh[-1], "backward adds to the gradients"),
        )
        return


def _may_zero(event: Event, view: View) -> bool:
    if event.thing is view.optimizer:
        return True
    thing = event.thing
    return thing is not None and (
        thing in view.optimizer.models or thing.kind in ("model", "params")
    )


def _fresh_leaf(window: Window) -> bool:
    models = [model for event in window.fresh if event.tensor for model in event.tensor.models]
    return bool(models) and all(model.depth > 0 for model in models)


def cleared_outside(facts: Facts, view: View) -> Iterator[Hit]:
    """GA101: cleared before the loop that steps, and not in it."""
    if facts.opaque:
        return
    others = [other.optimizer for other in facts.views]
    for before, window in zip(view.windows, view.windows[1:], strict=False):
        step = window.step
        if step.node is not before.step.node or not step.loops or step.flags & {"closure", "hook"}:
            continue
        loop = common_loop(step, before.step)
        if loop is None or len(step.loops) == 1 or is_model_root(step.loops[-1].node):
            continue
        turn = step.loops[-1]
        if turn.entry != before.step.loops[-1].entry or turn.node is not before.step.loops[-1].node:
            continue
        held = [mark for mark in window.held if _within(mark, turn)]
        fresh = [mark for mark in window.fresh if _within(mark, turn)]
        if not held or not fresh or held[-1].node is not fresh[-1].node or _fresh_leaf(window):
            continue
        if not all(certain(view, facts, mark) for mark in (*held, *fresh)):
            continue
        cleared = [event for event in facts.trace.events if event.kind in ("zero", "set_grad")
                   and zeroes(event, view.optimizer, others) is not False]  # fmt: skip
        if not cleared or any(_inside(event, turn.node) for event in cleared):
            continue
        if any(event.kind in ("escape", "grad_scale") and _may_zero(event, view)
               for event in window.since):  # fmt: skip
            continue
        yield hit(
            "GA101",
            cleared[-1],
            "cleared before the loop, and not between the steps inside it: every step also uses "
            "the gradients of all batches before it",
            (fresh[-1], "backward adds to the gradients"),
            (step, "each step uses the sum so far"),
        )
        return


def _within(mark: Event, turn: Loop) -> bool:
    return any(loop.node is turn.node and loop.entry == turn.entry for loop in mark.loops)


def _inside(event: Event, node: ast.AST) -> bool:
    return any(loop.node is node for loop in event.loops)


def closure_piles(facts: Facts, view: View) -> Iterator[Hit]:
    """GA101: a closure that L-BFGS evaluates many times, and that clears nothing."""
    if facts.opaque or view.optimizer.key != "LBFGS" or "torch" not in view.optimizer.uses:
        return
    most = view.optimizer.kwargs.get("max_iter")
    if isinstance(most, Num) and most.value <= 1:
        return
    for window in view.windows:
        if "closure" not in window.step.flags or not window.fresh:
            continue
        mark = window.fresh[-1]
        inside = [event.kind for event in window.since if "closure" in event.flags]
        if "closure" not in mark.flags or {"zero", "set_grad", "escape"} & set(inside):
            continue
        yield hit(
            "GA101",
            mark,
            "L-BFGS calls this closure many times in one step, and it does not clear: each "
            "evaluation adds to the gradients of those before it",
            (window.step, "step(closure)"),
        )
        return


def closure_without_backward(facts: Facts, view: View) -> Iterator[Hit]:
    """GA301: a closure that computes the loss, and no gradient."""
    if facts.opaque or facts.backwards or view.optimizer.key != "LBFGS":
        return
    fills = {"set_grad", "autograd_grad", "escape"}
    for window in view.windows:
        inside = [event.kind for event in facts.trace.events if "closure" in event.flags]
        if "closure" in window.step.flags and "forward" in inside and not fills & set(inside):
            yield hit("GA301", window.step, "the closure returns a loss and calls no `backward()`, "
                      "so this steps on gradients that nothing has made")  # fmt: skip
            return


RULES = (closure_without_backward, never_zeroed, cleared_outside, closure_piles)
