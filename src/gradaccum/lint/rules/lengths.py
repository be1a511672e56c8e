"""What a window is counted by: tails, token counts, lengths of loaders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gradaccum.lint.facts import FINITE, Facts, View, counted, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.trace import Event

__all__ = ["GLOBAL", "RULES"]


def tail_divided(facts: Facts, view: View) -> Iterator[Hit]:
    """GA204."""
    if facts.opaque or facts.driven:
        return
    usual = view.usual()
    if usual < 2 or any(number % usual == 0 for number in facts.trace.multiples):
        return
    for window in view.windows:
        if not 0 < len(window.fresh) < usual or window is view.windows[0] or window.lost:
            continue
        last = window.fresh[-1]
        full = [item for item in tensor_of(last).divisors if item.value == usual]
        rescaled = any(event.kind in ("grad_scale", "set_grad", "escape") for event in window.since)
        if full and not rescaled and "accelerate" not in last.flags:
            whole = str(usual) if counted(facts) else "the length of a full one"
            yield hit("GA204", last, "the last, short window holds fewer micro-batches, and its "
                      f"loss is divided by {whole}",
                      (window.step, "the step of the short window"))  # fmt: skip
            return


def no_window(facts: Facts) -> Iterator[Hit]:
    """GA302: the window is longer than what there is to fill it with."""
    if facts.opaque or facts.driven or facts.repeated or not facts.backwards:
        return
    if any(event.kind in ("step", "escape", "autograd_grad") for event in facts.trace.events):
        return
    for gate in facts.trace.gates.values():
        if gate.taken or gate.node.orelse or any(part.taken for part in facts.trace.gates.values()):
            continue
        inside = [event for event in facts.backwards
                  if event.loops and event.loops[-1].node is gate.loops[-1].node]  # fmt: skip
        if len(inside) == len(facts.backwards):
            made = Event("gate", gate.node.test, gate.path, gate.loops)
            yield hit(
                "GA302",
                made,
                "the window is longer than the loop: the optimizer never steps",
                (inside[-1], "backward fills gradients that nobody consumes"),
            )
            return


def padded_count(facts: Facts) -> Iterator[Hit]:
    """GA207."""
    for event in facts.backwards:
        if not event.loops:
            continue
        loop = event.loops[-1].node
        for item in tensor_of(event).divisors:
            name, _, call = item.key.partition(".numel()@")
            if call and name.isidentifier() and _masked(loop, name):
                yield hit("GA207", event, f"`{name}.numel()` counts the padding that the loss "
                          "leaves out, so short sequences weigh less")  # fmt: skip
                return


def _masked(loop: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Name)
        and node.left.id == name
        and any(isinstance(op, ast.NotEq) for op in node.ops)
        for node in ast.walk(loop)
    )


def unguarded_count(facts: Facts) -> Iterator[Hit]:
    """GA206."""
    for event in facts.trace.events:
        if event.kind == "by_count" and event.loops and event.tensor is not None:
            if not _counts_kept(event.node):
                continue
            used = [mark for mark in facts.backwards
                    if tensor_of(mark).models & event.tensor.models
                    and mark.loops[: len(event.loops)] == event.loops
                    and not any(word in key for key in mark.unsure for word in FINITE)]  # fmt: skip
            if used:
                yield hit("GA206", event, "the count is zero where everything is masked, and "
                          "0 / 0 makes every gradient of the window NaN",
                          (used[0], "backward"))  # fmt: skip
                return


_KEPT_WORD = re.compile(
    r"mask|valid|keep|kept|pad|active|select|ignore|present|positive|foreground|\bfg|\bpos",
    re.IGNORECASE,
)


def _counts_kept(node: ast.AST) -> bool:
    """Whether what is counted says what to leave out: weights are never all zero."""
    right = node.right if isinstance(node, ast.BinOp) else None
    func = right.func if isinstance(right, ast.Call) else None
    counted = func.value if isinstance(func, ast.Attribute) else None
    return counted is not None and any(
        isinstance(part, ast.Compare)
        or _KEPT_WORD.search(getattr(part, "id", getattr(part, "attr", "")))
        for part in ast.walk(counted)
    )


def stream_length(facts: Facts) -> Iterator[Hit]:
    """GA310."""
    for event in facts.trace.events:
        if event.kind == "step_by_length":
            yield hit("GA310", event, "the loader reads an IterableDataset, whose length is only "
                      "an estimate: the last window ends at the wrong batch")  # fmt: skip
            return


RULES = (tail_divided,)
GLOBAL = (no_window, padded_count, stream_length, unguarded_count)
