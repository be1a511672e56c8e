"""What Accelerate, Fabric and their like do with a window: when they divide, step and exchange."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.walk.evaluate import text
from gradaccum.lint.walk.values import Num, Seq, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["accelerate_steps", "accumulate", "idle", "no_sync", "prepare"]


def accelerate_steps(walker: Walker, accelerator: Thing) -> Value:
    """What an `Accelerator` divides by, where the source says it."""
    steps = accelerator.kwargs.get("gradient_accumulation_steps")
    if isinstance(steps, Thing):
        return walker.symbol(steps.key)
    if isinstance(steps, Num):
        return steps if steps.value > 1 else None
    return None


def idle(walker: Walker, thing: Thing) -> bool:
    """Whether a prepared optimizer ignores the call, as Accelerate's do inside a window.

    A prepared model does not: it is the model itself, perhaps in `DistributedDataParallel`.
    """
    if thing.kind == "model":
        return False
    return "prepared" in thing.uses and walker.accumulations > 0 and not walker.sync


def accumulate(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
               kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """`accelerator.accumulate(model)`."""
    if receiver.kind == "unknown":
        receiver.kind = "accelerator"
    return Thing("context", "accumulate", args=(receiver,))


def no_sync(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
            kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """A context in which ranks exchange no gradients."""
    if kwargs.get("enabled") is False:
        return Thing("context", "null")
    return Thing("context", "no_sync", args=(receiver,))


def prepare(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
            kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """Objects that an engine takes over, returned as they came."""
    lists = [value.items if isinstance(value, Seq) else [value] for value in args]
    for value in [part for parts in lists for part in parts]:
        if isinstance(value, Thing):
            value.uses.add("prepared")
            if ".setup" in text(node):
                value.uses.discard("prepared")
    return args[0] if len(args) == 1 else Seq(list(args), len(walker.loops))
