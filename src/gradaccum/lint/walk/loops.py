"""How often a loop is walked, and over what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from gradaccum.lint.files.program import Module
from gradaccum.lint.files.slicing import Slice
from gradaccum.lint.walk.evaluate import key_of, part_of
from gradaccum.lint.walk.sizes import SURE, count_of
from gradaccum.lint.walk.values import Env, Num, Seq, Tensor, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["EXACT", "LENGTH", "OUTER", "UNEVEN", "WINDOW", "elements", "trips"]

LENGTH = 8
"""Batches that an unknown loader stands for: no multiple of the window, so a tail shows."""
UNEVEN = 11
"""The same where windows of other lengths than the usual one are in play."""
OUTER = 2
EXACT = 16
"""Literal lengths up to this one are walked as they are."""
MANY = 64
"""Micro-batches from which on a 16-bit sum is worth a note."""
WINDOW = 3
"""Micro-batches that an unknown window length stands for."""


def trips(walker: Walker, node: ast.AST, module: Module) -> int:
    """How often a loop of unknown length is walked."""
    found = walker.module_slice(module)
    if walker.turnings and id(node) in found.yielding:
        if any(id(child) in found.yielding for child in _loops_below(getattr(node, "body", []))):
            return OUTER
        turning = walker.turnings[-1]
        walker.turnings.pop()
        try:
            return trips(walker, turning.node, turning.env.module)
        finally:
            walker.turnings.append(turning)
    if id(node) not in found.turns:
        found.turns[id(node)] = _turns(node, found)
    count = found.turns[id(node)]
    return int(walker.known.get("length", LENGTH)) if count is None else count


def _turns(node: ast.AST, found: Slice) -> int | None:
    body: list[ast.stmt] = getattr(node, "body", [])
    direct: set[str] = set()
    for child in body:
        direct |= found.mentions.get(id(child), frozenset())
    if not direct & {"backward", "manual_backward", "step"}:
        return 1
    for child in _loops_below(body):
        below = found.mentions.get(id(child), frozenset())
        if below & {"backward", "manual_backward"}:
            return None if _steps_sometimes(body, found) else OUTER
    if found.looped and _calls_looped(body, found):
        return OUTER
    if direct & {"backward", "manual_backward"} and "step" not in direct:
        return WINDOW
    return None


def _steps_sometimes(body: list[ast.stmt], found: Slice) -> bool:
    """Whether a loop counts its own windows: it steps where a remainder says so."""
    return any(
        isinstance(node, ast.If)
        and "step" in found.mentions.get(id(node), frozenset())
        and any(isinstance(part, ast.Mod) for part in ast.walk(node.test))
        and not any(
            found.mentions.get(id(loop), frozenset()) & {"backward", "manual_backward"}
            for loop in _loops_below(node.body)
        )
        for node in body
    )


def _calls_looped(body: list[ast.stmt], found: Slice) -> bool:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            continue
        if found.called.get(id(node), frozenset()) & found.looped:
            return True
        for name in ("body", "orelse", "finalbody"):
            if _calls_looped(getattr(node, name, None) or [], found):
                return True
    return False


def _loops_below(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for child in body:
        if isinstance(child, (ast.For, ast.While, ast.AsyncFor)):
            yield child
        elif not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            for name in ("body", "orelse", "finalbody"):
                yield from _loops_below(getattr(child, name, None) or [])
            for case in getattr(child, "cases", ()):
                yield from _loops_below(case.body)


def elements(walker: Walker, node: ast.AST, value: Value, env: Env) -> Iterator[tuple[Value, bool]]:
    """The items that a loop walks over, each with whether it is the last."""
    if isinstance(value, Thing) and value.kind == "enumerate":
        start = value.args[1] if len(value.args) > 1 else Num(0)
        first = int(start.value) if isinstance(start, Num) else 0
        if not isinstance(start, Num):
            walker.trace.shifted = True
        for index, (item, last) in enumerate(elements(walker, node, value.args[0], env)):
            yield Seq([Num(first + index, frozenset(), True), item]), last
        return
    if isinstance(value, Thing) and value.kind == "zip":
        columns = [list(elements(walker, node, part, env)) for part in value.args]
        longest = max((len(column) for part, column in zip(value.args, columns, strict=True)
                       if not _endless(part)), default=LENGTH)  # fmt: skip
        for index, part in enumerate(value.args):
            if _endless(part) and columns[index]:
                columns[index] = [columns[index][at % len(columns[index])] for at in range(longest)]
        shortest = count_of(value)
        sure = shortest is not None and (
            shortest <= EXACT or (shortest <= SURE and _batches(walker, node, env))
        )
        if sure and shortest is not None:
            for index, column in enumerate(columns):  # what is longer may have been cut short
                if column and len(column) < shortest:
                    columns[index] = [column[at % len(column)] for at in range(shortest)]
        if walker.loops:
            walker.loops[-1].exact = sure
        rows = list(zip(*columns, strict=False))
        for row in rows:
            yield Seq([item for item, _ in row]), row is rows[-1]
        return
    if isinstance(value, Thing) and value.kind in ("cycle", "wrapped"):
        yield from elements(walker, node, value.args[0], env)
        return
    if isinstance(value, Thing) and value.kind == "range":
        yield from _range(walker, node, value, env)
        return
    drawn = walker.turnings and id(node) in walker.module_slice(env.module).yielding
    known = None if drawn else count_of(value)
    if isinstance(value, Seq) and not value.open and known is not None:
        if known <= EXACT or (known <= SURE and _batches(walker, node, env)):
            yield from _all(walker, value.items)
            return
    if (
        isinstance(value, Seq)
        and value.items
        and all(isinstance(item, Thing) and item.kind in ("grad", "param") for item in value.items)
    ):
        for index, item in enumerate(value.items[:EXACT]):  # a list over all parameters
            yield item, index == len(value.items) - 1
        return
    if isinstance(value, Thing) and value.kind in ("params", "param_groups"):
        yield Thing("param", f"{value.key}[i]", True, models=value.models, args=(value,)), True
        return
    if isinstance(value, Thing) and value.kind == "parts":
        yield Thing("unknown", f"{value.key}[i]", True, models=value.models, args=(value,)), True
        return
    if known is not None and (known <= EXACT or (known <= SURE and _batches(walker, node, env))):
        key = value.key if isinstance(value, Thing) else "item"
        yield from _all(walker, [Thing("unknown", f"{key}[i]", True, depth=len(walker.loops))
                                 for _ in range(known)])  # fmt: skip
        return
    if known is not None:
        walker.trace.multiples.add(known)
    count = trips(walker, node, env.module)
    if isinstance(value, Tensor):
        for index in range(count):
            yield part_of(walker, value, "[i]"), index == count - 1
        return
    if count not in (1, WINDOW):
        walker.trace.exact = False
    key = value.key if isinstance(value, Thing) else "item"
    for index in range(count):
        # one key for all items: what is asked of one is decided alike for the others
        yield Thing("unknown", f"{key}[i]", True, depth=len(walker.loops)), index == count - 1


def _all(walker: Walker, items: list[Value]) -> Iterator[tuple[Value, bool]]:
    """Every item, in a loop that turns as often as the script says."""
    if walker.loops:
        walker.loops[-1].exact = True
    for index, item in enumerate(items):
        yield item, index == len(items) - 1


def _batches(walker: Walker, node: ast.AST, env: Env) -> bool:
    """Whether a loop is the one over micro-batches, and not over epochs of them."""
    trips(walker, node, env.module)
    return walker.module_slice(env.module).turns.get(id(node), 0) is None


def _endless(value: Value) -> bool:
    return isinstance(value, Thing) and value.kind == "cycle"


def _range(walker: Walker, node: ast.AST, value: Thing, env: Env) -> Iterator[tuple[Value, bool]]:
    bounds = list(value.args)
    numbers = [int(bound.value) for bound in bounds if isinstance(bound, Num)]
    literal = bool(bounds) and len(numbers) == len(bounds)
    exact = range(0)
    if literal:
        with suppress(TypeError, ValueError):  # `range(0, 9, 0)`
            exact = range(*numbers)
        if len(exact) <= EXACT or (len(exact) <= SURE and _batches(walker, node, env)):
            yield from _all(walker, [Num(index, frozenset(), True) for index in exact])
            return
    count = trips(walker, node, env.module)
    if literal and count == WINDOW and len(exact) >= MANY:
        walker.windows.add("many")
    if literal and count not in (1, OUTER, WINDOW):
        walker.trace.exact = False
        if any(len(exact) % modulus == 0 for modulus in walker.module_slice(env.module).moduli):
            count = 24
    stop = bounds[min(1, len(bounds) - 1)] if bounds else None
    start = numbers[0] if len(bounds) > 1 and isinstance(bounds[0], Num) else 0
    if count == WINDOW and isinstance(stop, Thing):
        if start and stop.args and stop.key == f"({key_of(stop.args[0])} Add {start})":
            stop = stop.args[0]  # `range(1, n + 1)` counts n
        if isinstance(stop, Thing):
            chosen = walker.symbol(stop.key)
            walker.trace.window_keys.add(stop.key)
            count = int(chosen.value)
    for index in range(count):
        yield Num(start + index, frozenset(), True), index == count - 1
