"""Gradients that are read, added to or clipped by hand: GA106 and GA408 to GA411."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.lint.facts import Facts
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Seq, Thing, Value

__all__ = ["GLOBAL"]


def _owners(grad: Thing | None) -> frozenset[Thing]:
    """The models or leaves whose gradient this is."""
    if grad is None:
        return frozenset()
    found = set(grad.models)
    for part in grad.args:
        if isinstance(part, Thing):
            found |= part.models | ({part} if part.kind == "leaf" else frozenset())
    return frozenset(found)


def added_to_none(facts: Facts) -> Iterator[Hit]:
    """GA106."""
    cleared: Event | None = None
    for event in facts.trace.events:
        if event.kind == "zero" and "param" not in event.flags:
            cleared = None if "filled" in event.flags else event
        elif event.kind in ("backward", "set_grad", "escape", "autograd_grad"):
            cleared = None
        elif event.kind == "grad_scale" and "add" in event.flags and cleared is not None:
            if event.flags & {"asked", "hook"} or event.thing is None or cleared.thing is None:
                continue
            owned = cleared.thing.models | {cleared.thing}
            if _owners(event.thing) & owned:
                yield hit("GA106", event, "`zero_grad()` sets gradients to None, and nothing has "
                          "filled this one since: adding to it raises",
                          (cleared, "set to None here"))  # fmt: skip
                return


def complex_norm(facts: Facts) -> Iterator[Hit]:
    """GA408."""
    for event in facts.trace.events:
        if event.kind == "square" and any("complex" in one.uses for one in _owners(event.thing)):
            yield hit("GA408", event, "the square of a complex gradient is complex and may cancel: "
                      "a norm needs `abs()` first")  # fmt: skip
            return


def read_none(facts: Facts) -> Iterator[Hit]:
    """GA409."""
    frozen = [event for event in facts.trace.events if event.kind == "freeze" and event.thing]
    if not frozen:
        return
    for event in facts.trace.events:
        if event.kind != "grad_read" or event.flags & {"asked", "hook"} or event.thing is None:
            continue
        param = event.thing.args[0] if event.thing.args else None
        whole = param.args[0] if isinstance(param, Thing) and param.args else None
        if not isinstance(whole, Thing) or whole.kind != "params" or "filtered" in whole.uses:
            continue
        for one in frozen:
            part = one.thing
            assert part is not None
            if any(_part_of(part, model) for model in whole.models):
                yield hit("GA409", event, "the gradient of a frozen parameter is None, so this "
                          "raises; nothing here asks for it",
                          (one, "frozen here"))  # fmt: skip
                return


def _part_of(part: Thing, model: Thing) -> bool:
    if part is model:
        return False  # the whole model is frozen, so it is not what is trained
    return part in model.models or part.key.startswith((f"{model.key}.", f"{model.key}["))


def clip_sparse(facts: Facts) -> Iterator[Hit]:
    """GA410."""
    reached = {model for event in facts.backwards if event.tensor for model in event.tensor.models}
    for event in facts.trace.events:
        if event.kind != "clip" or event.thing is None or "value" in event.flags:
            continue
        parts = event.thing.models | {inner for model in event.thing.models
                                      for inner in model.models}  # fmt: skip
        if any("sparse" in part.uses for part in parts) and reached & parts:
            yield hit("GA410", event, "an embedding with `sparse=True` has sparse gradients, and "
                      "torch cannot take their norm: this raises")  # fmt: skip
            return


def clip_tied(facts: Facts) -> Iterator[Hit]:
    """GA411."""
    ties = [event.thing for event in facts.trace.events if event.kind == "tie" and event.thing]
    if not ties:
        return
    for event in facts.trace.events:
        if event.kind != "clip" or event.thing is None:
            continue
        groups = _groups(event.thing.args)
        for pair in ties:
            holder = pair.args[0]
            assert isinstance(holder, Thing)
            with_holder = [group for group in groups if holder in group.models]
            with_source = [group for group in groups if pair.models & group.models]
            if any(one is not other for one in with_holder for other in with_source):
                yield hit("GA411", event, "the shared weight is in this list twice: it counts "
                          "twice in the norm and is scaled twice")  # fmt: skip
                return


def _groups(values: tuple[Value, ...], depth: int = 0) -> list[Thing]:
    found: list[Thing] = []
    for value in values:
        if isinstance(value, Seq) and depth < 3:
            found.extend(_groups(tuple(value.items), depth + 1))
        elif isinstance(value, Thing):
            if value.kind == "params":
                found.append(value)
            elif depth < 3:
                found.extend(_groups(value.args, depth + 1))
    return found


GLOBAL = (added_to_none, complex_norm, read_none, clip_sparse, clip_tied)
