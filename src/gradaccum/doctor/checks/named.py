"""What the source calls things by: epochs, limits, rewards, parameters that are made or moved."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.doctor.checks.origin import unrecorded
from gradaccum.doctor.checks.source import above_of, function_of, statement, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = [
    "attacks",
    "batches_of_several",
    "counts_epochs",
    "counts_to",
    "gated_beside",
    "in_plain_list",
    "limit_is_scaled",
    "made_in_forward",
    "masked_mean",
    "moved_in_init",
    "never_restored",
    "rewards",
    "values_of",
    "waits_for",
]

_MOVES = ("to", "cuda", "cpu", "double", "float", "half", "bfloat16", "type")
_LENGTHS = ("step_size", "T_max", "total_iters", "T_0")


def _name(node: ast.AST | None) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _calls(node: ast.AST | None) -> Iterator[ast.Call]:
    for one in ast.walk(node) if node is not None else ():
        if isinstance(one, ast.Call):
            yield one


def values_of(path: str, name: str) -> list[ast.expr]:
    """What a file gives a name, also as one of several."""
    tree = tree_of(path) if name else None
    found: list[ast.expr] = []
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            else:
                pairs = [(target, node.value)]
            found += [value for one, value in pairs if _name(one) == name]
    return found


def limit_is_scaled(clip: Place | None) -> bool:
    """Whether what a clip limits to is itself made of the loss scale."""
    node = statement(clip)
    for call in _calls(node):
        if clip is None or not _name(call.func).startswith("clip_grad"):
            continue
        given = [*call.args[1:], *(one.value for one in call.keywords)]
        names = {_name(one) for part in given for one in ast.walk(part)} - {""}
        given += [value for name in sorted(names) for value in values_of(clip.path, name)]
        if any("scale" in _name(one) for part in given for one in ast.walk(part)):
            return True
    return False


def counts_to(condition: Place | None) -> int:
    """The number that a condition takes a remainder by, where it is known; else 0."""
    node = next((n for n in above_of(condition) if isinstance(n, ast.If)), None)
    mods = [
        one.right
        for one in (ast.walk(node.test) if node is not None else ())
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)
    ]
    if len(mods) != 1 or condition is None:
        return 0
    by = mods[0]
    values = [by] if isinstance(by, ast.Constant) else values_of(condition.path, _name(by))
    numbers = {getattr(value, "value", None) for value in values}
    number = numbers.pop() if len(numbers) == 1 else None
    return number if isinstance(number, int) else 0


def counts_epochs(made: Place | None, step: Place | None, count: int) -> str:
    """The number of epochs that a schedule is made of, where it steps within each epoch.

    The length is the bound of the outer loop, or a part of it, `StepLR(sgd, epochs // 3)`, with
    nothing to multiply it by; and the step stands in a loop within that one. It must be known to
    make more of its `count` steps than there are epochs: by the bound's number, or by a loop over
    data in which nothing is asked first.
    """
    loops = [node for node in above_of(step) if isinstance(node, ast.For | ast.While)]
    if made is None or step is None or len(loops) < 2 or not isinstance(loops[1], ast.For):
        return ""
    bounds = {
        ast.unparse(argument)
        for outer in loops[1:]
        for call in (_calls(outer.iter) if isinstance(outer, ast.For) else ())
        if _name(call.func) in ("range", "trange")
        for argument in call.args
        if isinstance(argument, ast.Name | ast.Attribute)
    }
    for call in _calls(statement(made)):
        lengths = [one.value for one in call.keywords if one.arg in _LENGTHS]
        if _name(call.func) in ("StepLR", "CosineAnnealingLR", "MultiStepLR"):
            lengths += call.args[1:2]
            lengths += [one.value for one in call.keywords if one.arg == "milestones"]
        for length in lengths:
            parts = length.elts if isinstance(length, ast.List | ast.Tuple) else [length]
            for part in parts:
                if isinstance(part, ast.Call) and _name(part.func) == "int" and part.args:
                    part = part.args[0]
                if isinstance(part, ast.BinOp) and _shrinks(part):
                    part = part.right if isinstance(part.left, ast.Constant) else part.left
                if ast.unparse(part) in bounds and _more(part, loops[0], step, count):
                    return ast.unparse(length)
    return ""


def _more(bound: ast.expr, loop: ast.AST, step: Place, count: int) -> bool:
    """Whether there are more steps than the bound of the outer loop says."""
    values = values_of(step.path, _name(bound))
    numbers = [one.value for one in values if isinstance(one, ast.Constant)]
    if len(values) == len(numbers) == 1 and isinstance(numbers[0], int):
        return count >= 2 * numbers[0]
    over = ast.unparse(loop.iter).lower() if isinstance(loop, ast.For) else ""
    asked = any(isinstance(node, ast.If) for node in _up_to(above_of(step), loop))
    return not asked and any(word in over for word in ("load", "data", "batch"))


def _shrinks(part: ast.BinOp) -> bool:
    """Whether an expression is a part of something, as `epochs // 2` and `0.5 * epochs` are."""
    if isinstance(part.op, ast.FloorDiv | ast.Div):
        return isinstance(part.right, ast.Constant)
    numbers = [one.value for one in (part.left, part.right) if isinstance(one, ast.Constant)]
    return isinstance(part.op, ast.Mult) and any(
        isinstance(one, float) and 0 < one < 1 for one in numbers
    )


def attacks(backward: Place | None, step: Place | None) -> bool:
    """Whether a backward is a helper's that makes an input of a gradient's sign or direction.

    The helper reads the gradient of what it has made to ask for one, changes nothing but that, and
    returns something. Its step is elsewhere.
    """
    if backward is None or step is None or backward.function in ("<module>", step.function):
        return False
    around = above_of(backward)
    helper = around[-1] if around else None
    if not isinstance(helper, ast.FunctionDef):
        return False
    asks = {
        target.id
        for node in ast.walk(helper)
        if isinstance(node, ast.Assign)
        and any(
            (isinstance(one, ast.keyword) and one.arg == "requires_grad")
            or _name(one) == "requires_grad_"
            for one in ast.walk(node.value)
        )
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(helper):
        if isinstance(node, ast.Assign) and _name(node.targets[0]) == "requires_grad":
            asks.add(_name(getattr(node.targets[0], "value", None)))
        if isinstance(node, ast.Call) and _name(node.func) == "requires_grad_":
            asks.add(_name(getattr(node.func, "value", None)))
    made = _made_of_gradients(helper, asks)
    losses = {
        getattr(call.func.value, "id", "")
        for call in _calls(helper)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
    } - {""}
    given = [n.value for n in ast.walk(helper) if isinstance(n, ast.Return) and n.value is not None]
    names = [{one.id for one in ast.walk(v) if isinstance(one, ast.Name)} for v in given]
    own = given and all(
        (one & made or _reads(value, asks)) and not one & losses
        for one, value in zip(names, given, strict=True)
    )
    return bool(own) and not any(_name(call.func) == "step" for call in _calls(helper))


def _reads(node: ast.AST, names: set[str]) -> bool:
    """Whether something reads the gradient of one of the names."""
    return any(
        isinstance(one, ast.Attribute) and one.attr == "grad" and _name(one.value) in names
        for one in ast.walk(node)
    )


def _made_of_gradients(helper: ast.FunctionDef, asks: set[str]) -> set[str]:
    """Names of a function that are made of the gradient of what asked for one."""
    found: set[str] = set()
    before = -1
    while len(found) != before:
        before = len(found)
        for node in ast.walk(helper):
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
                if names & found or _reads(node.value, asks):
                    found |= {_name(one) for one in targets} - {""}
    return found


def rewards(backward: Place | None, loss: str) -> Place | None:
    """The line on which a log-probability is multiplied by something that keeps its graph.

    Args:
        backward: of the loss; its function is searched.
        loss: its name.
    """
    around = above_of(backward)
    scope: ast.AST | None = around[-1] if around else None
    if backward is not None and not isinstance(scope, ast.FunctionDef):
        scope = tree_of(backward.path)
    if scope is None or backward is None:
        return None
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign) or not any(_name(t) == loss for t in node.targets):
            continue
        for one in ast.walk(node.value):
            if not isinstance(one, ast.BinOp) or not isinstance(one.op, ast.Mult):
                continue
            for chance, gain in ((one.left, one.right), (one.right, one.left)):
                names = {_name(part) for part in ast.walk(chance)}
                sure = any("log_p" in name or "logp" in name for name in names)
                if sure and _live(gain, backward.path, set()):
                    return Place(backward.path, node.lineno, backward.function)
    return None


def _live(gain: ast.expr, path: str, seen: set[str]) -> bool:
    """Whether a value comes from a call, and nothing on its way leaves the graph."""
    if any(_name(one) in ("detach", "item", "data", "numpy") for one in ast.walk(gain)):
        return False
    names = {one.id for one in ast.walk(gain) if isinstance(one, ast.Name)} - seen
    seen |= names
    called = any(not isinstance(call.func, ast.Attribute) for call in _calls(gain))
    called = called or any(getattr(call.func, "attr", "") == "forward" for call in _calls(gain))
    chain = [value for name in sorted(names) for value in values_of(path, name)]
    if any(unrecorded(Place(path, value.lineno, "")) for value in chain):
        return False
    lives = [_live(value, path, seen) for value in chain]
    cuts = [one for one, value in zip(lives, chain, strict=True) if not one and _leaves(value)]
    return not cuts and (called or any(lives))


def _leaves(value: ast.expr) -> bool:
    return any(_name(one) in ("detach", "item", "data", "numpy") for one in ast.walk(value))


def in_plain_list(path: str) -> Place | None:
    """The line `self.x = [nn.Parameter(...), ...]` of a file, if there is just one."""
    tree, found = tree_of(path), []
    for node in ast.walk(tree) if tree is not None else ():
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.List | ast.ListComp | ast.Dict | ast.DictComp):
            made = any(_name(call.func) == "Parameter" for call in _calls(value))
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if made and isinstance(target, ast.Attribute) and _name(target.value) == "self":
                found.append(Place(path, value.lineno, function_of(path, value)))
        if isinstance(node, ast.Call) and _name(node.func) == "append" and node.args:
            owner = getattr(node.func, "value", None)
            made = isinstance(node.args[0], ast.Call) and _name(node.args[0].func) == "Parameter"
            if made and isinstance(owner, ast.Attribute) and _name(owner.value) == "self":
                lists = [v for v in values_of(path, owner.attr) if isinstance(v, ast.List)]
                if lists and len(lists) == len(values_of(path, owner.attr)):
                    found.append(Place(path, node.lineno, function_of(path, node)))
    return found[0] if len(found) == 1 else None


def made_in_forward(path: str) -> Place | None:
    """The line of a file's `forward` that makes a new parameter, if there is just one."""
    tree = tree_of(path)
    found = [
        Place(path, call.lineno, "forward")
        for call in _calls(tree)
        if _name(call.func) == "Parameter" and function_of(path, call) == "forward"
    ]
    return found[0] if len(found) == 1 else None


def moved_in_init(path: str) -> Place | None:
    """The line `self.x = nn.Parameter(...).to(...)`, which keeps what the move gave."""
    tree, found = tree_of(path), []
    for node in ast.walk(tree) if tree is not None else ():
        value = node.value if isinstance(node, ast.Assign) else None
        if not isinstance(node, ast.Assign) or not isinstance(value, ast.Call):
            continue
        inner: ast.AST = value
        while isinstance(inner, ast.Call) and _name(inner.func) in _MOVES:
            inner = getattr(inner.func, "value", ast.Constant(0))
        moved = inner is not value and isinstance(inner, ast.Call)
        if moved and _name(getattr(inner, "func", None)) == "Parameter":
            if isinstance(node.targets[0], ast.Attribute):
                found.append(Place(path, node.lineno, function_of(path, node)))
    return found[0] if len(found) == 1 else None


def waits_for(backward: Place | None) -> tuple[Place, int] | None:
    """The condition, beside a backward, that a step stands under, and what it counts to.

    Only a remainder, by a number or a name that the file gives one number.
    """
    loop = next((n for n in above_of(backward) if isinstance(n, ast.For | ast.While)), None)
    if loop is None or backward is None:
        return None
    for node in ast.walk(loop):
        if not isinstance(node, ast.If) or not any(_steps(part) for part in node.body):
            continue
        tests = [t for t in ast.walk(node.test) if isinstance(t, ast.BinOp)]
        mods = [t for t in tests if isinstance(t.op, ast.Mod)]
        if len(mods) != 1 or isinstance(node.test, ast.BoolOp) or node.orelse:
            continue
        by = mods[0].right
        values = [by] if isinstance(by, ast.Constant) else values_of(backward.path, _name(by))
        numbers = {v.value for v in values if isinstance(v, ast.Constant)}
        if len(values) == 1 and len(numbers) == 1:
            number = numbers.pop()
            if isinstance(number, int) and number > 1:
                return Place(backward.path, node.test.lineno, backward.function), number
    return None


def _steps(node: ast.AST) -> bool:
    return any(
        _name(call.func) == "step" and isinstance(call.func, ast.Attribute) for call in _calls(node)
    )


def gated_beside(step: Place | None, number: int) -> Place | None:
    """The condition, in a step's loop and above it, that counts to a number and clips or clears.

    The step itself is under no condition there.
    """
    around = above_of(step)
    loop = next((n for n in around if isinstance(n, ast.For | ast.While)), None)
    if loop is None or step is None or any(isinstance(n, ast.If) for n in _up_to(around, loop)):
        return None
    for node in ast.walk(loop):
        if not isinstance(node, ast.If) or node.lineno > step.line:
            continue
        mods = [
            t.right
            for t in ast.walk(node.test)
            if isinstance(t, ast.BinOp) and isinstance(t.op, ast.Mod)
        ]
        called = {_name(call.func) for part in node.body for call in _calls(part)}
        if len(mods) != 1 or not any(name.startswith("clip_grad") for name in called):
            continue
        if any("inf" in ast.unparse(part) for part in node.body):
            continue  # it measures
        values = [mods[0], *values_of(step.path, _name(mods[0]))]
        if any(isinstance(v, ast.Constant) and v.value == number for v in values):
            return Place(step.path, node.test.lineno, step.function)
    return None


def _up_to(around: list[ast.AST], loop: ast.AST) -> list[ast.AST]:
    return around[: around.index(loop)]


_AVERAGES = ("copy_to", "apply_shadow")


def never_restored(written: Place) -> Place | None:
    """The call that puts averaged weights into a model, after its own are stored for good.

    Args:
        written: where weights were written: in `copy_to` itself, or at its call.
    """
    tree = tree_of(written.path)
    put = [call for call in _calls(tree) if _name(call.func) in _AVERAGES]
    kept = {
        (_owner(call), function_of(written.path, call))
        for call in _calls(tree)
        if _name(call.func) == "store"
    }
    if any(_name(call.func) == "restore" for call in _calls(tree)):
        return None
    for call in put:
        function = function_of(written.path, call)
        here = written.function in _AVERAGES or written.line == call.lineno
        if here and (_owner(call), function) in kept:
            return Place(written.path, call.lineno, function)
    return None


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def masked_mean(backward: Place) -> Place | None:
    """The line of a file that takes the mean of a product with a mask, if there is just one."""
    found = []
    for call in _calls(tree_of(backward.path)):
        inner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if _name(call.func) != "mean" or not isinstance(inner, ast.BinOp) or call.args:
            continue
        if isinstance(inner.op, ast.Mult) and any(
            "mask" in _name(part) for part in (inner.left, inner.right)
        ):
            function = function_of(backward.path, call)
            found.append(Place(backward.path, call.lineno, function))
    return found[0] if len(found) == 1 else None


def batches_of_several(path: str) -> bool:
    """Whether all of a file's loaders are told a batch size, and none that it may be one."""
    sizes = [
        [one.value for one in call.keywords if one.arg == "batch_size"] or call.args[1:2]
        for call in _calls(tree_of(path))
        if _name(call.func) == "DataLoader"
    ]
    return bool(sizes) and all(size and _many(path, size[0]) for size in sizes)


def _many(path: str, size: ast.expr) -> bool:
    values = [size] if isinstance(size, ast.Constant) else values_of(path, _name(size))
    known = [one.value for one in values if isinstance(one, ast.Constant)]
    return len(known) == len(values) > 0 and all(isinstance(n, int) and n > 1 for n in known)
