"""Averages of the weights, told by their source: `decay * shadow + (1 - decay) * weight`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.doctor.checks.source import above_of, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = ["averaged_in_loop"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_PARAMETERS = ("parameters", "named_parameters", "state_dict")


def averaged_in_loop(backward: Place | None, step: Place) -> Place | None:
    """The line of a backward's loop that moves an average of the weights, under no condition.

    Either a call of a function of the file that does so, or a loop over parameters that does.

    Args:
        backward: of the micro-batches.
        step: of the updates, under a condition in the same loop.
    """
    if backward is None or backward.path != step.path:
        return None
    micro = above_of(backward)
    loop = next((node for node in micro if isinstance(node, ast.For | ast.While)), None)
    tree = tree_of(backward.path)
    if loop is None or tree is None or loop not in above_of(step):
        return None
    for node in _unconditional(loop.body):
        if isinstance(node, ast.For | ast.With) and _reads(node) and _averages(node):
            line = next(_averaging(node)).lineno
            return Place(backward.path, line, backward.function)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
            made = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == name]
            if len(made) == 1 and _reads(made[0]) and _averages(made[0]) and not _asks(made[0]):
                return Place(backward.path, node.lineno, backward.function)
    return None


def _unconditional(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that each pass of a loop runs; none after one that may end the pass."""
    for node in body:
        if isinstance(node, ast.If) and any(
            isinstance(one, ast.Continue | ast.Break | ast.Return) for one in ast.walk(node)
        ):
            return
        if not isinstance(node, (ast.If, ast.While, ast.Try, *_FUNCTIONS)):
            yield node


def _reads(node: ast.AST) -> bool:
    """Whether it walks over parameters."""
    return any(isinstance(one, ast.Attribute) and one.attr in _PARAMETERS for one in ast.walk(node))


def _asks(function: ast.FunctionDef) -> bool:
    """Whether it counts its calls itself, to move only at some of them."""
    return any(
        isinstance(one, ast.Mod)
        or (isinstance(one, ast.If) and any(isinstance(r, ast.Return) for r in one.body))
        for one in ast.walk(function)
    )


def _averages(node: ast.AST) -> bool:
    return next(_averaging(node), None) is not None


def _averaging(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions `d * a + (1 - d) * b`, `a.lerp_(b, 1 - d)`, `a.mul_(d).add_(b, alpha=...)`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
            inner = one.func.value
            scaled = isinstance(inner, ast.Call) and getattr(inner.func, "attr", "") == "mul_"
            moved = one.func.attr == "add_" and any(k.arg == "alpha" for k in one.keywords)
            if one.func.attr == "lerp_" or (scaled and moved):
                yield one
        if not isinstance(one, ast.BinOp) or not isinstance(one.op, ast.Add):
            continue
        left, right = _factors(one.left), _factors(one.right)
        if any(_rest(a, b) or _rest(b, a) for a in left for b in right):
            yield one


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [node.left, node.right]
    return []


def _rest(node: ast.expr, of: ast.expr) -> bool:
    """Whether it is 1 less another."""
    if isinstance(node, ast.Constant) and isinstance(of, ast.Constant):
        pair = node.value, of.value
        if all(isinstance(one, float) for one in pair):
            return abs(sum(one for one in pair if isinstance(one, float)) - 1.0) < 1e-9
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and getattr(node.left, "value", None) == 1
        and ast.dump(node.right) == ast.dump(of)
    )
