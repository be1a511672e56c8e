"""Lines of the source that a fault of some kind stands on: searched where a run leaves it open."""

from __future__ import annotations

import ast

from gradaccum.doctor.checks.source import calls, function_of, loop_of, statement, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = [
    "asks",
    "clips",
    "divided_late",
    "divides_by_all",
    "exchanges",
    "forward_of_module",
    "hook_function",
    "keeps",
    "lines_that",
    "rebinds",
    "receiver",
    "scales_its_argument",
    "sends_gradient",
    "squares_gradient",
    "turned_off",
    "written_past",
]


def lines_that(place: Place | None, wanted: str) -> list[Place]:
    """Lines of a file on which an attribute of a name is used."""
    tree = None if place is None else tree_of(place.path)
    if tree is None or place is None:
        return []
    found = {
        node.lineno: function_of(place.path, node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == wanted
    }
    return [Place(place.path, line, found[line]) for line in sorted(found)]


def asks(place: Place | None, name: str) -> Place | None:
    """The line of a place's file that asks for the gradient of a name."""
    tree = None if place is None else tree_of(place.path)
    if tree is None or place is None:
        return None
    if not name.isidentifier():
        return _kept_on_self(place.path, tree)
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        named = any(isinstance(one, ast.Name) and one.id == name for one in targets)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func  # x.requires_grad_()
            named = isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == name
        by_name = any(  # x.requires_grad = True
            isinstance(one, ast.Attribute)
            and one.attr == "requires_grad"
            and getattr(one.value, "id", "") == name
            for one in targets
        )
        if by_name or (named and any(map(_asks, ast.walk(node)))):
            return Place(place.path, getattr(node, "lineno", 0), function_of(place.path, node))
    return None


def _kept_on_self(path: str, tree: ast.Module) -> Place | None:
    """The only line of a file on which a plain tensor that asks for a gradient becomes `self.x`."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and getattr(node.targets[0].value, "id", "") == "self"
        and any(map(_asks, ast.walk(node.value)))
        and not any(getattr(one, "attr", "") == "Parameter" for one in ast.walk(node.value))
    ]
    lines = [Place(path, node.lineno, function_of(path, node)) for node in found]
    return lines[0] if len(lines) == 1 else None


def _asks(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        value = getattr(node.value, "value", None)
        return node.arg == "requires_grad" and value is True
    return isinstance(node, ast.Attribute) and node.attr == "requires_grad_"


def divided_late(backward: Place | None) -> Place | None:
    """A line that divides a loss by something after its backward has run."""
    node = statement(backward)
    if backward is None or not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return None
    called = node.value.func
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
        return None
    name = called.value.id
    loop = loop_of(backward)
    if loop is not None:
        for other in ast.walk(loop):
            if getattr(other, "lineno", 0) > backward.line and _divides(other, name):
                return Place(backward.path, getattr(other, "lineno", 0), backward.function)
    for call in calls(backward.path, backward.function) if loop is None else ():
        other = statement(call)
        value = getattr(other, "value", None)
        if isinstance(other, ast.Assign) and isinstance(value, ast.BinOp):
            if isinstance(value.op, ast.Div) and isinstance(value.left, ast.Call):
                inner = value.left.func
                if getattr(inner, "attr", getattr(inner, "id", "")) == backward.function:
                    return call
    return None


def _divides(node: ast.AST, name: str) -> bool:
    """`name = name / something`, or the same in place."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Div)
        and isinstance(node.value.left, ast.Name)
        and node.value.left.id == name
        and any(isinstance(one, ast.Name) and one.id == name for one in node.targets)
    )


def keeps(backward: Place | None) -> Place | None:
    """A line beside a backward that keeps its loss: adds it to a total, or to a list.

    Also a call of a function of the same file that does so with what it is given.
    """
    name = receiver(statement(backward))
    loop = loop_of(backward)
    if backward is None or loop is None or not name:
        return None
    for other in ast.walk(loop):
        if _keeps(other, name) or _hands_over(backward.path, other, name):
            return Place(backward.path, getattr(other, "lineno", 0), backward.function)
    return None


def _keeps(other: ast.AST, name: str) -> bool:
    """Whether something keeps what is made of a name, with its graph."""
    if isinstance(other, ast.AugAssign):
        return isinstance(other.op, ast.Add) and _held(other.value, name)
    if isinstance(other, ast.Assign) and _held(other.value, name):
        target = ast.unparse(other.targets[0])
        again = any(
            isinstance(one, ast.Name | ast.Attribute | ast.Subscript) and ast.unparse(one) == target
            for one in ast.walk(other.value)
        )
        stored = isinstance(other.targets[0], ast.Subscript)
        return target != name and (again or stored)
    if isinstance(other, ast.Call) and isinstance(other.func, ast.Attribute):
        added = other.func.attr in ("append", "extend", "add", "put", "appendleft", "insert")
        return added and any(_held(one, name) for one in other.args)
    return False


_LETS_GO = {"item", "detach", "float", "numpy", "tolist", "int", "str", "format", "data", "print"}


def _held(node: ast.AST, name: str) -> bool:
    """Whether an expression is made of a name without leaving its graph."""
    if isinstance(node, ast.Call | ast.Attribute):
        inner = node.func if isinstance(node, ast.Call) else node
        if getattr(inner, "attr", getattr(inner, "id", "")) in _LETS_GO:
            return False
    if isinstance(node, ast.JoinedStr | ast.Compare):
        return False
    if isinstance(node, ast.Name):
        return node.id == name
    return any(_held(child, name) for child in ast.iter_child_nodes(node))


def _hands_over(path: str, call: ast.AST, name: str) -> bool:
    """Whether a call gives a loss to a function of the file that keeps it."""
    if not isinstance(call, ast.Call) or not call.args:
        return False
    places = [i for i, a in enumerate(call.args) if isinstance(a, ast.Name) and a.id == name]
    called = getattr(call.func, "attr", getattr(call.func, "id", ""))
    tree = tree_of(path) if places and called else None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == called:
            own = node.args.args[1:] if isinstance(call.func, ast.Attribute) else node.args.args
            for place in places:
                if place < len(own):
                    return any(_keeps(one, own[place].arg) for one in ast.walk(node))
    return False


def receiver(node: ast.stmt | None, plain: bool = False) -> str:
    """The name that a statement calls `backward` of.

    Args:
        node: the statement.
        plain: only if it is the name itself that is differentiated, not something made of it.
    """
    for one in ast.walk(node) if node is not None else ():
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
            if one.func.attr == "backward":
                inner: ast.AST = one.func.value
                if isinstance(inner, ast.Name) and one.args and isinstance(one.args[0], ast.Name):
                    return one.args[0].id  # accelerator.backward(loss)
                while isinstance(inner, ast.Call | ast.BinOp):
                    if isinstance(inner, ast.BinOp) and plain:
                        return ""
                    inner = (
                        inner.args[0]
                        if isinstance(inner, ast.Call) and inner.args
                        else (inner.left if isinstance(inner, ast.BinOp) else ast.Constant(0))
                    )
                return inner.id if isinstance(inner, ast.Name) else ""
    return ""


def hook_function(place: Place | None) -> ast.Lambda | ast.FunctionDef | None:
    """The function that a line registers as a hook."""
    node = statement(place)
    tree = None if place is None else tree_of(place.path)
    if node is None or tree is None:
        return None
    for one in ast.walk(node):
        if not isinstance(one, ast.Call) or not one.args:
            continue
        if not getattr(one.func, "attr", "").startswith("register_"):
            continue
        if isinstance(one.args[0], ast.Lambda):
            return one.args[0]
        name = getattr(one.args[0], "id", getattr(one.args[0], "attr", ""))
        for other in ast.walk(tree):
            if isinstance(other, ast.FunctionDef) and other.name == name:
                return other
    return None


def clips(function: ast.AST) -> bool:
    """Whether a hook's function limits what it is given."""
    return any(
        isinstance(one, ast.Call)
        and getattr(one.func, "attr", getattr(one.func, "id", "")).strip("_")
        in ("clamp", "clip", "clamp_min", "clamp_max", "clip_grad_norm", "clip_grad_value")
        for one in ast.walk(function)
    )


def scales_its_argument(function: ast.AST) -> int | None:
    """The line on which a hook's function multiplies or divides, in place, what it is given."""
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return None
    name = function.args.args[-1].arg
    for one in ast.walk(function):
        if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Div | ast.Mult):
            if isinstance(one.target, ast.Name) and one.target.id == name:
                return one.lineno
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
            if (
                one.func.attr in ("div_", "mul_", "clamp_")
                and getattr(one.func.value, "id", "") == name
            ):
                return one.lineno
    return None


def rebinds(backward: Place) -> Place | None:
    """A line `p = p - rate * p.grad`, which gives a name to a new tensor."""
    tree = tree_of(backward.path)
    for node in ast.walk(tree) if tree is not None else ():
        value = node.value if isinstance(node, ast.Assign) else None
        if not isinstance(node, ast.Assign) or not isinstance(value, ast.BinOp):
            continue
        if not isinstance(value.op, ast.Sub | ast.Add):
            continue
        names = {one.id for one in node.targets if isinstance(one, ast.Name)}
        if any(
            isinstance(part, ast.Attribute)
            and part.attr == "grad"
            and isinstance(part.value, ast.Name)
            and part.value.id in names
            for part in ast.walk(value)
        ):
            return Place(backward.path, node.lineno, function_of(backward.path, node))
    return None


def squares_gradient(place: Place | None, names: set[str], *, all_of_them: bool) -> Place | None:
    """A line of a place's file that sums the squares of gradients as they are.

    Args:
        place: its file is searched.
        names: whose gradients are complex.
        all_of_them: whether all gradients are, so that the name does not matter.
    """
    tree = None if place is None else tree_of(place.path)
    if tree is None or place is None:
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "sum":
            continue
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        for squared in [inner, *node.args]:
            gradient = _squared(squared)
            if not isinstance(gradient, ast.Attribute) or gradient.attr != "grad":
                continue
            owner = getattr(gradient.value, "attr", getattr(gradient.value, "id", ""))
            if all_of_them or owner in names:
                return Place(place.path, gradient.lineno, function_of(place.path, gradient))
    return None


def _squared(node: ast.AST | None) -> ast.AST | None:
    """What an expression squares."""
    two = ast.Constant(2)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return node.left if ast.dump(node.right) == ast.dump(two) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        power = node.func.attr == "pow" and node.args and ast.dump(node.args[0]) == ast.dump(two)
        return node.func.value if power or node.func.attr == "square" else None
    return None


def divides_by_all(backward: Place | None) -> Place | None:
    """The line of a backward's function that divides by a `numel()`."""
    tree = None if backward is None else tree_of(backward.path)
    if tree is None or backward is None:
        return None
    for node in ast.walk(tree):
        by = node.right if isinstance(node, ast.BinOp) else getattr(node, "value", None)
        if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Div):
            continue
        if isinstance(by, ast.Call) and getattr(by.func, "attr", "") == "numel":
            place = Place(backward.path, node.lineno, function_of(backward.path, node))
            if place.function == backward.function:
                return place
    return None


def exchanges(place: Place | None) -> bool:
    """Whether a place's file sends tensors between ranks itself."""
    tree = None if place is None else tree_of(place.path)
    return any(
        isinstance(node, ast.Attribute | ast.Name)
        and str(getattr(node, "attr", getattr(node, "id", ""))).startswith(_SENDING)
        for node in (ast.walk(tree) if tree is not None else ())
    )


_SENDING = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "_flatten_dense")


def forward_of_module(backward: Place | None) -> Place | None:
    """The line of a backward's function that calls `something.module(...)`, nearest above it."""
    tree = None if backward is None else tree_of(backward.path)
    if tree is None or backward is None:
        return None
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (
            node.func.attr == "module"
            or (isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "module")
        )
        and node.lineno <= backward.line
        and function_of(backward.path, node) == backward.function
    ]
    return Place(backward.path, max(lines), backward.function) if lines else None


def turned_off(place: Place | None) -> Place | None:
    """The statement of a file that turns autograd off for good, if there is just one."""
    tree = None if place is None else tree_of(place.path)
    lines = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "attr", "") == "set_grad_enabled"
        and [getattr(one, "value", None) for one in node.value.args] == [False]
    ]
    if place is None or len(lines) != 1:
        return None
    return Place(place.path, lines[0].lineno, function_of(place.path, lines[0]))


def written_past(place: Place | None) -> Place | None:
    """The line of a place's function that writes to a `.data`, below the place."""
    tree = None if place is None else tree_of(place.path)
    for node in ast.walk(tree) if tree is not None else ():
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AugAssign) else targets
        found = any(isinstance(one, ast.Attribute) and one.attr == "data" for one in targets)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inner = node.func.value
            writes = node.func.attr.endswith("_") and not node.func.attr.startswith("_")
            found = writes and isinstance(inner, ast.Attribute) and inner.attr == "data"
        line = getattr(node, "lineno", 0)
        if found and place is not None and line > place.line:
            if function_of(place.path, node) == place.function:
                return Place(place.path, line, place.function)
    return None


def sends_gradient(place: Place | None) -> tuple[Place, bool] | None:
    """The line of a place's function that sums a `.grad` over the ranks.

    Also whether that function takes the mean of them: by the number of ranks, or by asking for it.
    """
    tree = None if place is None else tree_of(place.path)
    if tree is None or place is None:
        return None
    inside = [n for n in ast.walk(tree) if function_of(place.path, n) == place.function]
    for node in inside:
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        parts = [one for given in node.args for one in ast.walk(given)]
        gradient = any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in parts)
        if called.startswith("all_reduce") and gradient:
            mean = any("AVG" in ast.unparse(k.value) for k in node.keywords)
            mean = mean or "AVG" in ast.unparse(node)
            divided = any("world" in ast.unparse(n).lower() for n in inside if _by(n))
            return Place(place.path, node.lineno, place.function), mean or divided
    return None


def _by(node: ast.AST) -> bool:
    """Whether something divides, or multiplies in place."""
    if isinstance(node, ast.AugAssign | ast.BinOp):
        return isinstance(node.op, ast.Div | ast.Mult)
    called = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
    return called in ("div_", "mul_", "div")
