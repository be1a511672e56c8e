"""Means that are shown, told by their source: what is summed, divided and begun anew."""

from __future__ import annotations

import ast
from collections.abc import Callable

from gradaccum.doctor.checks.named import batches_of_several
from gradaccum.doctor.checks.patterns import receiver
from gradaccum.doctor.checks.source import above_of, function_of, parents, statement, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = ["divides_what_is_left", "means_by_samples", "never_begun_anew", "samples_by_batches"]


def _sums(loop: ast.AST) -> dict[str, ast.AugAssign]:
    return {
        node.target.id: node
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and isinstance(node.target, ast.Name)
    }


def _item(node: ast.AST, name: str) -> bool:
    return ast.unparse(node) in (f"{name}.item()", f"{name}.detach().item()", f"float({name})")


def _size(node: ast.AST) -> bool:
    """Whether an expression is the number of a batch's samples: `len(x)`, `x.size(0)`."""
    written = ast.unparse(node)
    return (
        (written.startswith("len(") and "loader" not in written)
        or written.endswith((".size(0)", ".shape[0]", ".numel()"))
        or written in ("batch_size", "bs")
    )


def means_by_samples(backward: Place | None) -> tuple[Place, Place] | None:
    """Where a sum of batches' means is divided by `len(loader.dataset)`, and where it is added to.

    Only where the file says that batches hold more than one sample.
    """
    return _divided(backward, _item, ".dataset")


def samples_by_batches(backward: Place | None) -> tuple[Place, Place] | None:
    """Where a sum over samples is divided by the number of batches, and where it is added to."""
    return _divided(backward, _of_samples, "")


def _of_samples(node: ast.AST, name: str) -> bool:
    """Whether a loss is multiplied by the number of its samples."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return (_item(node.left, name) and _size(node.right)) or (
        _item(node.right, name) and _size(node.left)
    )


def _divided(
    backward: Place | None, adds: Callable[[ast.AST, str], bool], of: str
) -> tuple[Place, Place] | None:
    """Where what `adds` to a sum in a loop is divided by the length of its loader, or `of` it."""
    loop = next((n for n in above_of(backward) if isinstance(n, ast.For)), None)
    name = receiver(statement(backward), plain=True)
    tree = tree_of(backward.path) if backward is not None else None
    if loop is None or not name or tree is None or backward is None:
        return None
    if not batches_of_several(backward.path):
        return None
    added = {total: node.lineno for total, node in _sums(loop).items() if adds(node.value, name)}
    counts = {
        f"len({ast.unparse(one)}{of})" for one in ast.walk(loop.iter) if isinstance(one, ast.expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        total = getattr(node.left, "id", "")
        function = function_of(backward.path, node)
        if total in added and ast.unparse(node.right) in counts and function == backward.function:
            at = Place(backward.path, added[total], function)
            return Place(backward.path, node.lineno, function), at
    return None


def divides_what_is_left(backward: Place | None) -> tuple[Place, Place] | None:
    """Where a sum that the loop sets back to zero now and then is divided by all of its passes.

    And where it is set back.
    """
    loop = next((n for n in above_of(backward) if isinstance(n, ast.For)), None)
    name = receiver(statement(backward), plain=True)
    tree = tree_of(backward.path) if backward is not None else None
    if loop is None or not name or backward is None or tree is None:
        return None
    sums = {n for n, a in _sums(loop).items() if _item(a.value, name)}
    zeros = {
        target.id: node.lineno
        for over in ast.walk(loop)
        if isinstance(over, ast.If)
        for node in ast.walk(over)
        if isinstance(node, ast.Assign) and getattr(node.value, "value", None) == 0
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    iterated = {ast.unparse(one) for one in ast.walk(loop.iter) if isinstance(one, ast.expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        by = node.right
        counted = isinstance(by, ast.Call) and getattr(by.func, "id", "") == "len" and by.args
        total = getattr(node.left, "id", "")
        after = node.lineno > (loop.end_lineno or 0)
        if total in sums & zeros.keys() and counted and after and isinstance(by, ast.Call):
            if ast.unparse(by.args[0]) in iterated:
                at = Place(backward.path, zeros[total], backward.function)
                if function_of(backward.path, node) == backward.function:
                    return Place(backward.path, node.lineno, backward.function), at
    return None


def never_begun_anew(backward: Place | None) -> tuple[Place, int] | None:
    """Where a running sum is divided by the passes since the last time, and never set to zero.

    Also the number that it is divided by, where it is written as one.
    """
    loop = next((n for n in above_of(backward) if isinstance(n, ast.For)), None)
    name = receiver(statement(backward), plain=True)
    if loop is None or not name or backward is None:
        return None
    sums = {n: a for n, a in _sums(loop).items() if _item(a.value, name)}
    renewed = {
        target.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign)
        for t in node.targets
        for target in ast.walk(t)
        if isinstance(target, ast.Name)
    }
    over = parents(backward.path)
    for node in ast.walk(loop):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        total = getattr(node.left, "id", "")
        if total not in sums or total in renewed:
            continue
        above: ast.AST | None = node
        while above is not None and above is not loop:
            if isinstance(above, ast.If):
                mods = [
                    one.right
                    for one in ast.walk(above.test)
                    if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)
                ]
                if len(mods) == 1 and ast.unparse(mods[0]) == ast.unparse(node.right):
                    number = getattr(node.right, "value", 0)
                    place = Place(backward.path, node.lineno, backward.function)
                    return place, number if isinstance(number, int) else 0
            above = over.get(above)
    return None
