"""Sums of gradients that a script keeps in tensors of its own, told by their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradaccum.doctor.checks.named import values_of
from gradaccum.doctor.checks.patterns import receiver
from gradaccum.doctor.checks.source import above_of, function_of, parents, statement, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = ["OwnSum", "own_sum", "plain_mean", "window_in_one"]

_SAME = {
    "clone",
    "detach",
    "view_as",
    "reshape",
    "view",
    "to",
    "float",
    "contiguous",
    "get",
    "data",
}
_CLEARS = {
    "zero_", "fill_", "clear", "copy_", "mul_", "sub_", "div_", "set_", "_foreach_zero_", "pop",
    "_foreach_mul_", "_foreach_div_", "_foreach_sub_", "zeros_like", "new_zeros",
}  # fmt: skip
_LOOPS = (ast.For, ast.While)


@dataclass(frozen=True)
class OwnSum:
    """A sum that gradients are put into, and from which `.grad` is set."""

    added: Place
    """Where a gradient is added."""
    cleared: bool
    """Whether anything clears, renews or else changes it."""
    divided: bool
    """Whether something divides or multiplies what is added, or what is read."""


def _name(node: ast.AST | None) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _base(node: ast.AST) -> tuple[str, bool]:
    """What an expression is an element, a part or a copy of, and whether it is scaled."""
    scaled = False
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in _SAME:
                return "", scaled
            node = node.func.value
        elif isinstance(node, ast.Attribute) and node.attr == "data":
            node = node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
            scaled, node = True, node.left
        elif isinstance(node, ast.Name | ast.Attribute):
            return ast.unparse(node), scaled
        else:
            return "", scaled


def _iterated(path: str, node: ast.AST, name: str) -> str:
    """What a loop around a node takes a name from: `total` of `for p, t in zip(params, total)`."""
    over, above = parents(path), node
    while above in over:
        above = over[above]
        if not isinstance(above, ast.For):
            continue
        call = above.iter
        names = [_name(one) for one in ast.walk(above.target) if isinstance(one, ast.Name)]
        if name not in names:
            continue
        if not isinstance(call, ast.Call):
            return ast.unparse(call)
        given = call.args
        if _name(call.func) == "zip" and isinstance(above.target, ast.Tuple):
            at = [_name(one) for one in above.target.elts]
            if name in at and at.index(name) < len(given):
                return ast.unparse(given[at.index(name)])
        if _name(call.func) in ("values", "items") and isinstance(call.func, ast.Attribute):
            return ast.unparse(call.func.value)
        return ""
    return ""


def _stores(path: str, node: ast.AST, what: ast.AST) -> str:
    """The container that something written at a node belongs to."""
    base, _ = _base(what)
    return _iterated(path, node, base) or base


def _plain_gradient(node: ast.AST) -> tuple[bool, bool]:
    """Whether a value is a gradient as it is, and whether it is scaled."""
    scaled = any(
        isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div | ast.Mult)
        for one in ast.walk(node)
    )
    odd = any(
        (isinstance(one, ast.BinOp) and not isinstance(one.op, ast.Div | ast.Mult | ast.Add))
        or (
            isinstance(one, ast.Call)
            and _name(one.func) in ("pow", "square", "abs", "sqrt", "norm")
        )
        for one in ast.walk(node)
    )
    two = sum(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node)) > 1
    return not odd and not two, scaled


def _additions(path: str, wanted: str) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Statements that add to a container, or to an element of it, and what they add."""
    tree = tree_of(path)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            if _stores(path, node, node.target) == wanted:
                yield node, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "add_" and node.args:
                if _stores(path, node, node.func.value) == wanted:
                    yield node, node.args[0]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            value = node.value
            if isinstance(value.op, ast.Add) and _stores(path, node, node.targets[0]) == wanted:
                if _stores(path, node, value.left) == wanted:
                    yield node, value.right


def _changed(path: str, wanted: str, inside: Sequence[ast.AST]) -> bool:
    """Whether a container is renewed in a loop, cleared, or changed by anything but additions."""
    tree = tree_of(path)
    added = {id(node) for node, _ in _additions(path, wanted)}
    for node in ast.walk(tree) if tree is not None else ():
        if id(node) in added:
            continue
        if isinstance(node, ast.AugAssign) and _stores(path, node, node.target) == wanted:
            return True
        if isinstance(node, ast.Call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if _name(node.func) in _CLEARS:
                whose = [one for one in (owner, *node.args) if one is not None]
                if any(_stores(path, node, one) == wanted for one in whose):
                    return True
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "grad":
                    continue
                if _stores(path, node, target) == wanted and _in(path, node, inside):
                    return True
        if isinstance(node, ast.Delete):
            if any(_stores(path, node, one) == wanted for one in node.targets):
                return True
    return False


def _in(path: str, node: ast.AST, loops: Sequence[ast.AST]) -> bool:
    """Whether a node lies in one of some loops, or in another function than their own."""
    over, above = parents(path), node
    while above in over:
        above = over[above]
        if above in loops or isinstance(above, ast.FunctionDef | ast.ClassDef):
            return True
    return False


def own_sum(assigned: Place | None) -> OwnSum | None:
    """The sum from which a line sets `.grad`, if there is one that gradients are added to.

    Args:
        assigned: the line `p.grad = ...`.
    """
    node = statement(assigned)
    if assigned is None or not isinstance(node, ast.Assign):
        return None
    target = node.targets[0]
    if not isinstance(target, ast.Attribute) or target.attr != "grad":
        return None
    base, scaled = _base(node.value)
    if not base:
        return None
    wanted = _iterated(assigned.path, node, base) or base
    loops = [one for one in above_of(assigned) if isinstance(one, _LOOPS)]
    additions = list(_additions(assigned.path, wanted))
    if not additions or not loops:
        return None
    told = [_plain_gradient(value) for _, value in additions]
    if not all(plain for plain, _ in told):
        return None
    first = additions[0][0]
    line = getattr(first, "lineno", 0)
    return OwnSum(
        Place(assigned.path, line, function_of(assigned.path, first)),
        _changed(assigned.path, wanted, loops),
        scaled or any(times for _, times in told),
    )


def plain_mean(place: Place | None) -> bool:
    """Whether what a line hands to `autograd.grad` is a mean of torch's own, as it is."""
    whole = statement(place)
    if place is None or whole is None:
        return False
    for call in ast.walk(whole):
        if not isinstance(call, ast.Call) or _name(call.func) != "grad" or not call.args:
            continue
        loss: ast.expr = call.args[0]
        if isinstance(loss, ast.Name):
            around = above_of(place)
            scope = around[-1] if around and isinstance(around[-1], ast.FunctionDef) else None
            scope = scope or tree_of(place.path)
            made = [
                node.value
                for node in (ast.walk(scope) if scope is not None else ())
                if isinstance(node, ast.Assign | ast.AugAssign)
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                if isinstance(target, ast.Name) and target.id == loss.id
            ]
            if len(made) != 1:
                return False
            loss = made[0]
        if not isinstance(loss, ast.Call) or any(one.arg == "reduction" for one in loss.keywords):
            return False
        return _name(loss.func) in (
            "cross_entropy", "mse_loss", "nll_loss", "l1_loss", "binary_cross_entropy", "mean",
            "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
        )  # fmt: skip
    return False


def window_in_one(backward: Place | None) -> int:
    """How many losses a test by remainder lets add up before one backward for all; 0 if unknown."""
    around = above_of(backward)
    loop = next((node for node in around if isinstance(node, _LOOPS)), None)
    test = next((node for node in around if isinstance(node, ast.If)), None)
    name = receiver(statement(backward), plain=True)
    if backward is None or loop is None or test is None or not name:
        return 0
    inside = set(map(id, ast.walk(test)))
    added = [
        node
        for node in ast.walk(loop)
        if id(node) not in inside and isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if _name(target) == name
    ]
    sums = [
        isinstance(
            node.op if isinstance(node, ast.AugAssign) else getattr(node.value, "op", 0), ast.Add
        )
        for node in added
    ]
    mods = [
        one.right
        for one in ast.walk(test.test)
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)
    ]
    if len(sums) != 1 or not all(sums) or len(mods) != 1:
        return 0
    values = (
        [mods[0]] if isinstance(mods[0], ast.Constant) else values_of(backward.path, _name(mods[0]))
    )
    numbers = {getattr(value, "value", None) for value in values}
    number = numbers.pop() if len(numbers) == 1 else None
    return number if isinstance(number, int) else 0
