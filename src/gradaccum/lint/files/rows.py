"""The statements of a file, each with the names it binds, reads and calls: read in one pass."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from gradaccum.lint.files.program import Module

__all__ = [
    "CORE", "HEADERS", "NESTS", "PLAIN", "WORDS", "WRITES", "Row", "adds", "moduli_of", "rows_of",
]  # fmt: skip

CORE = frozenset(
    {
        "accumulate", "backward", "clip_grad_norm", "clip_grad_norm_", "clip_grad_value_",
        "clip_gradients", "manual_backward", "no_backward_sync", "no_sync",
        "register_post_accumulate_grad_hook", "require_backward_grad_sync", "scale_loss", "step",
        "unscale_", "zero_grad",
    }
)  # fmt: skip
"""Names whose call makes a function worth walking."""

WRITES = frozenset(
    {"_foreach_div_", "_foreach_mul_", "_foreach_zero_", "div_", "fill_", "mul_", "zero_"}
)
"""What clears or scales in place, once it is given a gradient."""

SIDE = frozenset(
    {
        "add_", "add_param_group", "append", "clamp_", "data", "eval", "extend", "grad",
        "inference_mode", "lerp_", "load_state_dict", "multiply_grads", "no_grad",
        "scale_gradients", "scale_grads", "register_hook", "register_optimizer_step_post_hook",
        "register_optimizer_step_pre_hook", "register_step_post_hook", "register_step_pre_hook",
        "requires_grad", "requires_grad_", "reset_parameters", "set_grad_enabled", "sub_", "train",
        "update", *WRITES,
    }
)  # fmt: skip
"""Names that matter where a walk comes by, but do not call for one."""

PLAIN = frozenset(
    {"accumulate", "append", "backward", "data", "eval", "extend", "step", "train", "update"}
)
"""Of these, the ones that people also call their variables: `step` alone is just a counter."""

WORDS = CORE | SIDE
_BY_NAME = frozenset({"delattr", "getattr", "methodcaller", "setattr"})
"""What is given the name of an attribute as a text."""
_PRIVATE = frozenset({"_backward", "_zero_grad"})
"""How an object calls functions of those names that it was given."""
HEADERS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.If: ("test",),
    ast.While: ("test",),
    ast.For: ("target", "iter"),
    ast.AsyncFor: ("target", "iter"),
    ast.With: ("items",),
    ast.AsyncWith: ("items",),
    ast.Match: ("subject",),
    ast.Try: (),
}
NESTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BODIES = {
    kind: tuple(name for name in ("body", "orelse", "finalbody") if name in kind._fields)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.stmt)
}
_PARTS: dict[type[ast.AST], tuple[str, ...]] = {
    kind: tuple(name for name in kind._fields if name not in ("ctx", "op", "ops"))
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST) and kind.__module__ in ("ast", "_ast")
}
"""Where names can lie below a node: not in what says how, such as operators."""


@dataclass(slots=True, eq=False)
class Row:
    """One statement."""

    node: ast.stmt
    function: str = ""
    """The function around it."""
    method: bool = False
    targets: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    """Names that may be a call that matters: all but the plain variables that share its name."""
    bare: frozenset[str] = frozenset()
    """Names that stand alone, not as an attribute."""
    calls: frozenset[str] = frozenset()
    """Names that are called."""
    yields: bool = False
    children: list[Row] = field(default_factory=list)
    called: frozenset[str] = frozenset()
    """Names that may be functions of this file: bare ones, and attributes that are methods."""
    direct: frozenset[str] = frozenset()
    """Of these, the ones that are called right here."""


class _Names:
    """The names in the head of one statement."""

    __slots__ = ("bare", "calls", "names", "spoken", "targets", "yields")

    def __init__(self) -> None:
        self.targets: set[str] = set()
        """Bound."""
        self.names: set[str] = set()
        """Read."""
        self.spoken: set[str] = set()
        """Attributes, or called."""
        self.bare: set[str] = set()
        self.calls: set[str] = set()
        self.yields = False


def rows_of(module: Module) -> tuple[list[Row], list[Row], list[ast.BinOp]]:
    """All statements, those at the top of the file, and every `a % b`."""
    rows: list[Row] = []
    moduli: list[ast.BinOp] = []
    top = [_row(node, rows, moduli, "", False) for node in module.tree.body]
    return rows, top, moduli


def _row(
    node: ast.stmt, rows: list[Row], moduli: list[ast.BinOp], function: str, owner: bool
) -> Row:
    row = Row(node, function, owner and isinstance(node, ast.FunctionDef))
    rows.append(row)
    if isinstance(node, NESTS):
        heads: list[ast.AST] = list(node.decorator_list)
        function = node.name
    else:
        fields = HEADERS.get(type(node))
        if fields is None:
            heads = [node]
        else:
            heads = []
            for name in fields:
                value = getattr(node, name)
                heads.extend(value if isinstance(value, list) else [value])
    found = _Names()
    _read(heads, found, moduli)
    row.targets, row.names = frozenset(found.targets), frozenset(found.names)
    row.bare, row.calls = frozenset(found.bare), frozenset(found.calls)
    row.yields = found.yields
    row.words = (row.targets | row.names) & WORDS
    if not row.names.isdisjoint(_PRIVATE):
        row.words |= {name[1:] for name in row.names & _PRIVATE}
    if row.words & PLAIN:
        row.words -= PLAIN - found.spoken
    children = row.children
    owns = isinstance(node, ast.ClassDef)
    for name in _BODIES[type(node)]:
        for child in getattr(node, name):
            children.append(_row(child, rows, moduli, function, owns))
    for handler in getattr(node, "handlers", ()):
        children.extend(_row(child, rows, moduli, function, False) for child in handler.body)
    for case in getattr(node, "cases", ()):
        children.extend(_row(child, rows, moduli, function, False) for child in case.body)
    return row


def _read(heads: list[ast.AST], found: _Names, moduli: list[ast.BinOp]) -> None:
    targets, names, spoken, bare = found.targets, found.names, found.spoken, found.bare
    stack = heads
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind is ast.Name:
            bare.add(node.id)  # type: ignore[attr-defined]
            (names if type(node.ctx) is ast.Load else targets).add(node.id)  # type: ignore[attr-defined]
            continue
        if kind is ast.Attribute:
            (names if type(node.ctx) is ast.Load else targets).add(node.attr)  # type: ignore[attr-defined]
            spoken.add(node.attr)  # type: ignore[attr-defined]
            if node.attr == "weight" and type(node.ctx) is not ast.Load:  # type: ignore[attr-defined]
                # a weight that is shared is part of what the layer is
                holder = node.value  # type: ignore[attr-defined]
                targets.add(getattr(holder, "id", getattr(holder, "attr", "weight")))
            stack.append(node.value)  # type: ignore[attr-defined]
            continue
        if kind is ast.Constant:
            continue
        if isinstance(node, ast.Call):
            found.calls.add(_callee(node))
            if isinstance(node.func, ast.Name):
                spoken.add(node.func.id)
            if _callee(node) in _BY_NAME:
                texts = {part.value for part in node.args
                         if isinstance(part, ast.Constant) and part.value in WORDS}  # fmt: skip
                names |= texts
                spoken |= texts
        elif isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Mod):
                moduli.append(node)
        elif isinstance(node, ast.JoinedStr):
            _read_quoted(node, found, moduli)
            continue
        elif isinstance(node, ast.Subscript):
            if not isinstance(node.ctx, ast.Load):
                _store_item(node, targets)
        elif isinstance(node, ast.AugAssign):
            _augmented(node.target, names)
        elif isinstance(node, (ast.Yield, ast.YieldFrom)):
            found.yields = True
        for name in _PARTS[kind]:
            value = getattr(node, name, None)
            if type(value) is list:
                stack.extend([part for part in value if isinstance(part, ast.AST)])
            elif isinstance(value, ast.AST):
                stack.append(value)


def _read_quoted(node: ast.JoinedStr, found: _Names, moduli: list[ast.BinOp]) -> None:
    """What stands in an f-string is shown and not kept: it is called, but binds nothing."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.bare.add(part.id)
        elif isinstance(part, ast.Call):
            found.calls.add(_callee(part))
        elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            moduli.append(part)


def _store_item(node: ast.Subscript, targets: set[str]) -> None:
    inner = node.value
    while isinstance(inner, ast.Subscript):
        inner = inner.value
    if isinstance(inner, ast.Name):
        targets.add(inner.id)
    elif isinstance(inner, ast.Attribute):
        targets.add(inner.attr)


def _augmented(target: ast.expr, names: set[str]) -> None:
    """`x += 1` reads `x` as well."""
    if isinstance(target, ast.Name):
        names.add(target.id)
    elif isinstance(target, ast.Attribute):
        names.add(target.attr)


def _callee(node: ast.Call) -> str:
    """The name of what is called; nothing if it is the method of some other object."""
    func = node.func
    if isinstance(func, ast.Name):
        return func.id
    if isinstance(func, ast.Attribute):
        own = isinstance(func.value, ast.Name) and func.value.id in ("self", "cls")
        # `model.train()` is no call of our own `train`, which may hold the loop
        return func.attr if own or func.attr not in PLAIN else ""
    return ""


def adds(node: ast.stmt) -> bool:
    """Whether a statement adds to a name: a counter, or a running loss."""
    if isinstance(node, ast.AugAssign):
        return True
    if not isinstance(node, ast.Assign) or not isinstance(node.value, (ast.BinOp, ast.IfExp)):
        return False
    if smooths(node):
        return True
    left, target = getattr(node.value, "left", None), node.targets[0]
    return isinstance(left, ast.Name) and isinstance(target, ast.Name) and left.id == target.id


def smooths(node: ast.Assign) -> bool:
    """Whether it is a moving average, `x = a * x + b * y` in either order; asked once."""
    known = node.__dict__.get("_smooths")
    if known is None:
        value = node.value
        arms = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
        name = _spelled(node.targets[0])
        known = node.__dict__["_smooths"] = bool(name) and any(
            name in (_spelled(term.left), _spelled(term.right))
            for arm in arms
            if isinstance(arm, ast.BinOp) and isinstance(arm.op, ast.Add)
            for term in (arm.left, arm.right)
            if isinstance(term, ast.BinOp) and isinstance(term.op, ast.Mult)
        )
    return bool(known)


def _spelled(node: ast.AST) -> str:
    """`name` or `holder.name`; anything else is empty."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def moduli_of(rows: list[Row], moduli: list[ast.BinOp]) -> set[int]:
    """Numbers that something is divided by for its rest, written there or assigned once."""
    found: set[int] = set()
    names: set[str] = set()
    for node in moduli:
        if isinstance(node.right, ast.Constant) and isinstance(node.right.value, int):
            found.add(node.right.value)
        elif isinstance(node.right, (ast.Name, ast.Attribute)):
            names.add(getattr(node.right, "id", getattr(node.right, "attr", "")))
    for row in rows if names else ():
        if row.targets.isdisjoint(names):
            continue
        node = row.node
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            pairs = [(target, node.value) for target in targets]
            if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(targets[0].elts, node.value.elts, strict=False))
            for target, value in pairs:
                name = getattr(target, "id", getattr(target, "attr", ""))
                if name in names and isinstance(value, ast.Constant):
                    if isinstance(value.value, int) and value.value > 1:
                        found.add(value.value)
    found.discard(0)
    return found
