"""Lines of the source that must have run, and raised: what a trace alone does not show."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.doctor.checks.source import above_of, function_of, parents, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = ["adds_to_gradient", "logged_by_updates", "reads_gradients", "repeats"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CONDITIONS = (ast.If, ast.Match, ast.IfExp, ast.ExceptHandler, *_FUNCTIONS)


def _sure(path: str, node: ast.AST, known: Place) -> bool:
    """Whether a node runs wherever a line does that is known to have run.

    Loops count as run; what stands under a condition that the line does not share may not be.
    """
    shared = set(map(id, above_of(known)))
    over = parents(path)
    above: ast.AST | None = over.get(node)
    inner: ast.AST = node
    while above is not None:
        if isinstance(above, _CONDITIONS) and id(above) not in shared:
            return False
        if isinstance(above, ast.Try) and inner in above.orelse:
            return False
        inner, above = above, over.get(above)
    return function_of(path, node) == known.function


def _gradient(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "grad"


def adds_to_gradient(known: Place) -> list[Place]:
    """Lines `x.grad += ...` that run where a line does, without a question for None around them."""
    tree = tree_of(known.path)
    return [
        Place(known.path, node.lineno, known.function)
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.AugAssign)
        and _gradient(node.target)
        and node.lineno > known.line
        and _sure(known.path, node, known)
    ]


def reads_gradients(known: Place) -> Iterator[tuple[Place, str]]:
    """Lines that use each `p.grad` of a module's parameters unasked, and the module's name."""
    tree = tree_of(known.path)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.For):
            parts: list[tuple[ast.expr, ast.expr, list[ast.AST]]] = [
                (node.target, node.iter, list(node.body))
            ]
        elif isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
            one = node.generators[0]
            parts = [] if one.ifs else [(one.target, one.iter, [node.elt])]
        else:
            continue
        for target, over, body in parts:
            name, module = getattr(target, "id", ""), _module(over)
            used = _unasked(body, name) if name and module else None
            if used is not None and _sure(known.path, node, known):
                yield Place(known.path, used, known.function), module


def _module(node: ast.AST) -> str:
    """`net` of `net.parameters()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "parameters" and isinstance(node.func.value, ast.Name):
            return node.func.value.id
    return ""


def _unasked(body: list[ast.AST], name: str) -> int | None:
    """The line that uses an attribute of `name.grad`, where nothing asks whether there is one."""
    nodes = [node for part in body for node in ast.walk(part)]
    if any(isinstance(node, ast.If | ast.IfExp | ast.BoolOp | ast.Try) for node in nodes):
        return None
    for node in nodes:
        if isinstance(node, ast.Attribute) and _gradient(node.value):
            inner = node.value.value if isinstance(node.value, ast.Attribute) else None
            if isinstance(inner, ast.Name) and inner.id == name:
                return node.lineno
    return None


def repeats(path: str, line: int) -> int | None:
    """The line of a forward, which begins at a line, that counts or collects on `self`."""
    tree = tree_of(path)
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.FunctionDef) or node.name != "forward" or not node.args.args:
            continue
        if not node.lineno - len(node.decorator_list) <= line <= node.lineno:
            continue
        own = node.args.args[0].arg
        for one in ast.walk(node):
            if isinstance(one, ast.AugAssign) and _of(one.target, own):
                return one.lineno
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
                collects = one.func.attr in ("append", "extend", "update", "appendleft")
                if collects and _of(one.func.value, own):
                    return one.lineno
    return None


def _of(node: ast.AST, own: str) -> bool:
    """Whether something is an attribute of `self`, or an element of one."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == own:
            return True
        node = node.value
    return False


def logged_by_updates(backward: Place, step: Place, losses: set[str]) -> Place | None:
    """A line that divides a total of all losses by the number of updates.

    Args:
        backward: of losses that are divided.
        step: of the updates, under a condition in the loop.
        losses: names that stand for the undivided loss.
    """
    tree = tree_of(backward.path)
    if tree is None or backward.path != step.path:
        return None
    micro, update = above_of(backward), above_of(step)
    gate = next((node for node in update if isinstance(node, ast.If) and node not in micro), None)
    loop = next((node for node in micro if isinstance(node, ast.For | ast.While)), None)
    if gate is None or loop is None:
        return None
    totals = {name for name in _added(loop, gate, losses) if name}
    counts = {
        node.target.id
        for node in ast.walk(gate)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
        and node.value.value == 1
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            left, right = getattr(node.left, "id", ""), getattr(node.right, "id", "")
            if left in totals and right in counts:
                place = Place(backward.path, node.lineno, function_of(backward.path, node))
                if place.function == backward.function:
                    return place
    return None


def _added(loop: ast.AST, gate: ast.AST, losses: set[str]) -> Iterator[str]:
    """Names that every micro-batch adds `loss.item()`, or a detached loss, to as it is."""
    inside = set(map(id, ast.walk(gate)))
    for node in ast.walk(loop):
        if id(node) in inside or not isinstance(node, ast.AugAssign):
            continue
        value = node.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            plain = isinstance(value.func.value, ast.Name) and value.func.value.id in losses
            if plain and value.func.attr in ("item", "detach") and isinstance(node.op, ast.Add):
                yield str(getattr(node.target, "id", ""))
