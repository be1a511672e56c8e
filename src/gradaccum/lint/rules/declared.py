"""GA316 and GA317: a window that the source declares, and that something does not keep to."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.lint.facts import Facts, View, Window, certain, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.evaluate import text
from gradaccum.lint.walk.trace import Event

__all__ = ["RULES"]

_OF_WINDOW = frozenset({"zero_grad", "clip_grad_norm_", "clip_grad_value_", "unscale_", "update"})
"""Calls that come once a window, beside the step."""


def steps_each(facts: Facts, view: View) -> Iterator[Hit]:
    """GA316: the loop counts a window and divides by it, and steps in every micro-batch."""
    optimizer = view.optimizer
    if facts.opaque or facts.driven or len(view.windows) < 3 or "prepared" in optimizer.uses:
        return
    if optimizer.kind != "optimizer":
        return
    steps = {window.step.node for window in view.windows}
    if len(steps) != 1 or any(len(window.fresh) != 1 for window in view.windows):
        return
    window = view.windows[1]
    step, mark = window.step, window.fresh[0]
    if step.unsure or not step.loops or step.loops != mark.loops or not certain(view, facts, mark):
        return
    if step.flags & {"hook", "closure", "accumulate"} or mark.flags & {"accelerate", "engine"}:
        return
    gates = [gate for gate in _gates(step.loops[-1].node) if not _holds(gate, step.node)]
    for gate in gates:
        divisor = _modulus(gate.test)
        within = {getattr(node.func, "attr", "") for part in gate.body for node in ast.walk(part)
                  if isinstance(node, ast.Call)}  # fmt: skip
        if not divisor or not within & _OF_WINDOW or not _divides(step.loops[-1].node, divisor):
            continue
        if tensor_of(mark).divisors:
            yield hit("GA316", step, f"steps after every micro-batch, although the loss is divided "
                      f"by `{divisor}` and a window of as many is counted",
                      (mark, "backward of the divided loss"),
                      (Event("gate", gate, step.path, ()), "what belongs to a window"))  # fmt: skip
            return


def _gates(loop: ast.AST) -> Iterator[ast.If]:
    for node in ast.walk(loop):
        if isinstance(node, ast.If):
            yield node


def _holds(gate: ast.If, node: ast.AST) -> bool:
    return any(part is node for part in ast.walk(gate))


def _modulus(test: ast.expr) -> str:
    """What a condition counts by: `N` in `(i + 1) % N == 0`."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return text(node.right) if isinstance(node.right, (ast.Name, ast.Attribute)) else ""
    return ""


def _divides(loop: ast.AST, divisor: str) -> bool:
    return any(
        (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
         and text(node.right) == divisor)
        or (isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div)
            and text(node.value) == divisor)
        for node in ast.walk(loop)
    )  # fmt: skip


def averaged_each(facts: Facts, view: View) -> Iterator[Hit]:
    """GA317."""
    usual = view.usual()
    if facts.opaque or usual < 2:
        return
    events = facts.trace.events
    for window in view.windows:
        if len(window.fresh) != usual or not _one_turn_each(window):
            continue
        start, end = events.index(window.fresh[0]), events.index(window.step)
        moves: dict[ast.AST, list[Event]] = {}
        for event in events[start:end]:
            if event.kind == "averaged" and not event.unsure:
                moves.setdefault(event.node, []).append(event)
        for found in moves.values():
            turns = {event.loops for event in found} & {mark.loops for mark in window.fresh}
            if len(turns) >= usual - 1:
                yield hit("GA317", found[0], "the average moves after every micro-batch, though "
                          "the weights change once a window: it follows them N times as fast",
                          (window.step, "the weights change here"))  # fmt: skip
                return


def _one_turn_each(window: Window) -> bool:
    return len({mark.loops for mark in window.fresh}) == len(window.fresh)


RULES = (steps_each, averaged_each)
