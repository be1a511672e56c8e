"""What the source says around a line that the trace names; for questions that a run leaves open."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from gradaccum.doctor.trace.model import Place

__all__ = [
    "asks",
    "clips",
    "divided_late",
    "divides_by_all",
    "gate_counts",
    "gate_divides",
    "gated",
    "hook_function",
    "keeps",
    "lines_that",
    "microbatches",
    "overwrites",
    "rebinds",
    "same_loop",
    "scales_its_argument",
    "squares_gradient",
    "statement",
]

_MOST = 2_000_000


def _tree(path: str) -> ast.Module | None:
    try:
        about = Path(path).stat()
    except (OSError, ValueError):
        return None
    return None if about.st_size > _MOST else _parsed(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=64)
def _parsed(path: str, changed: int, size: int) -> ast.Module | None:
    """A file's tree; a file that has changed since is another."""
    del changed, size
    try:
        return ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=64)
def _above_of(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _parents(path: str) -> dict[ast.AST, ast.AST]:
    tree = _tree(path)
    return {} if tree is None else _above_of(tree)


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


def gate_divides(step: Place | None, backward: Place | None, number: int | None) -> bool:
    """Whether the source divides by what the condition of a step counts to.

    Args:
        step: the line of the update.
        backward: that of the backward; its file is searched for the division.
        number: what the loss is divided by, which a literal has to be; `None` for a name only.
    """
    tree = None if backward is None else _tree(backward.path)
    if tree is None or step is None:
        return False
    divisors = {
        _last_name(node.value if isinstance(node, ast.AugAssign) else node.right)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)
    }
    for place in _reached(step):
        for node in _above(place):
            for one in ast.walk(node.test) if isinstance(node, ast.If) else ():
                if not isinstance(one, ast.BinOp) or not isinstance(one.op, ast.Mod):
                    continue
                if isinstance(one.right, ast.Constant):
                    if number is not None and one.right.value == number:
                        return True
                elif _last_name(one.right) in divisors:
                    return True
    return False


def _last_name(node: ast.AST) -> str:
    """`every` of `every` and of `self.every`; anything else as it is written."""
    return str(getattr(node, "attr", getattr(node, "id", ""))) or ast.dump(node)


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
        and any(
            isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(above.test)
        )
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


def asks(place: Place | None, name: str) -> Place | None:
    """The line of a place's file that asks for the gradient of a name."""
    tree = None if place is None or not name.isidentifier() else _tree(place.path)
    if tree is None or place is None:
        return None
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
            return Place(place.path, getattr(node, "lineno", 0), _function(place.path, node))
    return None


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
    loop = _loop(backward)
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
    """A line after a backward that keeps its loss: adds it to a total, or to a list."""
    node = statement(backward)
    loop = _loop(backward)
    name = _receiver(node)
    if backward is None or loop is None or not name:
        return None
    for other in ast.walk(loop):
        value = other.value if isinstance(other, ast.AugAssign | ast.Assign) else None
        kept = isinstance(value, ast.Name) and value.id == name and isinstance(other, ast.AugAssign)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            kept = isinstance(value.right, ast.Name) and value.right.id == name
        if isinstance(other, ast.Call) and isinstance(other.func, ast.Attribute):
            added = other.func.attr in ("append", "extend", "add", "put")
            kept = added and any(isinstance(a, ast.Name) and a.id == name for a in other.args)
        if kept:
            return Place(backward.path, getattr(other, "lineno", 0), backward.function)
    return None


def _receiver(node: ast.stmt | None) -> str:
    """The name that a statement calls `backward` of."""
    for one in ast.walk(node) if node is not None else ():
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
            if one.func.attr == "backward":
                inner: ast.AST = one.func.value
                if isinstance(inner, ast.Name) and one.args and isinstance(one.args[0], ast.Name):
                    return one.args[0].id  # accelerator.backward(loss)
                while isinstance(inner, ast.Call | ast.BinOp):
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
    tree = None if place is None else _tree(place.path)
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
    """A line `p = p - rate * p.grad` in a loop over parameters."""
    tree = _tree(backward.path)
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        for one in ast.walk(node):
            value = one.value if isinstance(one, ast.Assign) else None
            if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Sub | ast.Add):
                continue
            same = any(
                isinstance(t, ast.Name) and t.id == name for t in getattr(one, "targets", ())
            )
            used = any(
                isinstance(part, ast.Attribute)
                and part.attr == "grad"
                and isinstance(part.value, ast.Name)
                and part.value.id == name
                for part in ast.walk(value)
            )
            if same and used:
                return Place(
                    backward.path, getattr(one, "lineno", 0), _function(backward.path, one)
                )
    return None


def squares_gradient(place: Place | None, names: set[str], *, all_of_them: bool) -> Place | None:
    """A line of a place's file that sums the squares of gradients as they are.

    Args:
        place: its file is searched.
        names: whose gradients are complex.
        all_of_them: whether all gradients are, so that the name does not matter.
    """
    tree = None if place is None else _tree(place.path)
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
                return Place(place.path, gradient.lineno, _function(place.path, gradient))
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
    tree = None if backward is None else _tree(backward.path)
    if tree is None or backward is None:
        return None
    for node in ast.walk(tree):
        by = node.right if isinstance(node, ast.BinOp) else getattr(node, "value", None)
        if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Div):
            continue
        if isinstance(by, ast.Call) and getattr(by.func, "attr", "") == "numel":
            place = Place(backward.path, node.lineno, _function(backward.path, node))
            if place.function == backward.function:
                return place
    return None
