"""What the methods of a tensor do to its history."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.walk.arithmetic import binary, merged
from gradaccum.lint.walk.by_hand import is_one
from gradaccum.lint.walk.effects import METHODS, alias, backward, leaf
from gradaccum.lint.walk.means import shown
from gradaccum.lint.walk.values import Tensor, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["tensor_method"]

_OBJECT = frozenset({"zero_grad", "parameters", "named_parameters", "step", "train", "eval"})
_NUMBERS = frozenset({"item", "tolist", "numpy", "size", "dim", "numel", "is_finite"})
_CUTS = frozenset({"detach", "argmax", "detach_", "long", "int", "bool", "argmin"})


def tensor_method(
    walker: Walker,
    node: ast.Call,
    tensor: Tensor,
    name: str,
    args: list[Value],
    kwargs: dict[str, Value],
) -> Value:
    """A method of a tensor."""
    if "data" in tensor.flags and name.endswith("_") and not name.startswith("_"):
        walker.note("data_write", node, None, tensor)
    if name in _OBJECT:
        return METHODS[name](walker, node, alias(walker, tensor), args, kwargs)
    if name == "backward" and id(tensor) in walker.aliases and args:
        return METHODS["backward"](
            walker, node, alias(walker, tensor), args, kwargs
        )  # DeepSpeed's engine
    if name == "backward":
        seed = args[0] if args else kwargs.get("gradient")
        marks = [*(["gradient"] if args else []), *([] if is_one(seed) else ["weighted"])]
        backward(walker, node, tensor, None, kwargs, *marks)
        return None
    if name in _NUMBERS:
        if name == "item":
            return shown(tensor, node, name)
        return Thing("unknown", f"{name}@{node.lineno}", True)
    if name in _CUTS:
        flags = (tensor.flags | {"detached"}) - {"leaf", "running", "again"}
        return tensor.but(graph=False, flags=flags, made=node, models=frozenset(),
                       forwards=frozenset())  # fmt: skip
    if name == "requires_grad_" and (not args or args[0] is True):
        walker.note("requires_grad", node, None, tensor)
        if tensor.graph:
            return tensor
        fresh = Thing("leaf", f"leaf@{node.lineno}", node=node, depth=len(walker.loops))
        return leaf(fresh).but(made=node)
    if name in ("div", "div_", "true_divide") and args:
        return binary(walker, ast.Div(), tensor, args[0], node)
    if name in ("mul", "mul_", "multiply") and args:
        return binary(walker, ast.Mult(), tensor, args[0], node)
    if name in ("add", "add_", "sub", "sub_") and args:
        return binary(walker, ast.Add(), tensor, args[0], node)
    if name in ("sum", "mean"):
        flags = tensor.flags - {"sum"} if name == "mean" else tensor.flags | {"sum"}
        return tensor.but(flags=flags, made=node)
    extra = [value for value in args if isinstance(value, Tensor)]
    if extra:
        return merged([tensor, *extra], node)
    return tensor.but(made=node, flags=tensor.flags - {"data"})
