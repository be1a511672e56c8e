"""Running sums of losses: how many terms they have, what each was weighed by, what divides them."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, TypeGuard

from gradaccum.lint.walk.evaluate import key_of, text
from gradaccum.lint.walk.values import Divisor, Num, Tensor, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["LOOP", "LOSS", "TERMS", "average", "count_term", "is_quotient", "shown", "weighs"]

LOSS, TERMS, LOOP = "__loss__", "__terms__", "__loop__"
_WEIGHT = "__weight__"
_BATCH = re.compile(r"(\w+_)?(batch_?size|bs|bsz|n_?samples|num_samples)", re.IGNORECASE)


def shown(value: Tensor | Thing, node: ast.AST, name: str) -> Thing:
    """A tensor as a number, which may be the loss for a log."""
    made = Thing("unknown", f"{name}@{getattr(node, 'lineno', 0)}", True)
    if isinstance(value, Thing):
        made.attrs[LOSS] = _quotient(value)
    elif value.forwards:
        made.attrs[LOSS] = value
    return made


def is_quotient(value: Value) -> TypeGuard[Thing]:
    """Whether a value of a model that nobody knows was divided by a number."""
    return isinstance(value, Thing) and "over" in value.uses and len(value.args) == 2


def _quotient(value: Thing) -> Tensor:
    by = value.args[1]
    number = by.value if isinstance(by, Num) else None
    return Tensor(divisors=(Divisor(key_of(by), number),), flags=frozenset(("opaque",)))


def count_term(walker: Walker, result: Thing, current: Value, value: Thing) -> None:
    """Count the losses in a running sum, so that a mean of them can be checked."""
    loss = value.attrs.get(LOSS)
    before = current.attrs.get(TERMS) if isinstance(current, Thing) else Num(0)
    begun = isinstance(current, Thing) or (isinstance(current, Num) and current.value == 0)
    if not isinstance(loss, Tensor) or not isinstance(before, Num) or not begun:
        return
    result.attrs.update({LOSS: loss, TERMS: Num(before.value + 1)})
    if walker.loops:
        result.attrs[LOOP] = Num(walker.loops[-1].entry)
    if _WEIGHT in value.attrs:
        result.attrs[_WEIGHT] = True


def average(walker: Walker, total: Thing, by: Value, node: ast.AST) -> None:
    """Note what a running sum of losses is divided by."""
    terms, loss = total.attrs[TERMS], total.attrs.get(LOSS)
    if not isinstance(by, Num) or not isinstance(terms, Num) or not isinstance(loss, Tensor):
        return
    numbers = Thing("numbers", "", args=(terms, by))
    if LOOP in total.attrs:
        numbers.attrs[LOOP] = total.attrs[LOOP]
    walker.note("average", node, numbers, loss, *(["weighed"] if _WEIGHT in total.attrs else []))


def weighs(walker: Walker, left: Value, right: Value, node: ast.AST) -> Thing | None:
    """A loss times the size of its batch, as a number for a log."""
    for side in ("left", "right"):
        part = getattr(node, side, None)
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div):
            walker.trace.undone.add(id(part))
    for value, other in ((left, "right"), (right, "left")):
        if not isinstance(value, Thing) or LOSS not in value.attrs or TERMS in value.attrs:
            continue
        if _is_size(getattr(node, other, None)):
            made = Thing("unknown", f"{value.key}*", True, depth=len(walker.loops))
            made.attrs.update({LOSS: value.attrs[LOSS], _WEIGHT: True})
            return made
    return None


def _is_size(node: ast.expr | None) -> bool:
    """Whether an expression is the size of a batch."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "size":
            return len(node.args) == 1 and _nought(node.args[0])
        return isinstance(node.func, ast.Name) and node.func.id == "len"
    if isinstance(node, ast.Subscript):
        return getattr(node.value, "attr", "") == "shape" and _nought(node.slice)
    name = text(node).rpartition(".")[2] if isinstance(node, (ast.Name, ast.Attribute)) else ""
    return _BATCH.fullmatch(name) is not None


def _nought(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0
