"""Loops over generators of the given files: the generator runs, and each yield is one turn.

A loop over a logger's `log_every(loader)` or over `batches(loader, epochs)` turns as often as the
loops around the `yield` do, and a counter that the generator yields is the number it counts to.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradaccum.lint.files.slicing import CORE
from gradaccum.lint.walk.evaluate import evaluate
from gradaccum.lint.walk.loops import elements
from gradaccum.lint.walk.trace import Frame, Loop
from gradaccum.lint.walk.values import Class, Env, Func, Num, Seq, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["Stopped", "Turning", "drive", "generated", "postponed", "yield_from", "yielded"]


class Stopped(Exception):
    """The body of a loop over a generator left it: nothing more is drawn."""


@dataclass(slots=True, eq=False)
class Turning:
    """A loop that is walked from inside the generator it draws from."""

    node: ast.For | ast.AsyncFor
    env: Env
    around: ast.AST
    owner: tuple[Value, Class | None]
    path: str
    depth: int
    """How many loops were open around it."""
    bind: Callable[[Value], None]
    shape: Callable[[Value, int], Value]
    count: int = 0
    signal: str = ""


def postponed(walker: Walker, func: Func, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """What a call of a generator returns; `None` if the function is none, or trains by itself."""
    node = func.node
    if isinstance(node, ast.Lambda) or not yields(node):
        return None
    words = walker.module_slice(func.module).functions.get(node.name, frozenset())
    if words & CORE or any("contextmanager" in ast.dump(item) for item in node.decorator_list):
        return None
    made = Thing("generator", f"{node.name}()", args=tuple(args), kwargs=kwargs)
    made.attrs["__func__"] = func
    return made


def yields(node: ast.AST) -> bool:
    """Whether a function is a generator."""
    known = node.__dict__.get("_yields")
    if known is None:
        known = node.__dict__["_yields"] = _yields(node)
    return bool(known)


def _yields(node: ast.AST) -> bool:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Yield, ast.YieldFrom)):
            return True
        nested = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if not nested and _yields(child):
            return True
    return False


def generated(value: Value) -> tuple[Thing, Callable[[Value, int], Value]] | None:
    """The generator that a loop draws from, and what becomes of its items on the way."""
    if not isinstance(value, Thing):
        return None
    if value.kind == "generator":
        return value, lambda item, _: item
    if value.kind not in ("enumerate", "wrapped") or not value.args:
        return None
    inner = generated(value.args[0])
    if inner is None or value.kind == "wrapped":
        return inner
    start = value.args[1] if len(value.args) > 1 else Num(0)
    if not isinstance(start, Num):
        return None
    first, shape = int(start.value), inner[1]
    return inner[0], lambda item, at: Seq([Num(first + at, frozenset(), True), shape(item, at)])


def drive(walker: Walker, turning: Turning, source: Thing) -> str:
    """Walk a loop over a generator."""
    func = source.attrs["__func__"]
    assert isinstance(func, Func)
    walker.turnings.append(turning)
    try:
        walker.function(func, list(source.args), source.kwargs, now=True)
    except Stopped:
        if not turning.signal:
            raise  # of another loop, around this one
    finally:
        walker.turnings.remove(turning)
    if turning.signal == "return":
        return "return"
    if turning.signal or not turning.count:
        return ""
    return walker.block(turning.node.orelse, turning.env)


def yielded(walker: Walker, env: Env, node: ast.Yield) -> Value:
    """An `ast.Yield`: one turn of the loop that draws."""
    value = evaluate(walker, env, node.value) if node.value is not None else None
    if walker.turnings:
        _turn(walker, walker.turnings[-1], value)
    return Thing("unknown", "yield", True)


def yield_from(walker: Walker, env: Env, node: ast.YieldFrom) -> Value:
    """An `ast.YieldFrom`."""
    value = evaluate(walker, env, node.value)
    made = generated(value)
    if made is not None and walker.turnings and value is made[0]:
        func = made[0].attrs["__func__"]
        assert isinstance(func, Func)
        walker.function(func, list(made[0].args), made[0].kwargs, now=True)
    elif walker.turnings:
        turning = walker.turnings[-1]
        frame = Frame(turning.node, walker.tick())
        walker.loops.append(frame)
        try:
            for index, (item, last) in enumerate(
                elements(walker, turning.node, value, turning.env)
            ):
                frame.turn(index, last)
                _turn(walker, turning, item)
        finally:
            walker.loops.pop()
    return Thing("unknown", "yield", True)


def _turn(walker: Walker, turning: Turning, value: Value) -> None:
    frame: Frame | None = walker.loops[-1] if len(walker.loops) > turning.depth else None
    kept = walker.turnings
    walker.turnings = kept[: kept.index(turning)]
    walker.paths.append(turning.path)
    walker.stack.append(turning.around)
    walker.owners.append(turning.owner)
    before = (frame.now, frame.node) if frame is not None else None
    if frame is not None:
        # for what lies in its body, the loop is the one that is written around it
        frame.now, frame.node = Loop(turning.node, frame.entry, frame.index), turning.node
    try:
        turning.bind(turning.shape(value, turning.count))
        turning.count += 1
        signal = walker.block(turning.node.body, turning.env)
    finally:
        if frame is not None and before is not None:
            frame.now, frame.node = before
        walker.owners.pop()
        walker.stack.pop()
        walker.paths.pop()
        walker.turnings = kept
    if signal in ("break", "return"):
        turning.signal = signal
        raise Stopped
