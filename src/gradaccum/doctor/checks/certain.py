"""Lines of the source that must have run, and raised: what a trace alone does not show."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.doctor.checks.origin import made
from gradaccum.doctor.checks.patterns import receiver
from gradaccum.doctor.checks.source import above_of, function_of, parents, statement, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = [
    "adds_to_gradient",
    "divided_log",
    "divisor_of_gradient",
    "is_count",
    "logged_by_updates",
    "reads_gradients",
    "repeats",
    "thrown_away",
    "walked_twice",
]

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


_OUT_OF_PLACE = ("clamp", "clip", "mul", "add", "sub", "div", "clamp_min", "clamp_max", "neg")


def thrown_away(known: Place) -> tuple[Place, str] | None:
    """A line that computes a new value of each parameter, or of its gradient, and keeps it nowhere.

    Only in a loop over parameters that runs wherever a known line does.
    """
    tree = tree_of(known.path)
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.For) or not _module(node.iter):
            continue
        name = getattr(node.target, "id", "")
        for one in node.body:
            call = one.value if isinstance(one, ast.Expr) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            owner = call.func.value
            while isinstance(owner, ast.Attribute) and owner.attr in ("data", "grad"):
                owner = owner.value
            ours = isinstance(owner, ast.Name) and owner.id == name
            if ours and call.func.attr in _OUT_OF_PLACE and _sure(known.path, node, known):
                written = ast.unparse(call.func)
                return Place(known.path, one.lineno, known.function), written
    return None


def walked_twice(known: Place) -> tuple[Place, Place] | None:
    """A function that walks twice over what a line hands it as a generator: `model.parameters()`.

    Where the second walk begins, and the line, which runs wherever a known line does.
    """
    tree = tree_of(known.path)
    for function in ast.walk(tree) if tree is not None else ():
        if not isinstance(function, ast.FunctionDef):
            continue
        renewed = {
            getattr(target, "id", "")
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
        }
        for index, argument in enumerate(function.args.args):
            walks = sorted(
                node.lineno if isinstance(node, ast.For) else node.iter.lineno
                for node in ast.walk(function)
                if isinstance(node, ast.For | ast.comprehension)
                and getattr(node.iter, "id", "") == argument.arg
            )
            if len(walks) < 2 or argument.arg in renewed:
                continue
            for call in ast.walk(tree) if tree is not None else ():
                named = isinstance(call, ast.Call) and getattr(call.func, "id", "") == function.name
                if named and isinstance(call, ast.Call) and index < len(call.args):
                    if _module(call.args[index]) and _sure(known.path, call, known):
                        at = Place(known.path, call.lineno, known.function)
                        return Place(known.path, walks[1], function.name), at
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


def divided_log(backward: Place, step: Place) -> tuple[Place, Place] | None:
    """Where losses that were divided for their backward are summed, and divided by their number.

    Args:
        backward: of `loss`, which a line above divides.
        step: of the updates, under a condition in the loop.
    """
    name, lines = receiver(statement(backward), plain=True), made(backward)
    if not name or not lines or backward.path != step.path:
        return None
    (place, value), whole = lines[0], statement(lines[0][0])
    over = whole.op if isinstance(whole, ast.AugAssign) else getattr(value, "op", None)
    if not isinstance(over, ast.Div):
        return None
    micro, update = above_of(backward), above_of(step)
    gate = next((node for node in update if isinstance(node, ast.If) and node not in micro), None)
    loop = next((node for node in micro if isinstance(node, ast.For)), None)
    if gate is None or loop is None:
        return None
    inside = set(map(id, ast.walk(gate)))
    added = {
        node.target.id: node.lineno
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.op, ast.Add)
        and id(node) not in inside
        and node.lineno > place.line
        and _value_of(node.value) == name
    }
    scope = next((n for n in micro if isinstance(n, _FUNCTIONS)), tree_of(backward.path))
    for node in ast.walk(scope) if scope is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and id(node) not in inside:
            total = getattr(node.left, "id", "")
            if total in added and _counts_passes(node, loop, gate, backward.path):
                at = Place(backward.path, added[total], backward.function)
                return at, Place(backward.path, node.lineno, backward.function)
    return None


def _value_of(node: ast.expr) -> str:
    """`loss` of `loss.item()`, `loss.detach()` and `float(loss)`."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "detach"):
            return str(getattr(node.func.value, "id", ""))
        if getattr(node.func, "id", "") == "float" and len(node.args) == 1:
            return str(getattr(node.args[0], "id", ""))
    return ""


def _counts_passes(node: ast.BinOp, loop: ast.For, gate: ast.If, path: str) -> bool:
    """Whether a total is divided by the number of a loop's passes, or by what tests it for a log.

    The number is the loop's length, a count of its passes, or the remainder that a condition
    around the division is by.
    """
    by = node.right
    if isinstance(by, ast.Call) and getattr(by.func, "id", "") == "len" and len(by.args) == 1:
        iterated = {ast.unparse(one) for one in ast.walk(loop.iter) if isinstance(one, ast.expr)}
        return ast.unparse(by.args[0]) in iterated
    inside = set(map(id, ast.walk(gate)))
    counts = {
        ast.unparse(one.target)
        for one in ast.walk(loop)
        if isinstance(one, ast.AugAssign)
        and isinstance(one.op, ast.Add)
        and getattr(one.value, "value", None) == 1
        and id(one) not in inside
    }
    if ast.unparse(by) in counts:
        return True
    over = parents(path)
    found: ast.AST | None = node
    while found is not None and found is not loop:
        if isinstance(found, ast.If):
            for one in ast.walk(found.test):
                if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod):
                    return ast.unparse(one.right) == ast.unparse(by)
        found = over.get(found)
    return False


def divisor_of_gradient(place: Place | None) -> ast.expr | None:
    """What a line divides a gradient by, in place or by putting the quotient there."""
    node = statement(place)
    if isinstance(node, ast.AugAssign) and _gradient(node.target):
        return _divisor(node.op, node.value)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
        if _gradient(node.targets[0]) and _gradient(node.value.left):
            return _divisor(node.value.op, node.value.right)
    for call in ast.walk(node) if isinstance(node, ast.Expr) else ():
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        how = call.func.attr
        op: ast.operator = ast.Mult() if "mul" in how else ast.Div()
        if how in ("div_", "mul_", "true_divide_") and call.args:
            owner = call.func.value
            if isinstance(owner, ast.Attribute) and owner.attr == "data":
                owner = owner.value
            if _gradient(owner):
                return _divisor(op, call.args[0])
        if how in ("_foreach_div_", "_foreach_mul_") and len(call.args) == 2:
            return _divisor(op, call.args[1])
    return None


def _divisor(op: ast.operator, value: ast.expr) -> ast.expr | None:
    """`k` of a division by it, and of a multiplication by `1 / k`."""
    if isinstance(op, ast.Div):
        return value
    if isinstance(op, ast.Mult) and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        return value.right if getattr(value.left, "value", None) == 1 else None
    return None


def is_count(by: ast.expr, step: Place, count: int) -> bool:
    """Whether a divisor is the number of an update's micro-batches.

    A literal that is the number, a name that has it, or what the condition of the step counts to.
    """
    if isinstance(by, ast.Constant):
        return by.value == count
    written = ast.unparse(by)
    for node in above_of(step):
        for one in ast.walk(node.test) if isinstance(node, ast.If) else ():
            if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod):
                if ast.unparse(one.right) == written:
                    return True
    tree = tree_of(step.path)
    return any(
        isinstance(node, ast.Assign)
        and getattr(node.value, "value", None) == count
        and any(ast.unparse(target) == written for target in node.targets)
        for node in (ast.walk(tree) if tree is not None else ())
    )
