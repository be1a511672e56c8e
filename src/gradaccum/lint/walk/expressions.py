"""Expressions that decide, compute, loop or call: what evaluate.py alone cannot know."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradaccum.lint.files.slicing import CORE
from gradaccum.lint.walk.arithmetic import binary
from gradaccum.lint.walk.attributes import attribute_of
from gradaccum.lint.walk.branches import truth
from gradaccum.lint.walk.calls import call
from gradaccum.lint.walk.evaluate import assign, evaluate, text
from gradaccum.lint.walk.generators import yield_from, yielded
from gradaccum.lint.walk.loops import elements
from gradaccum.lint.walk.sizes import count_of
from gradaccum.lint.walk.trace import Frame
from gradaccum.lint.walk.values import Class, Env, Func, Num, Seq, Tensor, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["HANDLERS"]


def _comprehension(
    walker: Walker, env: Env, node: ast.ListComp | ast.SetComp | ast.GeneratorExp
) -> Value:
    inner = Env({}, env, env.module)
    made = Seq([], len(walker.loops), key=text(node))
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
            uses = {"filtered"} if filtered else set()
            if isinstance(node, ast.GeneratorExp):
                uses.add("iterator")
            return Thing("params", f"some of {first.key}" if filtered else first.key,
                         models=first.models, args=(first,),
                         uses=uses)  # fmt: skip
    if not all(isinstance(pool, Seq) for pool in pools):
        made.open = True
    if len(node.generators) == 1 and not node.generators[0].ifs:
        made.count = count_of(first)
        made.open = made.open and made.count != len(made.items)
    return made


def _if_exp(walker: Walker, env: Env, node: ast.IfExp) -> Value:
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
    left = evaluate(walker, env, node.left)
    return binary(walker, node.op, left, evaluate(walker, env, node.right), node)


def _unary(walker: Walker, env: Env, node: ast.UnaryOp) -> Value:
    if isinstance(node.op, ast.Not):
        return _truth(walker, env, node)
    value = evaluate(walker, env, node.operand)
    if isinstance(value, Num) and isinstance(node.op, ast.USub):
        return Num(-value.value, value.tags, value.varies)
    if isinstance(value, Num) and isinstance(node.op, ast.Invert):
        return Num(-value.value - 1, value.tags, value.varies)
    return value


HANDLERS: dict[type[ast.AST], Callable[..., Value]] = {
    ast.Attribute: attribute_of,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.IfExp: _if_exp,
    ast.Compare: _truth,
    ast.BoolOp: _bool_op,
    ast.BinOp: _bin_op,
    ast.UnaryOp: _unary,
    ast.Call: call,
    ast.Yield: yielded,
    ast.YieldFrom: yield_from,
}
