"""`step % N == 0 or step == total`: a counter held against its own end, of which nobody knows."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.walk.evaluate import evaluate
from gradaccum.lint.walk.values import Env, varies

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["at_end"]


def at_end(walker: Walker, env: Env, test: ast.expr) -> bool | None:
    """Whether a counter has come to its end: in the last iteration of the loops it counts through.

    `None` if that is not what is asked, or where the counter starts anew is not plain.
    """
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    sides = test.left, test.comparators[0]
    if isinstance(test.ops[0], ast.Eq):
        pairs = [sides, sides[::-1]]
    elif isinstance(test.ops[0], ast.GtE):
        pairs = [sides]
    else:
        return None
    for side, total in pairs:
        counter = side.left if isinstance(side, ast.BinOp) else side
        if isinstance(counter, ast.Name):
            level = _level(walker, counter.id)
            if level is not None and not _moves(walker, env, total):
                frames = walker.loops[level:]
                return all(frame.last for frame in frames)
    return None


def _moves(walker: Walker, env: Env, total: ast.expr) -> bool:
    """Whether what a counter is held against may differ from one iteration to the next."""
    if any(isinstance(node, ast.Call) for node in ast.walk(total)):
        return True  # to evaluate it once more might do something
    return varies(evaluate(walker, env, total))


def _level(walker: Walker, name: str) -> int | None:
    """The outermost loop that a name counts through; every one of them is a `for`."""
    frames = walker.loops
    if not frames or not any(_adds(frame.node, name) for frame in frames):
        return None
    for level in range(len(frames), 0, -1):
        node = frames[level - 1].node
        if not isinstance(node, ast.For):
            return None
        if _names(node.target, name):
            return level - 1 if level == len(frames) else None
        if any(_starts(child, name) for child in node.body):
            return level if level < len(frames) else None
    return 0


def _adds(node: ast.AST, name: str) -> bool:
    """Whether a loop goes on with a counter: counts it up, or binds it."""
    if isinstance(node, ast.For) and _names(node.target, name):
        return True
    return any(
        isinstance(child, ast.AugAssign) and _names(child.target, name) for child in ast.walk(node)
    )


def _starts(child: ast.stmt, name: str) -> bool:
    return isinstance(child, ast.Assign) and any(_names(one, name) for one in child.targets)


def _names(target: ast.expr, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(target))
