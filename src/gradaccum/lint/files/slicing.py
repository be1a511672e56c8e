"""Which statements of a file can matter to a gradient, so that the rest is never walked."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from copy import copy

from gradaccum.lint.files.program import Module, Program
from gradaccum.lint.files.rows import CORE, NESTS, WRITES, Row, adds, moduli_of, rows_of
from gradaccum.lint.files.unseen import UNSEEN, mark_unseen

__all__ = ["CORE", "Slice", "opened", "slice_module"]

_NAMED = re.compile(r"opt(im\w*|s|_\w+)?(\[\w+\])?\.step\(", re.IGNORECASE)
_WRAPS = ("ddp", "distributeddataparallel")
_MAKES = re.compile(
    r"optim|model|net$|ddp$|parallel|sched|scaler|accelerator|^eval$", re.IGNORECASE
)
"""What a function reads or binds that makes, wraps or evaluates what a loop trains."""
SHORT = 20
"""Statements up to which a function of another file is always read: a loss, a wrapper."""
_MODES = frozenset({"eval", "train"})
_CARRIED = CORE | _MODES | {"grad", UNSEEN}
"""What a function does that a call of it does as well."""
_ANEW = frozenset({"clamp_", "requires_grad", "requires_grad_", "reset_parameters"})
_QUIET = frozenset({"append", "data", "update"})
"""Words that do nothing to a gradient where no other is near."""
_READS = frozenset({"float", "item"})
"""What makes a number for a log of a loss."""
_BACKWARD = frozenset({"backward", "manual_backward"})
_DEEP = 3
"""Assignments that are followed back from a training call: a loss, its terms, their models."""
_LEAVES = (ast.Break, ast.Continue, ast.Return)
_EXITS = (ast.Return, ast.Break, ast.Continue, ast.Raise, ast.Global, ast.Nonlocal)


class Slice:
    """What of one file is walked, and which calls lie under each statement."""

    def __init__(self) -> None:
        self.keep: set[int] = set()
        self.bodies: dict[int, list[tuple[ast.stmt, Callable[..., str], bool]]] = {}
        """The kept statements of each body, each with what walks it; filled while walking."""
        self.branches: dict[int, object] = {}
        """What branches.py read of each `if`; filled while walking."""
        self.arms: dict[int, frozenset[str]] = {}
        """What all arms before an `elif` bind; filled while walking."""
        self.turns: dict[int, int | None] = {}
        """How often each loop of unknown length is walked; none: as long as a loader."""
        self.mentions: dict[int, frozenset[str]] = {}
        self.functions: dict[str, frozenset[str]] = {}
        self.foreign: dict[str, frozenset[str]] = {}
        """Training functions of other given files, by the name they are called by here."""
        self.called: dict[int, frozenset[str]] = {}
        self.forks: set[int] = set()
        """`if` statements that bind what a training call is made of."""
        self.yielding: set[int] = set()
        """Statements that hold a `yield`: the loops among them turn as often as who draws."""
        self.moduli: set[int] = set()
        """Window lengths that are written out."""
        self.named = False
        """Whether something called an optimizer steps in this file."""
        self.rows: list[Row] = []
        self.looped: set[str] = set()
        """Functions with a training loop of their own, or that call one that has."""


def slice_module(module: Module, program: Program | None = None) -> Slice:
    """Slice `module` backwards from its training calls, those in other given files included."""
    found = Slice()
    if program is not None:
        if module.path in program.slices:
            return program.slices[module.path]
        program.slices[module.path] = found  # also ends a circle of imports
        found.named = _NAMED.search(program.source(module.path)) is not None
        _import_foreign(module, program, found)
    rows, top, moduli = rows_of(module)
    found.rows = rows
    _mark_wrapped(rows)
    owners = mark_unseen(rows, module, program)
    calls = _function_calls(rows, found)
    for row in top:
        _mention(row, found, calls)
    _find_looped(rows, found)
    needed = _needed(rows, found)
    beside = {id(row): bool(row.names & needed) for row in rows}
    for row in rows:
        if (found.mentions[id(row.node)] or adds(row.node)) and beside[id(row)]:
            needed |= row.names
    for row in reversed(rows):  # children come after their parents
        mentioned = found.mentions[id(row.node)]
        wanted = (
            isinstance(row.node, (*_EXITS, *NESTS, ast.Import, ast.ImportFrom))
            or bool(row.targets & needed)
            or bool(mentioned & CORE)
            or (bool(mentioned) and beside[id(row)])
            or (bool(mentioned & _MODES) and bool(row.called))
            or "grad" in mentioned
            or (UNSEEN in mentioned and bool(row.names & owners))
            or ("super" in row.names and row.function == "__init__")
            or (beside[id(row)] and (adds(row.node) or isinstance(row.node, ast.Assert)))
            or any(id(child.node) in found.keep for child in row.children)
        )
        if wanted:
            found.keep.add(id(row.node))
    _keep_writes(rows, found)
    _keep_anew(rows, found, owners)
    _keep_handed_in(rows, found)
    _keep_means(rows, found)
    _keep_yields(rows, found)
    _find_forks(rows, found)
    found.moduli = moduli_of(rows, moduli)
    return found


def opened(found: Slice) -> Slice:
    """A slice as other files need it, which know only what its functions return and set up."""
    wide = copy(found)
    wide.keep = set(found.keep)
    wide.bodies, wide.branches, wide.arms, wide.turns = {}, {}, {}, {}
    for row in found.rows:
        if isinstance(row.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _open(row, wide.keep, bool(found.functions[row.node.name] & CORE))
    return wide


def _open(function: Row, keep: set[int], trains: bool) -> None:
    """Keep what a function returns, what `__init__` sets up, and the modes it puts models into."""
    inside = list(_inside(function))
    if any(row.yields for row in inside):
        return  # what it yields is kept as it is
    name = getattr(function.node, "name", "")
    kept: set[int] = set()
    needed: set[str] = set()
    for row in inside if name != "forward" else ():
        wanted = (
            isinstance(row.node, ast.Return)
            or bool(row.words & (_MODES | {"ddp"}))
            or (name == "__init__" and isinstance(row.node, (ast.Assign, ast.AnnAssign)))
        )
        if wanted:
            kept.add(id(row.node))
            needed |= row.names
    waiting = inside
    for _ in range(_DEEP):
        left: list[Row] = []
        before = len(needed)
        for row in waiting:
            if row.targets & needed:
                kept.add(id(row.node))
                needed |= row.names
            else:
                left.append(row)
        waiting = left
        if len(needed) == before:
            break
    if not trains and all(row.words <= _QUIET for row in inside):
        keep -= {id(row.node) for row in inside if not isinstance(row.node, _EXITS)}
    if len(inside) > SHORT and not any(map(_MAKES.search, needed)):
        return
    keep |= kept
    for row in reversed(inside):
        if any(id(child.node) in keep for child in row.children):
            keep.add(id(row.node))


def _inside(row: Row) -> Iterator[Row]:
    """The statements of a function, but not those of functions within it."""
    for child in row.children:
        yield child
        if not isinstance(child.node, NESTS):
            yield from _inside(child)


def _mark_wrapped(rows: list[Row]) -> None:
    """Mark where a model is wrapped for several ranks."""
    every: set[str] = set()
    for row in rows:
        every |= row.names
    wraps = {name for name in every if name.lower().endswith(_WRAPS)}
    for row in rows if wraps else ():
        if row.names & wraps:
            row.words |= {"ddp"}


def _keep_writes(rows: list[Row], found: Slice) -> None:
    """Keep what is written into gradients under another name, and the loops around it."""
    tainted: set[str] = set()
    handed: set[str] = set()
    writes = any(row.words & WRITES for row in rows)
    for _ in range(_DEEP if writes else 0):
        before = len(tainted) + len(handed)
        for row in rows:
            if isinstance(row.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if row.node.name in handed:
                    tainted |= {arg.arg for arg in row.node.args.args}
            elif "grad" in row.words or row.names & tainted:
                tainted |= row.targets
                handed |= row.called
        if len(tainted) + len(handed) == before:
            break
    for row in reversed(rows):
        below = any(id(child.node) in found.keep for child in row.children)
        if (row.words & WRITES and row.names & tainted and not row.children) or below:
            found.keep.add(id(row.node))


def _keep_anew(rows: list[Row], found: Slice, owners: frozenset[str]) -> None:
    """Keep what begins the parts of a model anew, or takes them into training, and its loops."""
    parts = set(owners)
    for row in rows:
        if _replaces(row.node, owners):
            found.keep.add(id(row.node))
    if not any(row.words & _ANEW for row in rows):
        return
    for row in rows:
        if isinstance(row.node, ast.For) and row.names & owners:
            parts |= row.targets
    for row in reversed(rows):
        below = any(id(child.node) in found.keep for child in row.children)
        if (row.words & _ANEW and (row.names | row.targets) & parts and not row.children) or below:
            found.keep.add(id(row.node))


def _replaces(node: ast.stmt, owners: frozenset[str]) -> bool:
    """Whether it gives a model a new part: `model.head = nn.Linear(...)`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Attribute):
        return False
    root: ast.expr = target.value
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id in owners


def _carries(row: Row) -> set[str]:
    """The names that a statement binds to what does something once it is called."""
    node = row.node
    if not isinstance(node, ast.Assign) or not row.words & (CORE | {"grad"}):
        return set()
    called = {id(part.func) for part in ast.walk(node.value) if isinstance(part, ast.Call)}
    if any(
        isinstance(part, ast.Lambda)
        or (isinstance(part, ast.Attribute) and part.attr in CORE and id(part) not in called)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value in CORE)
        for part in ast.walk(node.value)
    ):
        names = {getattr(target, "id", getattr(target, "attr", "")) for target in node.targets}
        return names - {""}
    return set()


def _keep_handed_in(rows: list[Row], found: Slice) -> None:
    """Keep the calls of functions that a training function was given: they may do anything."""
    given: dict[str, set[str]] = {}
    called: dict[str, set[str]] = {}
    for row in rows:
        if isinstance(row.node, ast.FunctionDef) and found.functions.get(row.node.name):
            given[row.node.name] = {arg.arg for arg in row.node.args.args}
    for row in rows:
        if isinstance(row.node, ast.Expr) and isinstance(row.node.value, ast.Call):
            func = row.node.value.func
            if isinstance(func, ast.Name) and func.id in given.get(row.function, ()):
                found.keep.add(id(row.node))
                called.setdefault(row.function, set()).add(func.id)
    for row in rows if called else ():
        if isinstance(row.node, ast.Assign) and row.targets & row.names:
            if row.targets & called.get(row.function, set()):
                found.keep.add(id(row.node))  # wrapped before it is called


def _keep_means(rows: list[Row], found: Slice) -> None:
    """Keep what divides a running sum of losses: a mean for the log."""
    sums = {name for row in rows if row.names & _READS and adds(row.node) for name in row.targets}
    used: set[str] = set()
    for row in rows if sums else ():
        if row.names & sums and not row.children and not adds(row.node):
            for node in ast.walk(row.node):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                    found.keep.add(id(row.node))
                    used |= row.names
    stack = [row for row in rows if used & row.targets]
    for row in stack:
        found.keep.add(id(row.node))


def _keep_yields(rows: list[Row], found: Slice) -> None:
    """Keep what generators yield, and how often: whoever draws from them may train.

    Kept as well is what a Lightning module configures: its trainer hands it out again.
    """
    needed: dict[str, set[str]] = {}
    for row in reversed(rows):  # children come after their parents
        inside = any(id(child.node) in found.yielding for child in row.children)
        if row.function and (row.yields or inside) and not isinstance(row.node, NESTS):
            found.yielding.add(id(row.node))
            found.keep.add(id(row.node))
            needed.setdefault(row.function, set()).update(row.names)
        elif row.function == "configure_optimizers" and isinstance(row.node, ast.Return):
            needed.setdefault(row.function, set()).update(row.names)
    for _ in range(_DEEP if needed else 0):
        for row in reversed(rows):
            names = needed.get(row.function)
            if names is None or isinstance(row.node, NESTS):
                continue
            if row.targets & names or any(id(child.node) in found.keep for child in row.children):
                found.keep.add(id(row.node))
                names |= row.names


def _find_forks(rows: list[Row], found: Slice) -> None:
    hot: set[str] = set()
    for row in rows:
        own = row.names | row.targets
        if row.words & CORE and not isinstance(row.node, NESTS):
            hot |= own
    for _ in range(2):  # a loss may be scaled under another name before its backward
        first = set(hot)
        for row in rows:
            if row.targets & first and not isinstance(row.node, NESTS):
                hot |= row.names

    def binds(row: Row) -> bool:
        return any(
            child.targets & hot or isinstance(child.node, ast.Return) or binds(child)
            for child in row.children
        )

    for row in rows:
        if isinstance(row.node, ast.If) and id(row.node) in found.keep and binds(row):
            found.forks.add(id(row.node))


def _import_foreign(module: Module, program: Program, found: Slice) -> None:
    """Note which imported functions, or methods of imported classes, train."""
    for name, dotted in module.imports.items():
        target = program.resolve(dotted, module.path)
        if target is None or target[0] is module:
            continue
        other, rest = target
        theirs = slice_module(other, program)
        if rest in theirs.foreign:
            found.foreign[name] = found.foreign.get(name, frozenset()) | theirs.foreign[rest]
            if rest in theirs.looped:
                found.looped.add(name)
            continue
        if rest in theirs.functions:
            spelled = {name: rest}
        elif not rest:
            spelled = {own: own for own in theirs.functions}
        else:
            home = other.functions.get(rest)
            body = home.body if isinstance(home, ast.ClassDef) else []
            methods = [node.name for node in body if isinstance(node, ast.FunctionDef)]
            spelled = {own: own for own in methods if own in theirs.functions}
        _spell(spelled, theirs, found)
    for other in program.everything(module):
        theirs = slice_module(other, program)
        _spell({own: own for own in theirs.functions}, theirs, found)


def _spell(spelled: dict[str, str], theirs: Slice, found: Slice) -> None:
    for local, own in spelled.items():
        if theirs.functions[own]:
            found.foreign[local] = found.foreign.get(local, frozenset()) | theirs.functions[own]
            if own in theirs.looped:
                found.looped.add(local)


def _function_calls(rows: list[Row], found: Slice) -> dict[str, frozenset[str]]:
    own: dict[str, set[str]] = {}
    uses: dict[str, set[str]] = {}
    for row in rows:
        if isinstance(row.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own.setdefault(row.node.name, set())
            uses.setdefault(row.node.name, set())
    methods = {row.node.name for row in rows if row.method}  # type: ignore[attr-defined]
    for row in rows:
        for name in _carries(row):
            own.setdefault(name, set()).update(row.words & _CARRIED)
            methods.add(name)
    for name, events in found.foreign.items():
        own.setdefault(name, set()).update(events)
        methods.add(name)
    for row in rows:
        row.called, row.direct = _called(row, own.keys(), methods)
        if row.function in own:
            own[row.function].update(row.words & _CARRIED)
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
    row: Row, functions: Collection[str], methods: set[str]
) -> tuple[frozenset[str], frozenset[str]]:
    named = row.names.intersection(functions)
    if not named:
        return frozenset(), frozenset()
    if isinstance(row.node, NESTS):
        return named & methods, frozenset()
    maybe = named & (row.bare | methods)
    return maybe, maybe & row.calls


def _mention(row: Row, found: Slice, calls: dict[str, frozenset[str]]) -> frozenset[str]:
    events = set(row.words)
    for name in row.called:
        events |= calls[name]
    nested = isinstance(row.node, NESTS)
    for child in row.children:
        inner = _mention(child, found, calls)
        if not nested:
            events |= inner
    found.mentions[id(row.node)] = frozenset(events)
    return found.mentions[id(row.node)]


def _find_looped(rows: list[Row], found: Slice) -> None:
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


def _needed(rows: list[Row], found: Slice) -> set[str]:
    needed: set[str] = set()
    for row in rows:
        leaves = any(isinstance(child.node, _LEAVES) for child in row.children)
        if found.mentions[id(row.node)] & CORE or leaves:
            needed |= row.names
    waiting = rows
    for _ in range(_DEEP):
        more: set[str] = set()
        left: list[Row] = []
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
