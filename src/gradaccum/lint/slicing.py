"""Which statements of a file can matter to a gradient, so that the rest is never walked."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gradaccum.lint.program import Module, Program

__all__ = ["CORE", "Slice", "slice_module"]

CORE = frozenset(
    {
        "accumulate", "backward", "clip_grad_norm", "clip_grad_norm_", "clip_grad_value_",
        "clip_gradients", "manual_backward", "no_backward_sync", "no_sync",
        "register_post_accumulate_grad_hook", "require_backward_grad_sync", "scale_loss", "step",
        "unscale_", "zero_grad",
    }
)  # fmt: skip
"""Names whose call makes a function worth walking."""

SIDE = frozenset(
    {
        "add_", "append", "data", "div_", "eval", "grad", "inference_mode", "load_state_dict",
        "mul_", "no_grad",
        "register_hook", "requires_grad", "requires_grad_", "set_grad_enabled", "sub_", "train",
        "update",
    }
)  # fmt: skip
"""Names that matter where a walk comes by, but do not call for one."""

PLAIN = frozenset({"accumulate", "append", "backward", "data", "eval", "step", "train", "update"})
"""Of these, the ones that people also call their variables: `step` alone is just a counter."""

_WORDS = CORE | SIDE
_NAMED = re.compile(r"opt(im\w*|s|_\w+)?(\[\w+\])?\.step\(", re.IGNORECASE)
_WRAPS = ("ddp", "distributeddataparallel")
_HEADERS: dict[type[ast.stmt], tuple[str, ...]] = {
    ast.If: ("test",),
    ast.While: ("test",),
    ast.For: ("target", "iter"),
    ast.AsyncFor: ("target", "iter"),
    ast.With: ("items",),
    ast.AsyncWith: ("items",),
    ast.Match: ("subject",),
    ast.Try: (),
}
_MODES = frozenset({"eval", "train"})
_BACKWARD = frozenset({"backward", "manual_backward"})
_NESTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEEP = 3
"""Assignments that are followed back from a training call: a loss, its terms, their models."""
_LEAVES = (ast.Break, ast.Continue, ast.Return)
_EXITS = (ast.Return, ast.Break, ast.Continue, ast.Raise, ast.Global, ast.Nonlocal)


@dataclass(slots=True, eq=False)
class _Row:
    node: ast.stmt
    targets: frozenset[str]
    names: frozenset[str]
    children: list[_Row]
    words: frozenset[str] = frozenset()
    """Names that may be a call that matters: all but the plain variables that share its name."""
    function: str = ""
    called: frozenset[str] = frozenset()
    """Names that may be functions of this file: bare ones, and attributes that are methods."""
    direct: frozenset[str] = frozenset()
    """Of these, the ones that are called right here."""
    method: bool = False


class Slice:
    """What of one file is walked, and which calls lie under each statement."""

    def __init__(self) -> None:
        self.keep: set[int] = set()
        self.bodies: dict[int, list[tuple[ast.stmt, Callable[..., str], bool]]] = {}
        """The kept statements of each body, each with what walks it; filled while walking."""
        self.mentions: dict[int, frozenset[str]] = {}
        self.functions: dict[str, frozenset[str]] = {}
        self.foreign: dict[str, frozenset[str]] = {}
        """Training functions of other given files, by the name they are called by here."""
        self.called: dict[int, frozenset[str]] = {}
        self.forks: set[int] = set()
        """`if` statements that bind what a training call is made of."""
        self.moduli: set[int] = set()
        """Window lengths that are written out."""
        self.named = False
        """Whether something called an optimizer steps in this file."""
        self.looped: set[str] = set()
        """Functions with a training loop of their own, or that call one that has."""


def slice_module(module: Module, program: Program | None = None) -> Slice:
    """Slice `module` backwards from its training calls, those in other given files included."""
    found = Slice()
    if program is not None:
        if module.path in program.slices:
            done = program.slices[module.path]
            assert isinstance(done, Slice)
            return done
        program.slices[module.path] = found  # also ends a circle of imports
        found.named = _NAMED.search(program.source(module.path)) is not None
        _import_foreign(module, program, found)
    rows: list[_Row] = []
    top = [_row(node, rows, "") for node in module.tree.body]
    _mark_wrapped(rows)
    calls = _function_calls(rows, found)
    for row in top:
        _mention(row, found, calls)
    _find_looped(rows, found)
    needed = _needed(rows, found)
    beside = {id(row): bool(row.names & needed) for row in rows}
    for row in rows:
        if (found.mentions[id(row.node)] or _adds(row.node)) and beside[id(row)]:
            needed |= row.names
    for row in reversed(rows):  # children come after their parents
        mentioned = found.mentions[id(row.node)]
        wanted = (
            isinstance(row.node, (*_EXITS, *_NESTS, ast.Import, ast.ImportFrom))
            or bool(row.targets & needed)
            or bool(mentioned & CORE)
            or (bool(mentioned) and beside[id(row)])
            or (bool(mentioned & _MODES) and bool(row.called))
            or "grad" in mentioned
            or (beside[id(row)] and _adds(row.node))
            or any(id(child.node) in found.keep for child in row.children)
        )
        if wanted:
            found.keep.add(id(row.node))
    _keep_handed_in(rows, found)
    _keep_means(rows, found)
    _find_forks(rows, found)
    _find_moduli(module, found)
    return found


def _mark_wrapped(rows: list[_Row]) -> None:
    """Mark where a model is wrapped for several ranks."""
    every: set[str] = set()
    for row in rows:
        every |= row.names
    wraps = {name for name in every if name.lower().endswith(_WRAPS)}
    for row in rows if wraps else ():
        if row.names & wraps:
            row.words |= {"ddp"}


def _keep_handed_in(rows: list[_Row], found: Slice) -> None:
    """Keep the calls of functions that a training function was given: they may do anything."""
    given: dict[str, set[str]] = {}
    for row in rows:
        if isinstance(row.node, ast.FunctionDef) and found.functions.get(row.node.name):
            given[row.node.name] = {arg.arg for arg in row.node.args.args}
    for row in rows:
        if isinstance(row.node, ast.Expr) and isinstance(row.node.value, ast.Call):
            func = row.node.value.func
            if isinstance(func, ast.Name) and func.id in given.get(row.function, ()):
                found.keep.add(id(row.node))


def _keep_means(rows: list[_Row], found: Slice) -> None:
    """Keep what divides a running sum of losses: a mean for the log."""
    sums = {name for row in rows if _adds(row.node) and "item" in row.names for name in row.targets}
    used: set[str] = set()
    for row in rows if sums else ():
        if row.names & sums and not row.children and not _adds(row.node):
            for node in ast.walk(row.node):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                    found.keep.add(id(row.node))
                    used |= row.names
    stack = [row for row in rows if used & row.targets]
    for row in stack:
        found.keep.add(id(row.node))


def _find_moduli(module: Module, found: Slice) -> None:
    names: set[str] = set()
    assigned: list[ast.Assign | ast.AnnAssign] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            if isinstance(node.right, ast.Constant) and isinstance(node.right.value, int):
                found.moduli.add(node.right.value)
            elif isinstance(node.right, (ast.Name, ast.Attribute)):
                names.add(getattr(node.right, "id", getattr(node.right, "attr", "")))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            assigned.append(node)
    for node in assigned if names else ():
        if node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            pairs = [(target, node.value) for target in targets]
            if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(targets[0].elts, node.value.elts, strict=False))
            for target, value in pairs:
                name = getattr(target, "id", getattr(target, "attr", ""))
                if name in names and isinstance(value, ast.Constant):
                    if isinstance(value.value, int) and value.value > 1:
                        found.moduli.add(value.value)
    found.moduli.discard(0)


def _find_forks(rows: list[_Row], found: Slice) -> None:
    hot: set[str] = set()
    for row in rows:
        own = row.names | row.targets
        if row.words & CORE and not isinstance(row.node, _NESTS):
            hot |= own
    for _ in range(2):  # a loss may be scaled under another name before its backward
        first = set(hot)
        for row in rows:
            if row.targets & first and not isinstance(row.node, _NESTS):
                hot |= row.names

    def binds(row: _Row) -> bool:
        return any(
            child.targets & hot or isinstance(child.node, ast.Return) or binds(child)
            for child in row.children
        )

    for row in rows:
        if isinstance(row.node, ast.If) and id(row.node) in found.keep and binds(row):
            found.forks.add(id(row.node))


def _adds(node: ast.stmt) -> bool:
    """Whether a statement adds to a name: a counter, or a running loss."""
    if isinstance(node, ast.AugAssign):
        return True
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.BinOp):
        return False
    left, target = node.value.left, node.targets[0]
    return isinstance(left, ast.Name) and isinstance(target, ast.Name) and left.id == target.id


def _row(node: ast.stmt, rows: list[_Row], function: str, owner: bool = False) -> _Row:
    row = _Row(node, frozenset(), frozenset(), [], function=function)
    rows.append(row)
    if isinstance(node, _NESTS):
        heads: list[ast.AST] = list(node.decorator_list)
        inner = node.name
    else:
        fields = _HEADERS.get(type(node))
        if fields is None:
            heads = [node]
        else:
            heads = []
            for name in fields:
                value = getattr(node, name)
                heads.extend(value if isinstance(value, list) else [value])
        inner = function
    targets, names, spoken = _identifiers(heads)
    row.targets, row.names = frozenset(targets), frozenset(names)
    row.words = (row.targets | row.names) & _WORDS
    if row.words & PLAIN:
        row.words -= PLAIN - spoken
    row.method = isinstance(node, ast.FunctionDef) and owner
    for name in ("body", "orelse", "finalbody"):
        for child in getattr(node, name, None) or ():
            if isinstance(child, ast.stmt):
                row.children.append(_row(child, rows, inner, isinstance(node, ast.ClassDef)))
    for handler in getattr(node, "handlers", ()):
        row.children.extend(_row(child, rows, inner) for child in handler.body)
    for case in getattr(node, "cases", ()):
        row.children.extend(_row(child, rows, inner) for child in case.body)
    return row


def _identifiers(heads: list[ast.AST]) -> tuple[set[str], set[str], set[str]]:
    """Names that are bound, names that are read, and those that are attributes or are called."""
    targets: set[str] = set()
    names: set[str] = set()
    spoken: set[str] = set()
    stack = list(heads)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name):
            (names if isinstance(node.ctx, ast.Load) else targets).add(node.id)
        elif isinstance(node, ast.Attribute):
            (names if isinstance(node.ctx, ast.Load) else targets).add(node.attr)
            spoken.add(node.attr)
            stack.append(node.value)
            continue
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                spoken.add(node.func.id)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            inner = node.value
            while isinstance(inner, ast.Subscript):
                inner = inner.value
            if isinstance(inner, ast.Name):
                targets.add(inner.id)
            elif isinstance(inner, ast.Attribute):
                targets.add(inner.attr)
        elif isinstance(node, ast.AugAssign):
            names.update(_identifiers([_loaded(node.target)])[1])
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            continue
        stack.extend(ast.iter_child_nodes(node))
    return targets, names, spoken


def _loaded(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    return target


def _import_foreign(module: Module, program: Program, found: Slice) -> None:
    """Note which imported functions, or methods of imported classes, train."""
    for name, dotted in module.imports.items():
        target = program.resolve(dotted, module.path)
        if target is None or target[0] is module:
            continue
        other, rest = target
        theirs = slice_module(other, program)
        if rest in theirs.functions:
            spelled = {name: rest}
        elif not rest:
            spelled = {own: own for own in theirs.functions}
        else:
            home = other.functions.get(rest)
            body = home.body if isinstance(home, ast.ClassDef) else []
            methods = [node.name for node in body if isinstance(node, ast.FunctionDef)]
            spelled = {own: own for own in methods if own in theirs.functions}
        for local, own in spelled.items():
            if theirs.functions[own]:
                found.foreign[local] = found.foreign.get(local, frozenset()) | theirs.functions[own]
                if own in theirs.looped:
                    found.looped.add(local)


def _function_calls(rows: list[_Row], found: Slice) -> dict[str, frozenset[str]]:
    own: dict[str, set[str]] = {}
    uses: dict[str, set[str]] = {}
    for row in rows:
        if isinstance(row.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own.setdefault(row.node.name, set())
            uses.setdefault(row.node.name, set())
    methods = {row.node.name for row in rows if row.method}  # type: ignore[attr-defined]
    for name, events in found.foreign.items():
        own.setdefault(name, set()).update(events)
        methods.add(name)
    for row in rows:
        row.called, row.direct = _called(row, own.keys(), methods)
        if row.function in own:
            own[row.function].update(row.words & (CORE | _MODES))
            uses[row.function].update(row.called)
    changed = True
    while changed:
        changed = False
        for name, called in uses.items():
            before = len(own[name])
            for other in called:
                own[name] |= own[other]
            changed |= len(own[name]) != before
    events_by_name = {name: frozenset(events) for name, events in own.items()}
    found.functions = {name: events_by_name[name] for name in uses}
    return events_by_name


def _called(
    row: _Row, functions: Collection[str], methods: set[str]
) -> tuple[frozenset[str], frozenset[str]]:
    named = row.names.intersection(functions)
    if not named:
        return frozenset(), frozenset()
    head = row.node
    if isinstance(head, _NESTS):
        return frozenset(named & methods), frozenset()
    parts = (
        [getattr(head, name) for name in _HEADERS[type(head)]] if type(head) in _HEADERS else [head]
    )
    bare: set[str] = set()
    direct: set[str] = set()
    for part in parts:
        for item in part if isinstance(part, list) else [part]:
            for node in ast.walk(item):
                if isinstance(node, ast.Name):
                    bare.add(node.id)
                elif isinstance(node, ast.Call):
                    direct.add(_callee(node))
    maybe = frozenset(name for name in named if name in bare or name in methods)
    return maybe, maybe & direct


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


def _mention(row: _Row, found: Slice, calls: dict[str, frozenset[str]]) -> frozenset[str]:
    events = set(row.words)
    for name in row.called:
        events |= calls[name]
    nested = isinstance(row.node, _NESTS)
    for child in row.children:
        inner = _mention(child, found, calls)
        if not nested:
            events |= inner
    found.mentions[id(row.node)] = frozenset(events)
    return found.mentions[id(row.node)]


def _find_looped(rows: list[_Row], found: Slice) -> None:
    uses: dict[str, set[str]] = {}
    for row in rows:
        loop = isinstance(row.node, (ast.For, ast.While, ast.AsyncFor))
        if loop and row.function and found.mentions[id(row.node)] & _BACKWARD:
            found.looped.add(row.function)
        if row.function:
            uses.setdefault(row.function, set()).update(row.direct)
        found.called[id(row.node)] = row.direct
    changed = True
    while changed:
        more = {name for name, called in uses.items() if called & found.looped} - found.looped
        found.looped |= more
        changed = bool(more)


def _needed(rows: list[_Row], found: Slice) -> set[str]:
    needed: set[str] = set()
    for row in rows:
        leaves = any(isinstance(child.node, _LEAVES) for child in row.children)
        if found.mentions[id(row.node)] & CORE or leaves:
            needed |= row.names
    waiting = rows
    for _ in range(_DEEP):
        more: set[str] = set()
        left: list[_Row] = []
        for row in waiting:
            wanted = (
                row.function in needed
                if isinstance(row.node, ast.Return)
                else bool(row.targets & needed)
                or any(child.targets & needed for child in row.children)
            )
            if wanted:
                more |= row.names
            else:
                left.append(row)
        if more <= needed:
            break
        needed |= more
        waiting = left
    return needed
