"""Numbers, divisions of a loss, and conditions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradaccum.lint.walk import multiples
from gradaccum.lint.walk.counters import counts, iterations, modulus, number
from gradaccum.lint.walk.evaluate import assign, evaluate, key_of, text
from gradaccum.lint.walk.means import TERMS, average, count_term, weighs
from gradaccum.lint.walk.multiples import symbols
from gradaccum.lint.walk.values import (
    Class,
    Divisor,
    Env,
    Func,
    Num,
    Seq,
    Tensor,
    Thing,
    Value,
    varies,
)

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["augment", "binary", "condition", "divided", "merged", "smooth", "symbols"]

_MATH: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[..., bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_NEGATIVE: dict[type[ast.cmpop], str] = {ast.NotEq: "Eq", ast.IsNot: "Is", ast.NotIn: "In"}
OWN = "own"
"""The key of a divisor that a micro-batch's own forward made."""
INSIDE = "inside"
"""The key of a divisor that the forward of a criterion, or of a model, put on what it returns."""


def binary(walker: Walker, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
    """`left op right`."""
    if isinstance(op, (ast.Pow, ast.Mult)) and isinstance(left, Thing) and left.kind == "grad":
        if isinstance(op, ast.Pow) or left is right:
            walker.note("square", node, left)
    if isinstance(left, Thing) and TERMS in left.attrs and isinstance(op, ast.Div):
        average(walker, left, number(walker, right), node)
    elif isinstance(op, ast.Mult):
        weighed = weighs(walker, left, right, node)
        if weighed is not None:
            return weighed
    if isinstance(node, ast.BinOp) and multiples.is_whole(node):
        multiples.divides_evenly(walker, left, right)
    left, right = _drawn(left, right)
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return _tensor(walker, op, left, right, node)
    if isinstance(op, ast.Mod):
        left, right = modulus(walker, left, right, node)
    elif isinstance(op, ast.Add):
        left, right = iterations(walker, left, right), iterations(walker, right, left)
    left, right = number(walker, left), number(walker, right)
    if isinstance(left, Num) and isinstance(right, Num):
        function = _MATH.get(type(op))
        if function is not None:
            try:
                value = function(left.value, right.value)
            except (ZeroDivisionError, OverflowError, TypeError):
                return Thing("unknown", text(node), True)
            tags = left.tags | right.tags
            sized = any(tag.startswith("len(") for tag in left.tags)
            if isinstance(op, ast.FloorDiv) and sized and left.value > 0:
                tags |= {"floor"}
            if isinstance(op, ast.FloorDiv) and left.varies and right.tags:
                tags |= {"#windows"}
            # a share is still called by what it is one of
            whole = right.tags and (value >= 1 or isinstance(op, ast.FloorDiv))
            if isinstance(op, (ast.FloorDiv, ast.Div)) and (left.tags or whole):
                tags |= {f"/{tag}" for tag in right.tags or (repr(right.value),)}
            return Num(value, tags, left.varies or right.varies)
    if isinstance(left, Seq) and isinstance(right, Seq) and isinstance(op, ast.Add):
        return Seq([*left.items, *right.items], left.depth, left.open or right.open)
    if isinstance(op, ast.Add) and _are_params(left) and _are_params(right):
        assert isinstance(left, Thing)
        assert isinstance(right, Thing)
        return Thing("params", f"({left.key} + {right.key})", models=left.models | right.models,
                     args=(left, right), uses=(left.uses | right.uses) - {"iterator", "once"},
                     depth=max(left.depth, right.depth))  # fmt: skip
    if isinstance(left, Num) and isinstance(right, Seq):
        left, right = right, left
    if isinstance(left, Seq) and isinstance(right, Num) and isinstance(op, ast.Mult):
        times = int(right.value)
        if len(left.items) * times <= 64:
            return Seq(left.items * times, left.depth, left.open)
    made = Thing(
        "unknown",
        f"({key_of(left)} {type(op).__name__} {key_of(right)})",
        varies(left) or varies(right),
        args=(left, right),
        depth=len(walker.loops),
    )
    if isinstance(op, ast.Mult):
        made.uses.add("times")
    elif isinstance(op, (ast.Div, ast.FloorDiv)):
        made.uses.add("over")
    elif isinstance(op, (ast.Add, ast.Sub)):
        made.uses.add("plus")
    if isinstance(op, (ast.Div, ast.Mult)) and isinstance(left, Thing):
        made.uses.add("divided")  # whatever it is: as a loss, it is no longer the undivided one
    if _of_grad(left) or _of_grad(right):
        made.uses.add("grad")
    if isinstance(left, Thing) and left.kind == "param":
        made.uses.add("param")
        made.models = left.models
    return made


def _are_params(value: Value) -> bool:
    return isinstance(value, Thing) and value.kind == "params"


def _drawn(left: Value, right: Value) -> tuple[Value, Value]:
    """Leaf tensors as tensors, except in an update, where what matters is which leaf it is."""
    if _of_grad(left) or _of_grad(right):
        return left, right
    return _from_leaf(left), _from_leaf(right)


def _of_grad(value: Value) -> bool:
    return isinstance(value, Thing) and (value.kind == "grad" or "grad" in value.uses)


def _from_leaf(value: Value) -> Value:
    if isinstance(value, Thing) and value.kind == "leaf":
        return Tensor(frozenset((value,)), flags=frozenset(("leaf",)))
    return value


def divided(tensor: Tensor, by: Value) -> Tensor:
    """`tensor / by`."""
    value = by.value if isinstance(by, Num) else None
    fixed = isinstance(by, (Num, Thing)) and not by.varies and key_of(by) != "tensor"
    return tensor.but(divisors=(*tensor.divisors, Divisor(key_of(by), value, fixed)))


def merged(parts: list[Tensor], node: ast.AST) -> Tensor:
    """A tensor made of several, whose divisions are those that all of them have."""
    common = list(parts[0].divisors)
    for part in parts[1:]:
        common = [item for item in common if item in part.divisors]
    apart = tuple(
        item for part in parts for item in (*part.divisors, *part.partial) if item not in common
    )
    flags = frozenset().union(*(part.flags for part in parts)) - {"data", "detached", "item"}
    if any(part.graph for part in parts):
        flags -= {"ungraphed"}
    if "weighted" in flags and not all("weighted" in part.flags for part in parts):
        flags -= {"weighted"}
    if "mean" in flags and not all("mean" in part.flags for part in parts):
        flags -= {"mean"}
    reaching = [part for part in parts if part.graph] or parts
    return Tensor(
        frozenset().union(*(part.models for part in reaching)),
        tuple(common),
        frozenset().union(*(part.forwards for part in parts)),
        flags,
        next((part.scaler for part in parts if part.scaler is not None), None),
        any(part.graph for part in parts),
        apart if len(parts) > 1 else parts[0].partial,
        node,
    )


def _tensor(walker: Walker, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        both = merged([left, right], node)
        if isinstance(op, (ast.Add, ast.Sub)):
            if "ungraphed" in left.flags | right.flags and left.graph != right.graph:
                walker.note("ungraphed_term", node, None, both)
            parts = sorted((left, right), key=lambda part: bool(part.divisors), reverse=True)
            if _sum_over_window(parts[0]) and not parts[1].divisors and parts[1].graph:
                if not parts[1].flags & {"sum", "weighted", "lopsided"}:
                    return both.but(flags=both.flags | {"lopsided"})
            return both
        if isinstance(op, ast.Mult):
            return both.but(divisors=(*left.divisors, *right.divisors), partial=())
        if isinstance(op, ast.MatMult):
            alike = {"similarity"} if left.models & right.models else set()
            return both.but(divisors=(), partial=(), flags=both.flags | alike)
        own = bool(right.forwards) and right.forwards <= left.forwards
        # by a count that the same micro-batch made: a mean of its own, and no sum any more
        flags = both.flags - {"sum"} if own else both.flags
        return divided(both.but(divisors=left.divisors, partial=(), flags=flags),
                       Thing("unknown", OWN if own else "tensor"))  # fmt: skip
    tensor, other = (left, right) if isinstance(left, Tensor) else (right, left)
    assert isinstance(tensor, Tensor)
    other = number(walker, other)
    tensor = tensor.but(made=node)
    if not tensor.graph and isinstance(other, Thing) and other.kind == "unknown":
        tensor = tensor.but(flags=tensor.flags | {"opaque"})  # the other may well have a graph
    if isinstance(op, ast.Div):
        if tensor.forwards and tensor.forwards <= walker.spent and isinstance(other, Num):
            walker.note("divided_late", node, None, divided(tensor, other))
        if isinstance(node, ast.BinOp) and "sum" in tensor.flags and _is_count(node.right):
            walker.note("by_count", node, other if isinstance(other, Thing) else None, tensor)
        if tensor is not left and not isinstance(left, Tensor):
            return divided(tensor, Thing("unknown", "reciprocal"))
        return divided(tensor, other)
    if isinstance(op, ast.Mult):
        return tensor if _is_width(node) else _times(tensor, other)
    return tensor


def _is_width(node: ast.AST) -> bool:
    """Whether a factor is the size of a tensor beyond its first axis: no share of a window."""
    for part in (node.left, node.right) if isinstance(node, ast.BinOp) else ():
        if isinstance(part, ast.Call) and getattr(part.func, "attr", "") in ("size", "dim"):
            axis: ast.expr | None = part.args[0] if part.args else None
        elif isinstance(part, ast.Subscript) and getattr(part.value, "attr", "") == "shape":
            axis = part.slice
        else:
            continue
        if isinstance(axis, ast.Constant) and isinstance(axis.value, int) and axis.value > 0:
            return True
    return False


def _sum_over_window(tensor: Tensor) -> bool:
    """Whether a term is a sum over something that does not change with the micro-batch."""
    return "sum" in tensor.flags and any(item.fixed for item in tensor.divisors)


def _is_count(node: ast.expr) -> bool:
    """Whether a divisor is a bare `mask.sum()`, which may be zero."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sum"
        and not node.args
    )


def _times(tensor: Tensor, factor: Value) -> Tensor:
    if isinstance(factor, Num):
        if factor.tags and 0 < factor.value < 1:
            return tensor.but(divisors=(*tensor.divisors, Divisor(key_of(factor), None)))
        undone = [item for item in tensor.divisors if item.key == key_of(factor)]
        if undone:
            rest = list(tensor.divisors)
            rest.remove(undone[0])
            return tensor.but(divisors=tuple(rest), flags=tensor.flags | {"undone"})
        if not factor.tags:
            # a weight of a term, unless it is small enough to be somebody's 1/N
            small = 0 < factor.value <= 0.25
            mark = {"weighted"} if small else set()
            return tensor.but(flags=tensor.flags | mark)
    # An unknown factor may well be one over the window.
    return tensor.but(divisors=(*tensor.divisors, Divisor(f"1/{key_of(factor)}", None)))


def augment(
    walker: Walker, node: ast.AugAssign, env: Env, spelled: ast.Assign | None = None
) -> None:
    """`target op= value`, with what it means for gradients, parameters and running sums."""
    current = evaluate(walker, env, _read(node))
    value = evaluate(walker, env, node.value)
    if isinstance(current, Thing) and current.kind == "grad":
        marks = ["add"] if isinstance(node.op, (ast.Add, ast.Sub)) else []
        if isinstance(node.op, ast.Mult) and isinstance(value, Num) and value.value == 0:
            walker.note("zero", spelled or node, current, None, "param")
            return
        fixed = isinstance(value, (Num, Thing)) and not value.varies
        if isinstance(node.op, ast.Div) and fixed and getattr(value, "value", 0) != 1:
            marks.append("share")
        walker.note("grad_scale", spelled or node, current, None, *marks, *asked(walker, node))
        return
    if isinstance(current, Thing) and current.kind in ("param", "leaf"):
        reads = isinstance(value, Thing) and (value.kind == "grad" or "grad" in value.uses)
        if spelled is not None:
            if reads and current.kind == "param" and isinstance(node.target, ast.Name):
                walker.note("rebind", spelled, current)
        elif reads or current.kind == "param" or walker.inside("hook"):
            flags = [*current.uses & {"data"}, *(["grad"] if reads else [])]
            hooked = walker.inside("hook") and "data" not in current.uses and not reads
            walker.note("param_write", node, current, None, "augmented", *flags)
            if hooked and not walker.inside("no_grad"):
                walker.note("hook_write", node, current)
        if spelled is None or reads:
            return
    if isinstance(value, Tensor) and isinstance(node.op, ast.Add):
        again = isinstance(current, Tensor) and "running" in current.flags
        if again or not isinstance(current, Tensor):
            walker.note("running", spelled or node, None, value, *(["again"] if again else []))
    result: Value
    if isinstance(current, Thing) and current.kind in ("unknown", "external"):
        if isinstance(value, Num) and isinstance(node.op, (ast.Add, ast.Sub)):
            walker.trace.exact = False
            if isinstance(node.target, ast.Name):
                walker.trace.guessed = True
            current = Num(0, frozenset(), bool(walker.loops))
        elif isinstance(node.op, (ast.Mult, ast.Div)) and not isinstance(value, Tensor):
            walker.trace.scaled_keys |= symbols(value)
    result = binary(walker, node.op, current, value, node)
    if isinstance(node.op, ast.Add) and isinstance(result, Thing) and isinstance(value, Thing):
        count_term(walker, result, current, value)
    if isinstance(result, Num) and walker.loops:
        result = Num(result.value, result.tags, True)
    if isinstance(result, Tensor) and not isinstance(current, Tensor):
        result = result.but(flags=result.flags | {"running"})
    elif isinstance(result, Tensor) and isinstance(current, Tensor):
        kept = {"running", "again"} if "running" in current.flags else set()
        result = result.but(flags=(result.flags - {"running", "again"}) | kept)
    assign(walker, env, node.target, result)


def smooth(walker: Walker, node: ast.Assign, before: Value, result: Value) -> Value:
    """`x = a * x + b * y`, which keeps the graph of `y` as `x += y` does."""
    if not isinstance(result, Tensor) or not result.graph or not result.forwards:
        return result
    fresh = result
    if isinstance(before, Tensor):
        again = bool(before.forwards) and before.graph and _of_earlier(walker, before)
        if not again:
            return result
        fresh = result.but(forwards=result.forwards - before.forwards)
        walker.note("running", node, None, fresh, "again")
    return result.but(flags=result.flags | {"running"})


def _of_earlier(walker: Walker, tensor: Tensor) -> bool:
    """Whether no forward pass of this iteration is in a tensor."""
    here = tuple([frame.now for frame in walker.loops])
    for event in reversed(walker.trace.events):
        if event.loops[: len(here)] != here:
            break
        if event.kind == "forward" and event.tensor is not None:
            if event.tensor.forwards & tensor.forwards:
                return False
    return True


_TESTS = (ast.If, ast.While, ast.IfExp, ast.Assert)


def asked(walker: Walker, node: ast.AST) -> list[str]:
    """Whether the loop or function around asks if gradients are there at all."""
    around = walker.loops[-1].node if walker.loops else None
    around = around or (walker.stack[-1] if walker.stack else None)
    if around is None:
        module = walker.program.load(walker.paths[-1])
        around = module.tree if module is not None else node
    known = around.__dict__.get("_asked")  # the same for all that lies in it, in all walks
    if known is None:
        known = around.__dict__["_asked"] = _asks(around)
    return ["asked"] if known else []


def _asks(around: ast.AST) -> bool:
    for child in ast.walk(around):
        tests = [child.test] if isinstance(child, _TESTS) else getattr(child, "ifs", ())
        for test in tests:
            for part in ast.walk(test):
                if isinstance(part, ast.Attribute) and part.attr in ("grad", "requires_grad"):
                    return True
    return False


def _read(node: ast.AugAssign) -> ast.expr:
    """The target as it is read, made once for all walks."""
    known = node.__dict__.get("_read")
    if known is None:
        target = node.target
        if isinstance(target, ast.Name):
            known = ast.Name(target.id, ast.Load())
        elif isinstance(target, ast.Attribute):
            known = ast.Attribute(target.value, target.attr, ast.Load())
        else:
            known = ast.Subscript(target.value, target.slice, ast.Load())
        node.__dict__["_read"] = ast.copy_location(known, target)
    return known


def condition(
    walker: Walker, env: Env, test: ast.expr, around: ast.AST | None
) -> bool | tuple[str, bool, bool]:
    """A condition that is neither `not`, `and` nor `or`."""
    if isinstance(test, ast.Compare):
        return _compare(walker, env, test, around)
    return _truthy(evaluate(walker, env, test), test)


def _truthy(value: Value, test: ast.expr) -> bool | tuple[str, bool, bool]:
    if value is None or isinstance(value, (bool, str)):
        return bool(value)
    if isinstance(value, Num):
        return value.value != 0
    if isinstance(value, (Func, Class)):
        return True
    if isinstance(value, Seq):
        return (text(test), True, True) if value.open else bool(value.items)
    if isinstance(value, Tensor):
        return text(test), True, True
    if value.kind in ("unknown", "external", "dict", "literal"):
        if value.key.startswith("not "):
            return value.key[4:], value.varies, False
        return value.key, value.varies, True
    return True


def _compare(
    walker: Walker, env: Env, test: ast.Compare, around: ast.AST | None
) -> bool | tuple[str, bool, bool]:
    values = [evaluate(walker, env, part) for part in (test.left, *test.comparators)]
    open_: tuple[str, bool, bool] | None = None
    nodes = (test.left, *test.comparators)
    for index, op in enumerate(test.ops):
        result = _pair(
            walker, op, values[index : index + 2], nodes[index : index + 2], test, around
        )
        if result is False:
            return False
        if result is not True:
            open_ = result if open_ is None else (f"{open_[0]},{result[0]}", True, True)
    return True if open_ is None else open_


def _pair(
    walker: Walker,
    op: ast.cmpop,
    values: list[Value],
    nodes: tuple[ast.expr, ...],
    test: ast.Compare,
    around: ast.AST | None,
) -> bool | tuple[str, bool, bool]:
    left, right = values
    if right is None and isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
        positive = isinstance(op, (ast.IsNot, ast.NotEq))
        if left is None:
            return not positive
        if isinstance(left, Thing) and left.kind in ("unknown", "external"):
            return left.key, left.varies, positive
        return positive
    left, right = number(walker, left), number(walker, right)
    if isinstance(left, Num) and isinstance(right, Thing) and counts(left, right, test, around):
        walker.trace.window_keys.add(right.key)
        right = walker.symbol(right.key)
    elif isinstance(right, Num) and isinstance(left, Thing) and counts(right, left, test, around):
        walker.trace.window_keys.add(left.key)
        left = walker.symbol(left.key)
    function = _COMPARE.get(type(op))
    if function is not None:
        if isinstance(left, Num) and isinstance(right, Num):
            return function(left.value, right.value)
        if isinstance(left, (str, bool)) and type(left) is type(right):
            return function(left, right)
    if isinstance(op, (ast.Is, ast.IsNot)) and isinstance(left, bool) and isinstance(right, bool):
        return (left is right) == isinstance(op, ast.Is)
    if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, Seq) and not right.open:
        if isinstance(left, str) and all(isinstance(item, str) for item in right.items):
            return (left in right.items) == isinstance(op, ast.In)
    changes = varies(left) or varies(right)
    negative = _NEGATIVE.get(type(op))
    names = [
        text(node) if isinstance(value, Num) and value.varies and not value.tags else key_of(value)
        for value, node in zip((left, right), nodes, strict=True)
    ]
    # a counter by its name: what is asked of it is decided alike in all iterations
    return f"{names[0]} {negative or type(op).__name__} {names[1]}", changes, negative is None
