"""Statements: what each kind does to names, loops and contexts, and how it is left."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gradaccum.lint.files.rows import smooths
from gradaccum.lint.walk.arithmetic import augment, smooth
from gradaccum.lint.walk.branches import branch, match, truth
from gradaccum.lint.walk.by_hand import delete
from gradaccum.lint.walk.effects import enter
from gradaccum.lint.walk.evaluate import assign, evaluate, text
from gradaccum.lint.walk.generators import Turning, drive, generated
from gradaccum.lint.walk.loops import EXACT, elements, trips
from gradaccum.lint.walk.multiples import divides_evenly, rest
from gradaccum.lint.walk.trace import Event, Frame
from gradaccum.lint.walk.values import Class, Env, Func, Num, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["STATEMENTS"]

STEADY = 4
"""Iterations that are enough where all of them step alike."""
LONG = 3_000
"""Statements after which two iterations of a loop are enough."""


def _expr(walker: Walker, node: ast.Expr, env: Env) -> str:
    evaluate(walker, env, node.value)
    return ""


def _assign(walker: Walker, node: ast.Assign, env: Env) -> str:
    if isinstance(node.value, ast.BinOp) and len(node.targets) == 1:
        spelled = _augmented(node, node.value)
        if spelled is not None:
            augment(walker, spelled, env, node)
            return ""
    if walker.loops and isinstance(node.value, (ast.BinOp, ast.IfExp)) and smooths(node):
        before = evaluate(walker, env, _loaded(node.targets[0]))
        value = smooth(walker, node, before, evaluate(walker, env, node.value))
        assign(walker, env, node.targets[0], value)
        return ""
    value = evaluate(walker, env, node.value)
    for target in node.targets:
        assign(walker, env, target, value)
    return ""


def _augmented(node: ast.Assign, value: ast.BinOp) -> ast.AugAssign | None:
    """`x = x + y` as `x += y`, made once for all walks."""
    if "_augmented" not in node.__dict__:
        first = node.targets[0]
        made = None
        if isinstance(first, (ast.Name, ast.Attribute)) and _same(first, value):
            made = ast.copy_location(ast.AugAssign(first, value.op, value.right), node)
        node.__dict__["_augmented"] = made
    return node.__dict__["_augmented"]


def _loaded(target: ast.expr) -> ast.expr:
    """The name or attribute that is assigned to, read."""
    if isinstance(target, ast.Attribute):
        return ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
    return ast.copy_location(ast.Name(text(target), ast.Load()), target)


def _same(target: ast.expr, value: ast.BinOp) -> bool:
    """Whether `x = x + y` is written for `x += y`."""
    return isinstance(value.left, type(target)) and text(target) == text(value.left)


def _ann_assign(walker: Walker, node: ast.AnnAssign, env: Env) -> str:
    if node.value is not None:
        assign(walker, env, node.target, evaluate(walker, env, node.value))
    return ""


def _aug_assign(walker: Walker, node: ast.AugAssign, env: Env) -> str:
    augment(walker, node, env)
    return ""


def _assert(walker: Walker, node: ast.Assert, env: Env) -> str:
    test = node.test
    whole = rest(test, none=True)
    if whole is not None:
        length, number = evaluate(walker, env, whole.left), evaluate(walker, env, whole.right)
        divides_evenly(walker, length, number)
        return ""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        value, wanted = (evaluate(walker, env, part) for part in (test.left, *test.comparators))
        if isinstance(value, Thing) and value.kind == "unknown" and not value.varies:
            if isinstance(wanted, Num) and not wanted.tags:
                walker.asserted[value.key] = wanted.value
    return ""


def _return(walker: Walker, node: ast.Return, env: Env) -> str:
    value = evaluate(walker, env, node.value) if node.value is not None else None
    walker.result = value
    return "return"


def _define(walker: Walker, node: ast.FunctionDef, env: Env) -> str:
    env.set(node.name, Func(node, env, env.module))
    return ""


def _class(walker: Walker, node: ast.ClassDef, env: Env) -> str:
    env.set(node.name, Class(node, env, env.module))
    return ""


def _import(walker: Walker, node: ast.Import | ast.ImportFrom, env: Env) -> str:
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        env.names.pop(name, None)  # the file's table of imports answers from here on
    return ""


def _global(walker: Walker, node: ast.Global, env: Env) -> str:
    for name in node.names:
        env.outer[name] = walker.scope(env.module)
    return ""


def _nonlocal(walker: Walker, node: ast.Nonlocal, env: Env) -> str:
    for name in node.names:
        found = env.parent.find(name) if env.parent else None
        if found is not None:
            env.outer[name] = found
    return ""


def _delete(walker: Walker, node: ast.Delete, env: Env) -> str:
    for target in node.targets:
        if isinstance(target, ast.Attribute) and target.attr == "grad":
            delete(walker, node, evaluate(walker, env, target.value))
    return ""


def _for(walker: Walker, node: ast.For, env: Env) -> str:
    iterable = evaluate(walker, env, node.iter)
    made = generated(iterable)
    if made is not None:
        around = walker.stack[-1] if walker.stack else env.module.tree
        owner = walker.owners[-1] if walker.owners else (None, None)
        turning = Turning(node, env, around, owner, walker.paths[-1], len(walker.loops),
                          lambda item: assign(walker, env, node.target, item), made[1])  # fmt: skip
        signal = drive(walker, turning, made[0])
        if turning.count:
            return signal
        iterable = Thing("unknown", made[0].key)  # what it walks over is not known well enough
    items = elements(walker, node, iterable, env)
    return _loop(walker, node, env, items, lambda item: assign(walker, env, node.target, item),
                 iterable)  # fmt: skip


def _loop(
    walker: Walker,
    node: ast.For | ast.While,
    env: Env,
    items: Iterator[tuple[Value, bool]],
    bind: Callable[[Value], None],
    over: Value = None,
) -> str:
    frame = Frame(node, walker.tick())
    walker.trace.over[frame.entry] = over
    walker.loops.append(frame)
    shapes: list[tuple[tuple[str, int, str], ...]] = []
    budget, begun = walker.budget, len(walker.trace.events)
    try:
        for index, (item, last) in enumerate(items):
            frame.turn(index, last)
            bind(item)
            start = len(walker.trace.events)
            accumulations = walker.accumulations
            signal = walker.block(node.body, env)
            if signal == "break":
                return ""
            if signal == "return":
                return signal
            if index < STEADY:
                shapes.append(_shape(walker.trace.events[start:]))
                if index == STEADY - 1 and shapes[0] and len(set(shapes)) == 1:
                    break  # every iteration steps alike: more of them would say no more
            if index and _enough(walker, budget - walker.budget, begun):
                break  # a whole training, twice over
            if walker.accumulations > accumulations + 1:
                break  # an engine that keeps its own windows flushes at the end of each epoch
    finally:
        walker.loops.pop()
    return walker.block(node.orelse, env)


def _enough(walker: Walker, cost: int, begun: int) -> bool:
    """Whether a loop took long; one that has not stepped yet may take longer."""
    if cost <= LONG:
        return False
    steps = any(event.kind == "step" for event in walker.trace.events[begun:])
    return steps or cost > 2 * LONG


def _shape(events: list[Event]) -> tuple[tuple[str, int, str], ...]:
    """What an iteration did, if it stepped; else nothing."""
    if not any(event.kind == "step" for event in events):
        return ()
    return tuple(
        (event.kind, id(event.node), event.thing.key if event.thing else "")
        for event in events
        if event.kind not in ("escape", "store", "running")
    )


def _while(walker: Walker, node: ast.While, env: Env) -> str:
    def items() -> Iterator[tuple[Value, bool]]:
        limit = trips(walker, node, env.module)
        count = 0
        while count < 4 * EXACT:
            value = truth(walker, env, node.test, node)
            if value is False:
                return
            if (value is not True or _endless(node)) and count >= limit:
                return
            count += 1
            yield None, False

    return _loop(walker, node, env, items(), lambda _: None)


def _endless(node: ast.While) -> bool:
    return isinstance(node.test, ast.Constant)


def _with(walker: Walker, node: ast.With, env: Env) -> str:
    mark = len(walker.contexts)
    try:
        for item in node.items:
            value = evaluate(walker, env, item.context_expr)
            bound = enter(walker, value, item.context_expr)
            if item.optional_vars is not None:
                assign(walker, env, item.optional_vars, bound)
        return walker.block(node.body, env)
    finally:
        del walker.contexts[mark:]


def _try(walker: Walker, node: ast.Try, env: Env) -> str:
    signal = walker.block(node.body, env) or walker.block(node.orelse, env)
    return walker.block(node.finalbody, env) or signal


STATEMENTS: dict[type[ast.AST], Callable[..., str]] = {
    ast.Expr: _expr,
    ast.Assign: _assign,
    ast.AnnAssign: _ann_assign,
    ast.AugAssign: _aug_assign,
    ast.Assert: _assert,
    ast.Delete: _delete,
    ast.Return: _return,
    ast.Raise: lambda *_: "return",
    ast.Break: lambda *_: "break",
    ast.Continue: lambda *_: "continue",
    ast.FunctionDef: _define,
    ast.AsyncFunctionDef: _define,
    ast.ClassDef: _class,
    ast.Import: _import,
    ast.ImportFrom: _import,
    ast.Global: _global,
    ast.Nonlocal: _nonlocal,
    ast.If: branch,
    ast.For: _for,
    ast.AsyncFor: _for,
    ast.While: _while,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.Try: _try,
    ast.Match: match,
}
if hasattr(ast, "TryStar"):
    STATEMENTS[ast.TryStar] = _try
