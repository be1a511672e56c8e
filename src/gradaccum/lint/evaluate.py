"""Expressions: from an `ast` node to the value it stands for."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gradaccum.lint.program import Module
from gradaccum.lint.slicing import CORE
from gradaccum.lint.values import Class, Env, Func, Num, Seq, Tensor, Thing, Value, varies

if TYPE_CHECKING:
    from gradaccum.lint.walk import Walker

_BUILTINS = frozenset(dir(builtins))

__all__ = ["assign", "attribute", "evaluate", "key_of", "text"]


def text(node: ast.AST) -> str:
    """A short, stable spelling of an expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{text(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{text(node.func)}()"
    if isinstance(node, ast.Constant):
        return repr(node.value)[:40]
    if isinstance(node, ast.Subscript):
        return f"{text(node.value)}[{text(node.slice)}]"
    return f"{type(node).__name__}@{getattr(node, 'lineno', 0)}:{getattr(node, 'col_offset', 0)}"


def key_of(value: Value) -> str:
    """What a value is called in conditions and divisors."""
    if isinstance(value, Thing):
        return value.key
    if isinstance(value, Num):
        return "|".join(sorted(value.tags)) or repr(value.value)
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Seq):
        return "seq"
    if isinstance(value, (Func, Class)):
        return getattr(value.node, "name", "lambda")
    return repr(value)


def evaluate(walker: Walker, env: Env, node: ast.expr) -> Value:
    """The value of `node` in `env`; what cannot be known is a `Thing` of kind unknown."""
    handler = _HANDLERS.get(type(node))
    if handler is None:
        return Thing("unknown", text(node), bool(walker.loops), depth=len(walker.loops))
    return handler(walker, env, node)


def _constant(walker: Walker, env: Env, node: ast.Constant) -> Value:
    value = node.value
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return Num(value)
    return Thing("literal", repr(value)[:20])


def _name(walker: Walker, env: Env, node: ast.Name) -> Value:
    found = env.outer.get(node.id) or env
    holder = found.find(node.id)
    if holder is not None:
        return holder.names[node.id]
    return _global(walker, env.module, node.id)


def _global(walker: Walker, module: Module, name: str) -> Value:
    if name == "__name__":
        return "__main__"
    scope = walker.scope(module)
    if name in scope.names:
        return scope.names[name]
    value = _outside(walker, module, name)
    scope.names[name] = value
    return value


def _outside(walker: Walker, module: Module, name: str) -> Value:
    node = module.functions.get(name)
    scope = walker.scope(module)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Func(node, scope, module)
    if isinstance(node, ast.ClassDef):
        return Class(node, scope, module)
    if name in module.imports:
        return external(walker, module, module.imports[name])
    wanted = None
    for statement in module.tree.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            wanted = statement.value
    if wanted is None:
        return Thing("external" if name in _BUILTINS else "unknown", name)
    scope.names[name] = Thing("unknown", name)  # ends a definition in terms of itself
    return evaluate(walker, scope, wanted)


def external(walker: Walker, module: Module, dotted: str) -> Value:
    """What an imported name means: a definition in another given file, or a dotted path."""
    found = walker.program.resolve(dotted, module.path)
    if found is None:
        return Thing("external", dotted)
    other, rest = found
    if not rest:
        return Thing("file", other.path)
    if "." in rest:
        return Thing("external", dotted)
    value = _global(walker, other, rest)
    if isinstance(value, Thing) and value.kind == "external" and value.key == rest:
        return Thing("external", dotted)
    return value


def _attribute(walker: Walker, env: Env, node: ast.Attribute) -> Value:
    return attribute(walker, evaluate(walker, env, node.value), node.attr, node)


def attribute(walker: Walker, value: Value, name: str, node: ast.AST) -> Value:
    """`value.name`."""
    from gradaccum.lint.classes import find_method  # noqa: PLC0415 - they need each other

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
        return _global(walker, module, name) if module else Thing("unknown", name)
    if name == "sync_gradients" and walker.accumulations:
        return walker.sync
    if name in value.attrs:
        return value.attrs[name]
    home = value.attrs.get("__class__")
    if isinstance(home, Class):
        method = find_method(walker, home, name)
        if method is not None:
            method.owner = value
            if any(text(item) in ("property", "cached_property") for item in _decorators(method)):
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
        made = Thing("param_groups", f"{value.key}.param_groups", models=value.models)
    elif name == "module" and value.kind in ("model", "unknown") and "ddp" in value.uses:
        return value
    else:
        made = Thing("unknown", f"{value.key}.{name}", value.varies, depth=value.depth)
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
    return _part(walker, value, f".{name}")


def _part(walker: Walker, value: Tensor, name: str) -> Tensor:
    """One of several results of a call, the same object whenever it is asked for."""
    key = id(value), name
    if key not in walker.parts:
        walker.parts[key] = value, replace(value, flags=value.flags | {f"part{name}"})
    return walker.parts[key][1]


def _subscript(walker: Walker, env: Env, node: ast.Subscript) -> Value:
    value = evaluate(walker, env, node.value)
    if isinstance(value, Tensor):
        if isinstance(node.slice, ast.Constant):
            return _part(walker, value, f"[{node.slice.value!r}]")
        return value
    index = None if isinstance(node.slice, ast.Slice) else evaluate(walker, env, node.slice)
    if isinstance(value, Seq):
        if isinstance(index, Num) and index.value == int(index.value):
            position = int(index.value)
            if -len(value.items) <= position < len(value.items):
                return value.items[position]
        if isinstance(node.slice, ast.Slice):
            return Seq(list(value.items), value.depth, open=True)
        if value.items and all(isinstance(item, Thing) for item in value.items):
            return value.items[0]
    if isinstance(value, Thing) and value.kind == "leaf":
        return Tensor(frozenset((value,)), flags=frozenset(("leaf",)))
    if isinstance(value, Thing):
        name = f"[{key_of(index)}]"
        if isinstance(index, str) and index in value.attrs:
            return value.attrs[index]
        if name not in value.attrs:
            changes = value.varies or varies(index)
            value.attrs[name] = Thing("unknown", f"{value.key}{name}", changes, depth=value.depth)
        return value.attrs[name]
    return Thing("unknown", text(node), varies(value) or varies(index), depth=len(walker.loops))


def _sequence(walker: Walker, env: Env, node: ast.Tuple | ast.List | ast.Set) -> Value:
    items: list[Value] = []
    open_ = False
    for item in node.elts:
        if isinstance(item, ast.Starred):
            value = evaluate(walker, env, item.value)
            if isinstance(value, Seq) and not value.open:
                items.extend(value.items)
            else:
                items.append(value)
                open_ = True
        else:
            items.append(evaluate(walker, env, item))
    return Seq(items, len(walker.loops), open_)


def _dict(walker: Walker, env: Env, node: ast.Dict) -> Value:
    made = Thing("dict", text(node), node=node, depth=len(walker.loops))
    for key, item in zip(node.keys, node.values, strict=True):
        value = evaluate(walker, env, item)
        name = evaluate(walker, env, key) if key is not None else None
        made.attrs[name if isinstance(name, str) else f"[{key_of(name)}]"] = value
    return made


def _comprehension(
    walker: Walker, env: Env, node: ast.ListComp | ast.SetComp | ast.GeneratorExp
) -> Value:
    from gradaccum.lint.branches import truth  # noqa: PLC0415 - they need each other
    from gradaccum.lint.loops import elements  # noqa: PLC0415 - they need each other
    from gradaccum.lint.walk import Frame  # noqa: PLC0415 - they need each other

    inner = Env({}, env, env.module)
    made = Seq([], len(walker.loops))
    pools: list[Value] = []

    def spin(level: int) -> None:
        if level == len(node.generators):
            made.items.append(evaluate(walker, inner, node.elt))
            return
        part = node.generators[level]
        iterable = evaluate(walker, inner, part.iter)
        pools.append(iterable)
        frame = Frame(node, walker.tick())
        walker.loops.append(frame)
        if part.ifs:
            walker.contexts.append(("filter", None))
        try:
            for index, (item, last) in enumerate(elements(walker, node, iterable, env)):
                frame.turn(index, last)
                walker.budget -= 1
                assign(walker, inner, part.target, item)
                tests = [truth(walker, inner, test) for test in part.ifs]
                if False not in tests:
                    spin(level + 1)
        finally:
            walker.loops.pop()
            if part.ifs:
                walker.contexts.pop()

    spin(0)
    first = pools[0] if pools else None
    kept = made.items[0] if len(made.items) == 1 else None
    if isinstance(first, Thing) and first.kind == "params" and isinstance(kept, Thing):
        if kept.kind == "param":
            filtered = any(part.ifs for part in node.generators)
            return Thing("params", f"some of {first.key}" if filtered else first.key,
                         models=first.models, args=(first,),
                         uses={"filtered"} if filtered else set())  # fmt: skip
    if not all(isinstance(pool, Seq) for pool in pools):
        made.open = True
    return made


def _if_exp(walker: Walker, env: Env, node: ast.IfExp) -> Value:
    from gradaccum.lint.branches import truth  # noqa: PLC0415 - they need each other

    value = truth(walker, env, node.test)
    if isinstance(value, bool):
        taken = value
    else:
        taken = walker.decide(value[0], value[1], _chooses(node)) == value[2]
    return evaluate(walker, env, node.body if taken else node.orelse)


_choosing: dict[ast.AST, bool] = {}


def _chooses(node: ast.IfExp) -> bool:
    """Whether a conditional expression may decide about a division, a context or a call."""
    if node not in _choosing:
        if len(_choosing) > 4096:
            _choosing.clear()
        _choosing[node] = any(
            (isinstance(child, ast.BinOp) and isinstance(child.op, ast.Div))
            or (isinstance(child, ast.Attribute) and child.attr in CORE)
            for child in ast.walk(node)
        )
    return _choosing[node]


def _truth(walker: Walker, env: Env, node: ast.expr) -> Value:
    from gradaccum.lint.branches import truth  # noqa: PLC0415 - they need each other

    value = truth(walker, env, node)
    if isinstance(value, bool):
        return value
    key, changes, positive = value
    return Thing("unknown", key if positive else f"not {key}", changes)


def _bool_op(walker: Walker, env: Env, node: ast.BoolOp) -> Value:
    if isinstance(node.op, ast.Or) and not isinstance(node.values[0], (ast.Compare, ast.UnaryOp)):
        first = evaluate(walker, env, node.values[0])
        if isinstance(first, (Tensor, Func, Class, Seq)):
            return first
        if isinstance(first, Thing) and first.kind not in ("unknown",):
            return first
    return _truth(walker, env, node)


def _bin_op(walker: Walker, env: Env, node: ast.BinOp) -> Value:
    from gradaccum.lint.arithmetic import binary  # noqa: PLC0415 - they need each other

    left = evaluate(walker, env, node.left)
    return binary(walker, node.op, left, evaluate(walker, env, node.right), node)


def _unary(walker: Walker, env: Env, node: ast.UnaryOp) -> Value:
    if isinstance(node.op, ast.Not):
        return _truth(walker, env, node)
    value = evaluate(walker, env, node.operand)
    if isinstance(value, Num) and isinstance(node.op, ast.USub):
        return Num(-value.value, value.tags, value.varies)
    return value


def _lambda(walker: Walker, env: Env, node: ast.Lambda) -> Value:
    return Func(node, env, env.module)


def _named(walker: Walker, env: Env, node: ast.NamedExpr) -> Value:
    value = evaluate(walker, env, node.value)
    assign(walker, env, node.target, value)
    return value


def _inner(walker: Walker, env: Env, node: ast.Await | ast.Starred) -> Value:
    return evaluate(walker, env, node.value)


def _string(walker: Walker, env: Env, node: ast.JoinedStr) -> Value:
    return Thing("unknown", text(node), bool(walker.loops))


def _call(walker: Walker, env: Env, node: ast.Call) -> Value:
    from gradaccum.lint.calls import call  # noqa: PLC0415 - they need each other

    return call(walker, env, node)


def assign(walker: Walker, env: Env, target: ast.expr, value: Value) -> None:
    """Bind `target` to `value`, unpacking as Python does."""
    if isinstance(target, ast.Name):
        env.set(target.id, value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        _unpack(walker, env, target, value)
    elif isinstance(target, ast.Starred):
        assign(walker, env, target.value, value)
    elif isinstance(target, ast.Attribute):
        _set_attribute(walker, env, target, value)
    elif isinstance(target, ast.Subscript):
        holder = evaluate(walker, env, target.value)
        index = None if isinstance(target.slice, ast.Slice) else evaluate(walker, env, target.slice)
        if isinstance(holder, Thing):
            holder.attrs[index if isinstance(index, str) else f"[{key_of(index)}]"] = value
        if isinstance(value, Tensor) and isinstance(holder, (Thing, Seq)) and walker.loops:
            walker.note("store", target, None, value)


def _unpack(walker: Walker, env: Env, target: ast.Tuple | ast.List, value: Value) -> None:
    count = len(target.elts)
    starred = any(isinstance(part, ast.Starred) for part in target.elts)
    for index, part in enumerate(target.elts):
        item: Value
        if (
            isinstance(value, Seq)
            and not starred
            and (not value.open and len(value.items) == count)
        ):
            item = value.items[index]
        elif isinstance(value, Tensor):
            item = _part(walker, value, f"[{index}]") if count > 1 else value
        elif isinstance(value, Thing):
            name = f"[{index}]"
            item = value.attrs.get(name)
            if item is None:
                item = Thing(_unpacked_kind(value), f"{value.key}{name}", value.varies,
                             depth=value.depth, models=value.models)  # fmt: skip
                value.attrs[name] = item
        else:
            item = Thing("unknown", f"{key_of(value)}[{index}]", varies(value))
        assign(walker, env, part, item)


def _unpacked_kind(value: Thing) -> str:
    # `for name, p in model.named_parameters()` walks items that are pairs of name and parameter
    return value.kind if value.kind in ("param", "grad") else "unknown"


def _set_attribute(walker: Walker, env: Env, target: ast.Attribute, value: Value) -> None:
    holder = evaluate(walker, env, target.value)
    if isinstance(holder, Tensor):
        if target.attr == "requires_grad" and value is True:
            walker.note("requires_grad", target, None, holder)
        return
    if not isinstance(holder, Thing):
        return
    if target.attr == "grad":
        kind = "zero" if value is None else "set_grad"
        walker.note(kind, target, holder, None, *(["param"] if holder.kind == "param" else []))
        return
    if target.attr == "data":
        reads = isinstance(value, Thing) and "grad" in value.uses
        walker.note("param_write", target, holder, None, "data", *(["grad"] if reads else []))
        return
    if target.attr == "require_backward_grad_sync":
        walker.note("sync_toggle", target, holder)
    if target.attr == "requires_grad":
        walker.note("unfreeze" if value is True else "freeze", target, holder)
        return
    holder.attrs[target.attr] = value
    if target.attr == "weight" and isinstance(value, Thing) and value.kind == "param":
        walker.note("tie", target, Thing("pair", "tie", models=value.models, args=(holder,)))
    if holder.kind == "model" and isinstance(value, Thing) and value.kind in ("model", "leaf"):
        holder.models |= {value} | value.models


_HANDLERS: dict[type[ast.AST], Callable[..., Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Tuple: _sequence,
    ast.List: _sequence,
    ast.Set: _sequence,
    ast.Dict: _dict,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.IfExp: _if_exp,
    ast.Compare: _truth,
    ast.BoolOp: _bool_op,
    ast.BinOp: _bin_op,
    ast.UnaryOp: _unary,
    ast.Lambda: _lambda,
    ast.NamedExpr: _named,
    ast.Await: _inner,
    ast.Starred: _inner,
    ast.JoinedStr: _string,
    ast.Call: _call,
}
