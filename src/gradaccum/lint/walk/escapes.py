"""What is handed to code that nobody gave us: it may be stepped, cleared or used up there."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.walk.values import Seq, Tensor, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["escapes"]

_OWNED = frozenset({"optimizer", "model", "scaler", "params"})

_HARMLESS = frozenset(
    {
        "append", "clip_grad_norm", "clip_grad_norm_", "clip_grad_value_", "eval", "id",
        "isinstance", "len", "load_state_dict", "print", "save", "state_dict", "str", "train",
        "type", "update", "update_parameters", "prepare", "add_scalar", "log", "log_dict", "info",
        "toggle_optimizer", "untoggle_optimizer",
    }
)  # fmt: skip
"""Calls that do nothing of the kind."""


def escapes(walker: Walker, node: ast.Call, values: list[Value]) -> None:
    """Note what unknown code was given: it may step, zero or run backward with it."""
    if (
        not walker.loops
        or (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in _HARMLESS
    ):
        return
    for value in values:
        parts = value.items[:16] if isinstance(value, Seq) else [value]
        for part in parts:
            if isinstance(part, Thing):
                if part.kind in _OWNED or (
                    part.kind == "unknown" and not part.varies and part.uses
                ):
                    walker.note("escape", node, part)
                elif part.kind == "instance":
                    for held in list(part.attrs.values()):
                        if isinstance(held, Thing) and held.kind in _OWNED:
                            walker.note("escape", node, held)
            elif isinstance(part, Tensor) and part.graph and part.forwards:
                walker.note("escape", node, None, part)
