"""What the source says around a line that the trace names; for questions that a run leaves open."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from gradaccum.doctor.trace.model import Place

__all__ = [
    "gate_counts",
    "gated",
    "lines_that",
    "microbatches",
    "overwrites",
    "same_loop",
    "statement",
]

_MOST = 2_000_000


@lru_cache(maxsize=64)
def _tree(path: str) -> ast.Module | None:
    try:
        file = Path(path)
        if file.stat().st_size > _MOST:
            return None
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=64)
def _parents(path: str) -> dict[ast.AST, ast.AST]:
    tree = _tree(path)
    if tree is None:
        return {}
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def statement(place: Place | None) -> ast.stmt | None:
    """The innermost statement at a line."""
    tree = None if place is None else _tree(place.path)
    if tree is None or place is None:
        return None
    best: ast.stmt | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= place.line <= (node.end_lineno or 0):
            if best is None or node.lineno >= best.lineno:
                best = node
    return best


def _above(place: Place | None) -> list[ast.AST]:
    """A line's enclosing statements up to its function, innermost first."""
    node: ast.AST | None = statement(place)
    if node is None or place is None:
        return []
    parents, found = _parents(place.path), []
    while node is not None:
        found.append(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            break
        node = parents.get(node)
    return found


def _loop(place: Place | None) -> ast.AST | None:
    loops = (ast.For, ast.While, ast.AsyncFor)
    return next((node for node in _above(place) if isinstance(node, loops)), None)


def same_loop(first: Place | None, second: Place | None) -> bool | None:
    """Whether two lines are in one innermost loop; `None` where the source does not tell."""
    if first is None or second is None or first.path != second.path:
        return None
    one, other = _loop(first), _loop(second)
    if one is None or other is None:
        return None
    return one is other


def gated(step: Place | None, backward: Place | None) -> bool | None:
    """Whether the step stands under a condition in the loop that each backward is in.

    That is how micro-batches are told from the several passes of one objective: a loop that always
    steps once per pass has no condition. A step or backward in a helper counts as its calls.
    `None` where the source does not tell.
    """
    if step is None or backward is None or step.path != backward.path:
        return None
    told = None
    for first in _reached(step):
        for second in _reached(backward):
            if first.function == second.function or step == first:
                answer = _gated(first, second)
                if answer:
                    return True
                told = answer if told is None else told
    return told


def _reached(place: Place, depth: int = 2) -> list[Place]:
    """A line, and the lines that call its function."""
    found = [place]
    if depth and place.function not in ("<module>", "<lambda>"):
        for call in calls(place.path, place.function):
            if call.line != place.line:
                found += _reached(call, depth - 1)
    return found[:12]


@lru_cache(maxsize=256)
def calls(path: str, name: str) -> tuple[Place, ...]:
    """Lines of a file that call something of a name."""
    tree = _tree(path)
    if tree is None:
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called == name:
                found.append(Place(path, node.lineno, _function(path, node)))
    return tuple(found)


def _function(path: str, node: ast.AST) -> str:
    parents = _parents(path)
    above: ast.AST | None = node
    while above is not None:
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return above.name
        above = parents.get(above)
    return "<module>"


def _gated(step: Place, backward: Place) -> bool | None:
    loop = _loop(backward)
    if loop is None:
        # A method that is called for each micro-batch: the loop is its caller's.
        if step.function == backward.function:
            return any(isinstance(node, (ast.If, ast.Match)) for node in _above(step)) and not any(
                isinstance(node, (ast.If, ast.Match)) for node in _above(backward)
            )
        return None
    above = _above(step)
    if loop not in above:
        return False
    for node in above:
        if node is loop:
            return False
        if isinstance(node, (ast.If, ast.Match)) and node not in _above(backward):
            return True
    return None


def gate_counts(step: Place | None) -> bool:
    """Whether the condition that a step stands under is a remainder."""
    if step is None:
        return False
    for place in _reached(step):
        for node in _above(place):
            if isinstance(node, ast.If):
                return any(
                    isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)
                    for one in ast.walk(node.test)
                )
    return False


def microbatches(backward: Place | None) -> bool:
    """Whether the loop around a backward takes its data with `next`."""
    loop = _loop(backward)
    return loop is not None and any(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") == "next"
        for node in ast.walk(loop)
    )


def overwrites(place: Place | None) -> bool:
    """Whether a line sets `.grad` to something in which no `.grad` occurs, unconditionally."""
    node = statement(place)
    if not isinstance(node, ast.Assign) or not any(
        isinstance(target, ast.Attribute) and target.attr == "grad" for target in node.targets
    ):
        return False
    if any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node.value)):
        return False
    loop = _loop(place)
    return not any(
        isinstance(above, ast.If)
        and any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(above.test))
        for above in (_above(place) if loop is not None else [])
    )


def lines_that(place: Place | None, wanted: str) -> list[Place]:
    """Lines of a file on which an attribute of a name is used."""
    tree = None if place is None else _tree(place.path)
    if tree is None or place is None:
        return []
    found = {
        node.lineno: _function(place.path, node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == wanted
    }
    return [Place(place.path, line, found[line]) for line in sorted(found)]
