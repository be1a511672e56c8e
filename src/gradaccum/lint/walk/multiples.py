"""Lengths that hold whole windows only, because the script says so."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.walk.values import Num, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["divides_evenly", "is_whole", "leaves_whole", "rest", "symbols"]


def symbols(value: Value, depth: int = 0) -> set[str]:
    """The names of what a number was made of."""
    if isinstance(value, Num):
        return set(value.tags)
    if isinstance(value, Thing):
        parts = value.args if depth < 8 else ()
        return {value.key}.union(*(symbols(part, depth + 1) for part in parts))
    return set()


def divides_evenly(walker: Walker, length: Value, value: Value) -> None:
    """Note that a length was made, or is asserted to be, a multiple of `value`.

    What is no length, such as how often is logged, says nothing about windows.
    """
    if not any("len(" in name for name in symbols(length)):
        return
    if isinstance(value, Num) and not value.tags:
        walker.trace.multiples.add(value.value)
    walker.trace.measured |= symbols(value)


def is_whole(node: ast.BinOp) -> bool:
    """Whether it spells out the largest multiple: `a // b * b`."""
    known = node.__dict__.get("_whole")
    if known is None:
        left = node.left
        known = node.__dict__["_whole"] = (
            isinstance(node.op, ast.Mult)
            and isinstance(left, ast.BinOp)
            and isinstance(left.op, ast.FloorDiv)
            and ast.dump(left.right) == ast.dump(node.right)
        )
    return bool(known)


def leaves_whole(loop: ast.AST) -> bool:
    """Whether a loop is left where its counter of windows, `n % a`, has reached `a * b`.

    However many batches there are, the last window is then as long as all others.
    """
    known = loop.__dict__.get("_leaves_whole")
    if known is None:
        parts = list(ast.walk(loop))
        counted = {
            (ast.dump(part.left), ast.dump(part.right))
            for part in parts
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)
        }
        known = loop.__dict__["_leaves_whole"] = any(
            pair in counted
            for part in parts
            if isinstance(part, ast.If) and isinstance(part.body[-1], (ast.Break, ast.Return))
            for pair in _reached(part.test)
        )
    return bool(known)


def _reached(test: ast.expr) -> list[tuple[str, str]]:
    """Of `n >= a * b`: that `n` has come to a multiple of `a`, and of `b`."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.GtE, ast.Eq)):
        return []
    limit = test.comparators[0]
    if not isinstance(limit, ast.BinOp) or not isinstance(limit.op, ast.Mult):
        return []
    return [(ast.dump(test.left), ast.dump(side)) for side in (limit.left, limit.right)]


def rest(test: ast.expr, none: bool) -> ast.BinOp | None:
    """The `a % b` that a condition says is nothing (`none`), or is something."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return rest(test.operand, not none)
    part: ast.expr | None = None if none else test
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        sides = (test.left, test.comparators[0])
        kinds = (ast.Eq,) if none else (ast.NotEq, ast.Gt)
        if isinstance(test.ops[0], kinds) and any(
            isinstance(side, ast.Constant) and side.value == 0 for side in sides
        ):
            part = next((side for side in sides if not isinstance(side, ast.Constant)), None)
    return part if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) else None
