"""Where the source says that a value comes from: a loss, a model, what an optimizer was given."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.doctor.checks.patterns import receiver
from gradaccum.doctor.checks.source import above_of, calls, function_of, statement, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = [
    "chosen",
    "computed",
    "cut",
    "cut_of",
    "divided_at",
    "divided_by_count",
    "flows",
    "given",
    "leaves_inference",
    "made",
    "replaced",
    "unrecorded",
]

_CUTTING = {
    "argmax", "argmin", "detach", "detach_", "from_numpy", "item", "numpy", "tolist", "Variable",
    "tensor", "as_tensor", "Tensor", "FloatTensor", "DoubleTensor",
}  # fmt: skip
_DEEP = 6
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _scope(place: Place) -> ast.AST | None:
    """The function that a line is in, or its module."""
    around = above_of(place)
    last = around[-1] if around else None
    return last if isinstance(last, _FUNCTIONS) else tree_of(place.path)


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """All that belongs to a scope, without the functions that are defined in it."""
    todo: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))


def flows(node: ast.AST | None) -> set[str]:
    """Names that an expression is made of."""
    found = ast.walk(node) if node is not None else ()
    return {one.id for one in found if isinstance(one, ast.Name)}


def _value(node: ast.AST, name: str) -> ast.expr | None:
    """What a statement gives a name."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return None
    named = any(isinstance(one, ast.Name) and one.id == name for t in targets for one in _flat(t))
    return node.value if named else None


def _flat(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def _assigned(scope: ast.AST, name: str, before: int) -> list[tuple[ast.stmt, ast.expr]]:
    """Statements of a scope that give a name its value above a line, nearest first."""
    found = []
    for node in _inside(scope):
        value = _value(node, name)
        if value is not None and isinstance(node, ast.stmt) and node.lineno < before:
            found.append((node, value))
    return sorted(found, key=lambda pair: -pair[0].lineno)


def made(backward: Place | None) -> list[tuple[Place, ast.expr]]:
    """Lines that gave the loss of a backward its value, nearest first; none for an expression.

    `loss.backward()` is told of `loss`, as is `scaler.scale(loss).backward()`; what is composed
    where it is differentiated, `(loss / 4).backward()`, has no other line.
    """
    if backward is None:
        return []
    name = receiver(statement(backward), plain=True)
    scope = _scope(backward)
    if not name or scope is None:
        return []
    return [
        (Place(backward.path, node.lineno, backward.function), value)
        for node, value in _assigned(scope, name, backward.line)
    ]


def computed(backward: Place | None) -> Place | None:
    """The line that computed the loss of a backward: not one that only scales or adds to it."""
    name = receiver(statement(backward), plain=True)
    for place, value in made(backward):
        if name not in flows(value) and not isinstance(statement(place), ast.AugAssign):
            return place
    return None


def divided_at(backward: Place | None) -> Place | None:
    """The nearest line above a backward that divides its loss, or adds it up."""
    for place, value in made(backward):
        if any(isinstance(one, ast.Div | ast.Add) for one in ast.walk(value)):
            return place
        node = statement(place)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Add):
            return place
    return None


def divided_by_count(backward: Place | None) -> Place | None:
    """The line above a backward that divides its loss by a sum, a count that may be zero."""
    scope = None if backward is None else _scope(backward)
    if scope is None:
        return None
    for place, value in made(backward):
        for one in ast.walk(value):
            if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div):
                parts = [one.right]
                for name in sorted(flows(one.right)):
                    parts += [v for _, v in _assigned(scope, name, place.line)[:1]]
                if any(_counts(part) for part in parts):
                    return place
    return None


def _counts(node: ast.expr) -> bool:
    """`mask.sum()` and the like, as it is; Python's `sum` is of several micro-batches."""
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in ("sum", "count_nonzero")


def _cuts(node: ast.AST) -> bool:
    """Whether an expression leaves the graph: by a call, or by `.data`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and _called(one) in _CUTTING:
            return True
        if isinstance(one, ast.Attribute) and one.attr == "data":
            return True
    return False


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def unrecorded(place: Place) -> bool:
    """Whether a line stands in a `with` that turns autograd off."""
    return any(
        isinstance(one, ast.With)
        and any(
            isinstance(part, ast.Attribute | ast.Name)
            and getattr(part, "attr", getattr(part, "id", "")) in ("no_grad", "inference_mode")
            for item in one.items
            for part in ast.walk(item.context_expr)
        )
        for one in above_of(place)
    )


def cut(backward: Place | None) -> Place | None:
    """The line, nearest to a backward, where what its loss is made of left the graph."""
    scope = None if backward is None else _scope(backward)
    if backward is None or scope is None:
        return None
    todo = [(name, backward.line) for name in sorted(flows(statement(backward)))]
    seen: set[tuple[str, int]] = set()
    for _ in range(_DEEP):
        found: list[tuple[str, int]] = []
        for name, before in todo:
            for node, value in _assigned(scope, name, before)[:1]:
                place = Place(backward.path, node.lineno, backward.function)
                if _cuts(value) or unrecorded(place):
                    return place
                found += [(one, node.lineno) for one in sorted(flows(value))]
                if isinstance(node, ast.AugAssign) or name in flows(value):
                    found.append((name, node.lineno))
        todo = [one for one in found if one not in seen]
        seen.update(todo)
    return None


def cut_of(path: str, name: str) -> Place | None:
    """The line of a file where what a module of a name computed leaves the graph."""
    tree = tree_of(path)
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call) or _called(node) != name:
            continue
        place = Place(path, node.lineno, function_of(path, node))
        scope, whole = _scope(place), statement(place)
        if scope is None or whole is None:
            continue
        if _detached(whole, node) or unrecorded(place):
            return place
        for kept in _targets(whole):
            for other in _inside(scope):
                if _detaches(other, kept) and getattr(other, "lineno", 0) > place.line:
                    return Place(path, getattr(other, "lineno", 0), place.function)
    return None


def _detached(whole: ast.AST, call: ast.Call) -> bool:
    """Whether a statement detaches what a call in it gives."""
    return any(
        isinstance(one, ast.Attribute)
        and one.attr in ("detach", "data", "detach_")
        and any(inner is call for inner in ast.walk(one.value))
        for one in ast.walk(whole)
    )


def _targets(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [one.id for t in targets for one in _flat(t) if isinstance(one, ast.Name)]


def _detaches(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("detach", "detach_", "data")
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    )


def leaves_inference(place: Place) -> bool:
    """Whether what a line computes under `inference_mode` is used outside of it."""
    whole, scope = statement(place), _scope(place)
    if whole is None or scope is None:
        return False
    if isinstance(whole, ast.Return):
        return any(
            not unrecorded(call) and call.function != place.function
            for call in calls(place.path, place.function)
        )
    for name in _targets(whole):
        for node in _inside(scope):
            if not isinstance(node, ast.Call) or node.lineno <= place.line:
                continue
            there = Place(place.path, node.lineno, place.function)
            if any(isinstance(a, ast.Name) and a.id == name for a in node.args):
                if not unrecorded(there):
                    return True
    return False


def chosen(entered: Place | None) -> Place | None:
    """The line that made the context which a `with` at a line enters by its name."""
    node, scope = statement(entered), None if entered is None else _scope(entered)
    if entered is None or scope is None or not isinstance(node, ast.With):
        return None
    for item in node.items:
        if isinstance(item.context_expr, ast.Name):
            for found, value in _assigned(scope, item.context_expr.id, entered.line)[:1]:
                if any(getattr(one, "attr", "") == "no_sync" for one in ast.walk(value)):
                    return Place(entered.path, found.lineno, entered.function)
    return None


def given(optimizer: Place | None) -> list[str]:
    """What an optimizer's line takes the parameters of, as it is written: `model`, `self.net`."""
    node = statement(optimizer)
    return [
        ast.unparse(one.func.value)
        for one in (ast.walk(node) if node is not None else ())
        if isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in ("parameters", "named_parameters")
    ]


_RENEWING = {
    "register_parametrization", "resize_token_embeddings", "spectral_norm", "to_empty",
    "weight_norm",
}  # fmt: skip
"""Calls that put other parameters into a model that they are given."""


def _renewing(tree: ast.Module, models: set[str]) -> list[ast.Call]:
    """Calls that renew parameters of models, or of parts of them, in the order of their lines."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        assigns = any(
            one.arg == "assign" and getattr(one.value, "value", None) is True
            for one in node.keywords
        )
        if _called(node) not in _RENEWING and not (_called(node) == "load_state_dict" and assigns):
            continue
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        if any(_part_of(one, models) for one in (*owner, *node.args[:1])):
            found.append(node)
    return sorted(found, key=lambda one: one.lineno)


def _part_of(node: ast.expr, models: set[str]) -> bool:
    """Whether something is one of the models, or lies in one."""
    while True:
        if ast.unparse(node) in models:
            return True
        if not isinstance(node, ast.Attribute | ast.Subscript):
            return False
        node = node.value


def replaced(optimizer: Place | None, backward: Place | None, name: str) -> Place | None:
    """The line that puts another parameter, layer or model where an optimizer took its own from.

    Args:
        optimizer: where it was made.
        backward: its file is searched as well.
        name: of the parameter within its model, with dots.
    """
    parts = set(name.split(".")) - {""}
    for path in dict.fromkeys(place.path for place in (optimizer, backward) if place is not None):
        tree = tree_of(path)
        sets = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)] if tree else []
        for node in sorted(sets, key=lambda one: one.lineno):
            own = function_of(path, node) == "__init__"
            for target in node.targets:
                inner = isinstance(target, ast.Attribute) and target.attr in parts
                if inner and not own and not isinstance(node.value, ast.Constant):
                    return Place(path, node.lineno, function_of(path, node))
        models = set(given(optimizer))
        after = 0 if optimizer is None or path != optimizer.path else optimizer.line
        for call in _renewing(tree, models) if tree is not None else ():
            if call.lineno > after:
                return Place(path, call.lineno, function_of(path, call))
        again = [
            node
            for node in sorted(sets, key=lambda one: one.lineno)
            if any(ast.unparse(one) in models for t in node.targets for one in _flat(t))
            and any(isinstance(one, ast.Call) for one in ast.walk(node.value))
        ]
        for node in again[1:] if len(again) > 1 else again:
            if node.lineno > after or (len(again) > 1 and function_of(path, node) != "<module>"):
                return Place(path, node.lineno, function_of(path, node))
    return None
