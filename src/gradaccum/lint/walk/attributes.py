"""`value.name`: what the attribute of a followed value is."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.walk.classes import find_method
from gradaccum.lint.walk.evaluate import evaluate, global_name, key_of, part_of, text
from gradaccum.lint.walk.values import Class, Env, Func, Num, Tensor, Thing, Value, varies

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["attribute", "attribute_of"]


def attribute_of(walker: Walker, env: Env, node: ast.Attribute) -> Value:
    """An `ast.Attribute`."""
    return attribute(walker, evaluate(walker, env, node.value), node.attr, node)


def attribute(walker: Walker, value: Value, name: str, node: ast.AST) -> Value:
    """`value.name`."""
    if isinstance(value, Tensor):
        return _tensor_attribute(walker, value, name, node)
    if isinstance(value, Class):
        method = find_method(walker, value, name)
        return method if method is not None else Thing("unknown", f"{value.node.name}.{name}")
    if not isinstance(value, Thing):
        return Thing("unknown", f"{key_of(value)}.{name}", varies(value))
    if value.kind == "external":
        return (
            value.attrs[name] if name in value.attrs else Thing("external", f"{value.key}.{name}")
        )
    if value.kind == "file":
        module = walker.program.load(value.key)
        return global_name(walker, module, name) if module else Thing("unknown", name)
    if name == "sync_gradients" and walker.accumulations:
        return walker.sync
    if name == "gradient_accumulation_steps" and value.kind == "accelerator":
        told = value.kwargs.get(name)
        return told if isinstance(told, (Num, Thing)) else Thing("unknown", "accelerate")
    if name == "is_last_batch" and walker.loops:
        return walker.loops[-1].last  # a Lightning trainer's
    if name == "training" and walker.quiet():
        return False  # where no graph is made, nobody trains
    if name in value.attrs:
        return value.attrs[name]
    home = value.attrs.get("__class__")
    if isinstance(home, Class):
        method = find_method(walker, home, name)
        if method is not None:
            method.owner = value
            kinds = {text(item).split(".")[-1] for item in _decorators(method)}
            if "cached_property" in kinds:
                value.attrs[name] = made = walker.function(method, [], {})
                return made
            if "property" in kinds:
                return walker.function(method, [], {})
            return method
    if name == "requires_grad" and value.kind == "param":
        return True
    if name == "grad" and value.kind == "unknown":
        made = Thing("grad", f"{value.key}.grad", True, args=(value,))
    elif name in ("weight", "bias") and value.kind == "model":
        made = Thing("param", f"{value.key}.{name}", models=frozenset((value,)))
    elif name == "grad" and value.kind in ("param", "leaf"):
        made = Thing("grad", f"{value.key}.grad", True, models=value.models, args=(value,))
    elif name == "data" and value.kind in ("grad", "param"):
        made = Thing(value.kind, f"{value.key}.data", True, models=value.models, args=(value,))
        made.uses.add("data")
    elif name == "param_groups":
        value.uses.add("param_groups")
        made = Thing("param_groups", f"{value.key}.param_groups", models=value.models,
                     args=(value,))  # fmt: skip
    elif name == "module" and value.kind in ("model", "unknown") and "ddp" in value.uses:
        return value
    else:
        made = Thing("unknown", f"{value.key}.{name}", value.varies, depth=value.depth,
                     args=(value,))  # fmt: skip
    value.attrs[name] = made
    return made


def _decorators(func: Func) -> list[ast.expr]:
    return [] if isinstance(func.node, ast.Lambda) else func.node.decorator_list


def _tensor_attribute(walker: Walker, value: Tensor, name: str, node: ast.AST) -> Value:
    if name in ("shape", "device", "dtype", "ndim", "requires_grad"):
        return Thing("unknown", f"tensor.{name}", True)
    if name == "grad":
        return Thing("grad", "tensor.grad", True)
    if name == "data":
        marks = {"detached", *(["data"] if value.graph else [])}
        return Tensor(value.models, value.divisors, value.forwards, value.flags | marks,
                      value.scaler, False, made=node)  # fmt: skip
    return part_of(walker, value, f".{name}")
