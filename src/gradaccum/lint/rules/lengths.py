"""What a window is counted by: tails, logs, token counts, lengths of loaders and schedules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gradaccum.lint.facts import FINITE, Facts, View, common_loop, counted, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Num, Seq, Thing, Value

__all__ = ["GLOBAL", "RULES"]


def tail_divided(facts: Facts, view: View) -> Iterator[Hit]:
    """GA204."""
    if facts.opaque or facts.driven:
        return
    usual = view.usual()
    if usual < 2:
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


def log_by_updates(facts: Facts) -> Iterator[Hit]:
    """GA205."""
    events = facts.trace.events
    for index, event in enumerate(events):
        if event.kind != "average" or event.thing is None or tensor_of(event).divisors:
            continue
        terms, by = event.thing.args
        assert isinstance(terms, Num)
        assert isinstance(by, Num)
        passes = [at for at, other in enumerate(events[:index]) if other.kind == "backward"]
        count = int(terms.value)
        if not 1 < count <= len(passes):
            continue
        steps = sum(1 for other in events[passes[-count] : index] if other.kind == "step")
        if by.value == steps and 0 < steps < count:
            yield hit("GA205", event, "a loss is summed for each micro-batch, and the sum is "
                      "divided by the number of updates: "
                      "the logged loss grows with the length of the window")  # fmt: skip
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


def ahead_of_skip(facts: Facts) -> Iterator[Hit]:
    """GA311."""
    scaled: Event | None = None
    for event in facts.trace.events:
        if event.kind == "step" and "scaler" in event.flags:
            scaled = event
        elif event.kind == "scaler_update" and "watched" in event.flags:
            return
        elif event in facts.schedulers and scaled is not None and event.loops:
            if event.loops == scaled.loops and set(event.unsure) <= set(scaled.unsure):
                yield hit("GA311", event, "the scaler may have skipped the step, and the scheduler "
                          "goes on all the same",
                          (scaled, "skipped if a gradient overflowed"))  # fmt: skip
                return


def floor_length(facts: Facts, view: View) -> Iterator[Hit]:
    """GA312."""
    usual = view.usual()
    if usual < 2 or facts.opaque:
        return
    flushed = [
        window
        for window in view.windows[1:]
        if 0 < len(window.fresh) < usual and common_loop(window.step, window.fresh[-1]) is not None
    ]
    if not flushed:
        return
    for event in facts.schedulers:
        thing = event.thing
        if thing is None or thing.node is None or "planned" in thing.uses:
            continue
        if any(_floored(value) for value in (*thing.args, *thing.kwargs.values())):
            made = Event("built", thing.node, event.path, (), thing)
            yield hit("GA312", made, "the schedule is planned for `len // N` updates an epoch, but "
                      "the loop also steps the short window at its end",
                      (flushed[0].step, "one update more an epoch"))  # fmt: skip
            return


def _floored(value: Value, depth: int = 0) -> bool:
    if isinstance(value, Num):
        return "floor" in value.tags
    if isinstance(value, Seq):
        return depth < 4 and any(_floored(item, depth + 1) for item in value.items)
    if isinstance(value, Thing):
        return depth < 4 and any(_floored(part, depth + 1) for part in value.args)
    return False


RULES = (tail_divided, floor_length)
GLOBAL = (ahead_of_skip, log_by_updates, padded_count, stream_length, unguarded_count)
