"""Gradients that are cleared and scaled by other means than `zero_grad()`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.walk.contents import models_of
from gradaccum.lint.walk.evaluate import text
from gradaccum.lint.walk.values import Func, Num, Seq, Tensor, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = [
    "add_group", "delete", "each", "foreach", "grad_hook", "hook_in", "is_one", "load", "parts",
    "post_hook",
    "reset",
    "resize",
    "run_hooks", "spend", "step_hook", "submodules", "write_grad",
]  # fmt: skip

_PRE, _POST = "__pre__", "__post__"


def write_grad(
    walker: Walker, node: ast.AST, grad: Thing, name: str, args: list[Value], *flags: str
) -> None:
    """An in-place method of a gradient: it clears, or it scales."""
    if name == "clamp_":
        return  # cut, but neither cleared nor scaled
    nought = bool(args) and isinstance(args[0], Num) and args[0].value == 0
    if name == "zero_" or (nought and name in ("fill_", "mul_")):
        kind = "zero"
    else:
        kind = "set_grad" if name in ("fill_", "copy_") else "grad_scale"
    share = ["share"] if kind == "grad_scale" and name == "div_" and _fixed(args) else []
    walker.note(kind, node, grad, None, "param", *flags, *share)


def _fixed(args: list[Value]) -> bool:
    """Whether a gradient is divided by what is the same for all micro-batches, and not one."""
    by = args[0] if args else None
    return isinstance(by, (Num, Thing)) and not by.varies and getattr(by, "value", 0) != 1


def spend(params: Thing) -> bool:
    """Walk over parameters to their end; whether somebody did so before, with the one iterator."""
    if "iterator" not in params.uses:
        return False
    again = "spent" in params.uses
    params.uses.add("spent")
    return again


def foreach(walker: Walker, node: ast.AST, name: str, args: list[Value]) -> None:
    """`torch._foreach_zero_(grads)` and its like."""
    given = args[0] if args else None
    parts = given.items[:16] if isinstance(given, Seq) else [given]
    for part in parts:
        if isinstance(part, Thing) and part.kind == "grad":
            write_grad(walker, node, part, name.removeprefix("_foreach_"), args[1:])
        elif not isinstance(part, Thing) or part.kind not in ("param", "params"):
            # who knows what these are: they may be gradients
            walker.note("set_grad", node, Thing("params", "list", models=models_of([part])))


def delete(walker: Walker, node: ast.AST, holder: Value) -> None:
    """`del p.grad`."""
    if isinstance(holder, Thing):
        walker.note("zero", node, holder, None, *(["param"] if holder.kind == "param" else []))


def each(walker: Walker, node: ast.Call, target: Value, over: Value) -> Value:
    """`map(f, values)`: a call for each of them."""
    if not isinstance(target, Func):
        return None
    if isinstance(over, Seq):
        items: list[Value] = list(over.items[:16])
    elif isinstance(over, Thing) and over.kind == "params":
        items = [Thing("param", f"{over.key}[i]", True, models=over.models, args=(over,))]
    else:
        return None
    return Seq([walker.function(target, [item], {}) for item in items], len(walker.loops), True)


def hook_in(walker: Walker, node: ast.AST, name: str, owner: Thing | None, hook: Value) -> None:
    """A function that every step of an optimizer, or of all of them, calls before or after."""
    side = _PRE if name.endswith("pre_hook") else _POST
    walker.step_hooks.append((side, owner, hook))


def run_hooks(walker: Walker, node: ast.AST, optimizer: Thing, before: bool) -> None:
    """What the hooks on a step do."""
    for side, owner, hook in walker.step_hooks:
        if (side == _PRE) is not before or (owner is not None and owner is not optimizer):
            continue
        if isinstance(hook, Func):
            walker.function(hook, [optimizer, Seq([]), Thing("dict", "kwargs")], {})
        else:
            walker.note("escape", node, optimizer)


def is_one(value: Value) -> bool:
    """Whether what a backward is started with weighs everything as 1."""
    if value is None:
        return True
    if isinstance(value, Num):
        return value.value == 1
    made = value.made if isinstance(value, Tensor) else getattr(value, "node", None)
    name = text(made.func) if isinstance(made, ast.Call) else ""
    return name.split(".")[-1] in ("ones", "ones_like")


def step_hook(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
               kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """A hook that is put on an optimizer."""
    name = text(node.func).split(".")[-1]
    hook_in(walker, node, name, receiver, args[0] if args else kwargs.get("hook"))
    return None


def submodules(walker: Walker, node: ast.Call, model: Thing, inner: Value) -> Value:
    """`model.apply(f)`: a call for each module, of which the model stands for all."""
    if isinstance(inner, Func):
        walker.function(inner, [model], {})
    else:
        walker.note("escape", node, model)
    return model


def _returns(node: ast.AST) -> bool:
    """Whether a hook returns anything, which then is the gradient, or works on it in place."""
    if isinstance(node, ast.Lambda):
        return not isinstance(node.body, ast.Constant)
    return any(
        (isinstance(part, ast.Return) and part.value is not None)
        or isinstance(part, ast.AugAssign)
        or (isinstance(part, ast.Attribute) and part.attr in ("div_", "mul_"))
        for part in ast.walk(node)
    )


def load(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
          kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """Weights or a state from elsewhere."""
    receiver.uses.add("load_state_dict")
    if receiver.kind in ("model", "unknown"):
        anew = ["anew"] if kwargs.get("assign") is True else []
        walker.note("weights_set", node, receiver, None, *anew)
    return None


def resize(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
           kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """An embedding that is replaced by a larger one."""
    walker.note("part_replaced", node, receiver)
    return receiver


def reset(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
           kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """Weights drawn anew."""
    walker.note("weights_set", node, receiver)
    return None


def add_group(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
               kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """More parameters for an optimizer."""
    walker.note("add_group", node, receiver)
    return None


def parts(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
          kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """What a model is made of, one after the other."""
    models = frozenset((receiver,)) | receiver.models
    return Thing("parts", f"{receiver.key}.parts()", models=models, depth=receiver.depth)


def post_hook(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
               kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """A hook that runs when a gradient is complete."""
    if args and isinstance(args[0], Func):
        walker.note("post_hook", args[0].node, receiver)
        if not any(hook.node is args[0].node for hook, _ in walker.hooks):
            walker.hooks.append((args[0], receiver))
    return None


def grad_hook(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
               kwargs: dict[str, Value]) -> Value:  # fmt: skip
    """A hook that sees a gradient, and may return another."""
    if receiver.kind in ("leaf", "param") and args and isinstance(args[0], Func):
        marks = ["returns"] if _returns(args[0].node) else []
        walker.note("grad_hook", node, receiver, None, *_names(args[0].node), *marks)
    return None


def _names(node: ast.AST) -> set[str]:
    return {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
