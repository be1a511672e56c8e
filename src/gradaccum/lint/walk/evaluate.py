"""Expressions: from an `ast` node to the value it stands for."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradaccum.lint.files.program import Module
from gradaccum.lint.walk.values import Class, Env, Func, Num, Seq, Tensor, Thing, Value, varies

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

_BUILTINS = frozenset(dir(builtins))

__all__ = [
    "EXPRESSIONS", "assign", "evaluate", "external", "global_name", "key_of", "part_of", "text",
]  # fmt: skip


def text(node: ast.AST) -> str:
    """A short, stable spelling of an expression."""
    if isinstance(node, ast.Name):
        return node.id
    known = node.__dict__.get("_text")  # a node is asked in every iteration of every walk
    if known is None:
        known = node.__dict__["_text"] = _spelled(node)
    return known


def _spelled(node: ast.AST) -> str:
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
    handler = EXPRESSIONS.get(type(node))
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
    name = node.id
    scope: Env | None = (env.outer.get(name) or env) if env.outer else env
    while scope is not None:
        if name in scope.names:
            return scope.names[name]
        scope = scope.parent
    return global_name(walker, env.module, name)


def global_name(walker: Walker, module: Module, name: str) -> Value:
    """What a name means at the top level of a file."""
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
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                wanted = statement.value
            elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                for part, value in zip(target.elts, statement.value.elts, strict=False):
                    if isinstance(part, ast.Name) and part.id == name:
                        wanted = value
    if wanted is None:
        return _from_star(walker, module, name)
    scope.names[name] = Thing("unknown", name)  # ends a definition in terms of itself
    return evaluate(walker, scope, wanted)


def _from_star(walker: Walker, module: Module, name: str) -> Value:
    """A name that an `import *` may have brought."""
    if name in _BUILTINS:
        return Thing("external", name)
    walker.scope(module).names[name] = Thing("unknown", name)  # ends a circle of imports
    for other in reversed(walker.program.everything(module)):
        value = global_name(walker, other, name)
        if not isinstance(value, Thing) or (value.kind, value.key) != ("unknown", name):
            return value
    return Thing("unknown", name)


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
    value = global_name(walker, other, rest)
    if isinstance(value, Thing) and value.kind == "external" and value.key == rest:
        return Thing("external", dotted)
    return value


def part_of(walker: Walker, value: Tensor, name: str) -> Tensor:
    """One of several results of a call, the same object whenever it is asked for."""
    key = id(value), name
    if key not in walker.parts:
        walker.parts[key] = value, value.but(flags=value.flags | {f"part{name}"})
    return walker.parts[key][1]


def _subscript(walker: Walker, env: Env, node: ast.Subscript) -> Value:
    value = evaluate(walker, env, node.value)
    if isinstance(value, Tensor):
        if isinstance(node.slice, ast.Constant):
            return part_of(walker, value, f"[{node.slice.value!r}]")
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
    return Seq(items, len(walker.loops), open_, text(node))


def _dict(walker: Walker, env: Env, node: ast.Dict) -> Value:
    made = Thing("dict", text(node), node=node, depth=len(walker.loops))
    for key, item in zip(node.keys, node.values, strict=True):
        value = evaluate(walker, env, item)
        name = evaluate(walker, env, key) if key is not None else None
        made.attrs[name if isinstance(name, str) else f"[{key_of(name)}]"] = value
    return made


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
        if isinstance(holder, Thing) and holder.kind == "grad":
            walker.note("set_grad", target, holder, None, "param")
            return
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
            item = part_of(walker, value, f"[{index}]") if count > 1 else value
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
        if value is True:
            holder.uses.add("asks_grad")
        return
    if holder.kind in ("model", "unknown") and learns(value):
        walker.note("part_replaced", target, holder)
    holder.attrs[target.attr] = value
    if target.attr == "weight" and isinstance(value, Thing) and value.kind == "param":
        walker.note("tie", target, Thing("pair", "tie", models=value.models, args=(holder,)))
    if holder.kind == "model" and isinstance(value, Thing) and value.kind in ("model", "leaf"):
        holder.models |= {value} | value.models
    elif holder.kind == "model" and isinstance(value, Seq):
        walker.note("unregistered", target, holder, None)


_WITH_WEIGHTS = re.compile(
    r"^(Linear|Bilinear|Conv|Embedding|LSTM|GRU|RNN|\w+Norm|Multihead|Trans)"
)


def learns(value: Value) -> bool:
    """Whether it is a module with parameters."""
    return isinstance(value, Thing) and value.kind == "model" and (
        _WITH_WEIGHTS.search(value.key) is not None or any(map(_learns_itself, value.models))
    )  # fmt: skip


def _learns_itself(part: Thing) -> bool:
    """Whether it is a parameter, or a layer of torch's that has some."""
    return part.kind == "leaf" or _WITH_WEIGHTS.search(part.key) is not None


EXPRESSIONS: dict[type[ast.AST], Callable[..., Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Subscript: _subscript,
    ast.Tuple: _sequence,
    ast.List: _sequence,
    ast.Set: _sequence,
    ast.Dict: _dict,
    ast.Lambda: _lambda,
    ast.NamedExpr: _named,
    ast.Await: _inner,
    ast.Starred: _inner,
    ast.JoinedStr: _string,
}
"""How each kind of expression is evaluated; expressions.py adds those that need other rooms."""
