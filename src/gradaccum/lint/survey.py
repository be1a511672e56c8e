"""From a file to the walks of its training loops: which roots, how often, under which decisions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from gradaccum.lint.collector import sweep
from gradaccum.lint.files.program import Module, Program
from gradaccum.lint.files.rows import NESTS
from gradaccum.lint.files.slicing import CORE, Slice, slice_module
from gradaccum.lint.walk.calls import instantiate
from gradaccum.lint.walk.classes import base_kind, find_method, ones
from gradaccum.lint.walk.evaluate import evaluate, key_of
from gradaccum.lint.walk.lightning import fit, manual
from gradaccum.lint.walk.loops import LENGTH
from gradaccum.lint.walk.trace import Event, Frame, Trace
from gradaccum.lint.walk.values import Class, Env, Func, Thing, Value
from gradaccum.lint.walk.walker import PER_WALK, Exhausted, Walker

__all__ = ["Survey", "survey"]

TRAINING = CORE - {"accumulate", "no_backward_sync", "no_sync", "step"}
"""Calls that make a loop one of training: much else steps, and synchronises."""
WALKS = 20
"""Walks of one root: decisions made last, which lie in the loop itself, are turned first."""
ALIKE = 4
"""Walks in a row that showed nothing new, after which no more are made."""
URGENT = 8
TURNS = 8
"""Decisions of a walk without a backward that are turned to find one."""
BUDGET = 60_000
"""Statements walked for one root, over all its walks."""


@dataclass(slots=True)
class Survey:
    """All walks of one root."""

    root: ast.AST
    traces: list[Trace]
    driven: bool
    """The root has no loop of its own: it was called once a micro-batch."""
    repeated: bool
    """The root was called twice, as a caller does once an epoch."""


@dataclass(slots=True)
class _Root:
    node: ast.AST
    home: ast.ClassDef | None
    called: bool


def survey(program: Program, module: Module) -> list[Survey]:
    """Walk every training loop that starts in `module`."""
    found = slice_module(module, program)
    slices = {module.path: found}
    visited: set[int] = set()
    surveys: list[Survey] = []
    for root in _roots(module, found):
        if id(root.node) in visited:
            continue
        result = _explore(program, module, root, slices, visited)
        sweep()
        if result is not None:
            surveys.append(result)
    return surveys


def _roots(module: Module, found: Slice) -> list[_Root]:
    roots: list[_Root] = []
    for node in module.tree.body:
        definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if not definition and found.mentions.get(id(node), frozenset()) & TRAINING:
            roots.append(_Root(module.tree, None, False))
            break
    functions = list(_functions(module.tree.body, None))
    hot = [(node, home) for node, home in functions
           if found.functions.get(node.name, frozenset()) & TRAINING]  # fmt: skip
    called: set[str] = set()
    for node, _ in hot:
        names = {
            child.func.id if isinstance(child.func, ast.Name) else child.func.attr
            for child in ast.walk(node)
            if isinstance(child, ast.Call) and isinstance(child.func, (ast.Name, ast.Attribute))
        }
        called |= names - {node.name}
    ordered = sorted(hot, key=lambda pair: (pair[0].name in called, pair[0].lineno))
    roots.extend(_Root(node, home, node.name in called) for node, home in ordered)
    return roots


def _functions(
    body: list[ast.stmt], home: ast.ClassDef | None
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, home
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, node)
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from _functions(getattr(node, name, None) or [], home)


def _explore(
    program: Program, module: Module, root: _Root, slices: dict[str, Slice], visited: set[int]
) -> Survey | None:
    known: dict[str, float] = {}
    windows: set[str] = set()
    budget = BUDGET
    probe = _probe(program, module, root, slices, visited, known, windows)
    settled = (dict(known), set(windows)) == probe.at_start
    backwards = [event for event in probe.trace.events if event.kind == "backward"]
    if not any(event.kind in ("step", "backward", "zero") for event in probe.trace.events):
        return None
    manner = "once"
    if backwards and not any(event.loops for event in backwards):
        manner = "driven" if not isinstance(root.node, ast.Module) else "once"
        if manual(root.node, root.home, slices[module.path]):
            manner = "fit"
            _walk(program, module, root, slices, visited, [], known, windows, manner)  # learns
    elif backwards and _per_epoch(probe, root):
        manner = "twice"
    traces: list[Trace] = []
    tried: set[tuple[bool, ...]] = set()
    made: list[_Made] = []
    plans: list[list[bool]] = [list(probe.choices), [False] * 64]
    urgent: list[list[bool]] = []
    """Plans that turn choices between ways to train only: all of them come first."""
    walks = alike = 0
    shapes: set[int] = set()
    while (plans or urgent) and walks < WALKS and budget > 0:
        plan = urgent.pop(0) if urgent and walks > 1 else plans.pop(0) if plans else urgent.pop(0)
        again = _foreseen(plan, made, known, windows)
        if again is not None:
            walks += 1
            budget -= again.cost
            continue
        if settled and not walks and manner == "once":
            walker = probe  # nothing was learnt on the way that would change it
        else:
            walker, _ = _walk(program, module, root, slices, visited, plan, known, windows, manner)
        walks += 1
        cost = PER_WALK - max(walker.budget, 0)
        budget -= cost
        taken = tuple(walker.trace.decisions[key][0] for key in walker.order)
        if walker.at_start == (known, windows):
            made.append(_Made(taken, walker.usual, walker.at_start, cost))
        if taken in tried:
            continue
        tried.add(taken)
        shape = _shape(walker.trace)
        alike = alike + 1 if shape in shapes else 0
        if alike >= ALIKE:
            break
        shapes.add(shape)
        traces.append(walker.trace)
        for position in _positions(walker):
            turned = [*taken[:position], not taken[position]]
            if taken[position] != walker.usual[position] or turned in plans or turned in urgent:
                continue
            first = walker.ranks.get(walker.order[position], 2) < 2
            (urgent if first and len(urgent) < URGENT else plans).append(turned)
    return Survey(root.node, traces, manner == "driven", manner == "twice")


@dataclass(slots=True)
class _Made:
    """A walk that learnt nothing: under the same plan it would be the same again."""

    taken: tuple[bool, ...]
    usual: list[bool]
    known: tuple[dict[str, float], set[str]]
    cost: int


def _foreseen(
    plan: list[bool], made: list[_Made], known: dict[str, float], windows: set[str]
) -> _Made | None:
    """The walk that a plan would repeat, decision by decision."""
    for one in made:
        if (
            list(one.taken[: len(plan)]) == plan[: len(one.taken)]
            and list(one.taken[len(plan) :]) == one.usual[len(plan) :]
            and one.known == (known, windows)
        ):
            return one
    return None


def _positions(walker: Walker) -> list[int]:
    """Decisions to turn: first those between two ways to train, then those that wrap a model."""
    return sorted(_last_first(walker), key=lambda index: walker.ranks.get(walker.order[index], 2))


def _last_first(walker: Walker) -> Iterator[int]:
    """Decisions made last first, for they lie in the loop itself.

    What the data decide and what the settings decide take turns: the one shows what a fault depends
    on, the other the configuration that has it.
    """
    order = [walker.trace.decisions[key][1] for key in walker.order]
    data = [index for index, changes in enumerate(order) if changes]
    settings = [index for index, changes in enumerate(order) if not changes]
    while data or settings:
        if settings:
            yield settings.pop()
        if data:
            yield data.pop()


def _probe(
    program: Program,
    module: Module,
    root: _Root,
    slices: dict[str, Slice],
    visited: set[int],
    known: dict[str, float],
    windows: set[str],
) -> Walker:
    """A first walk; where it left before it trained, one that turned the decision to leave."""
    found, _ = _walk(program, module, root, slices, visited, [], known, windows, "once")
    if not _hopes(root.node, slices[module.path]):
        return found
    first = found
    for position in range(len(first.order) - 1, max(-1, len(first.order) - 1 - TURNS), -1):
        if any(event.kind == "backward" for event in found.trace.events):
            return found
        taken = [first.trace.decisions[key][0] for key in first.order]
        plan = [*taken[:position], not taken[position]]
        found, _ = _walk(program, module, root, slices, visited, plan, known, windows, "once")
    trained = any(event.kind == "backward" for event in found.trace.events)
    return found if trained else first


def _hopes(root: ast.AST, found: Slice) -> bool:
    """Whether a root, or what it calls, spells out a backward pass."""
    if isinstance(root, ast.Module):
        spelled = [found.mentions.get(id(node), frozenset()) for node in root.body
                   if not isinstance(node, NESTS)]  # fmt: skip
    else:
        spelled = [found.functions.get(getattr(root, "name", ""), frozenset())]
    return any(words & {"backward", "manual_backward"} for words in spelled)


def _shape(trace: Trace) -> int:
    """What a walk did, in one number."""
    return hash(
        tuple(
            (event.kind, id(event.node), event.flags, len(event.loops), _synced(event))
            for event in trace.events
            if event.kind not in ("escape", "forward", "mode", "store")
        )
    )


def _synced(event: Event) -> bool:
    """Whether a backward reaches a wrapped model."""
    tensor = event.tensor if event.kind == "backward" else None
    return tensor is not None and any("ddp" in model.uses for model in tensor.models)


def _per_epoch(probe: Walker, root: _Root) -> bool:
    """Whether a function is one epoch: its loop is its own, its optimizer comes from outside."""
    if isinstance(root.node, ast.Module):
        return False
    for event in probe.trace.events:
        if event.kind == "backward" and len(event.loops) > 1:
            return False
        if event.kind == "step" and event.thing is not None and event.thing.node is not None:
            return False
    return True


def _walk(
    program: Program,
    module: Module,
    root: _Root,
    slices: dict[str, Slice],
    visited: set[int],
    choices: list[bool],
    known: dict[str, float],
    windows: set[str],
    manner: str,
) -> tuple[Walker, bool]:
    walker = Walker(program, choices, known, slices=slices, visited=visited, windows=windows)
    walker.paths.append(module.path)
    walker.trace.named = slices[module.path].named
    try:
        if isinstance(root.node, ast.Module):
            walker.block(module.tree.body, walker.scope(module))
        else:
            _call_root(walker, module, root, manner)
    except Exhausted:
        return walker, False
    return walker, True


def _call_root(walker: Walker, module: Module, root: _Root, manner: str) -> None:
    scope = walker.scope(module)
    node = root.node
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    func = Func(node, scope, module)
    if root.home is not None:
        home = Class(root.home, scope, module)
        static = any(getattr(item, "id", "") == "staticmethod" for item in node.decorator_list)
        if not static:
            if node.name == "__init__":
                func.owner = Thing(
                    base_kind(walker, home), root.home.name, attrs={"__class__": home}
                )
            else:
                func.owner = instantiate(walker, root.home, home, [], _unsaid(walker, home))
                func.owner.node = None
                for name, value in func.owner.attrs.items():
                    if value is None:  # a place that another method fills
                        func.owner.attrs[name] = Thing("unknown", f"self.{name}")
            func.home = home
            walker.trace.events.clear()
            method = find_method(walker, home, node.name)
            func.env = method.env if method else scope
    if manner == "once":
        walker.function(func, [], _parameters(walker, scope, node, func))
        return
    if manner == "twice":
        values = _parameters(walker, scope, node, func)
        for _ in range(2):
            walker.function(func, [], dict(values))
        return
    if manner == "fit":
        assert func.home is not None
        fit(walker, func, func.home, _parameters(walker, scope, node, func))
        return
    frame = Frame(node, walker.tick())
    walker.loops.append(frame)
    walker.driver = frame
    count = int(walker.known.get("length", LENGTH))
    fixed = _parameters(walker, scope, node, func)
    for index in range(count):
        frame.turn(index, index == count - 1)
        walker.function(func, [], dict(fixed))
    walker.loops.pop()


def _unsaid(walker: Walker, home: Class) -> dict[str, Value]:
    """Arguments of a class that its caller may set: a default of 1 only switches a window off."""
    method = find_method(walker, home, "__init__")
    return {} if method is None else {name: Thing("unknown", name) for name in ones(method.node)}


_ANNOTATED = {
    "Optimizer": "optimizer",
    "GradScaler": "scaler",
    "Accelerator": "accelerator",
    "Fabric": "fabric",
    "Module": "model",
    "LRScheduler": "scheduler",
    "_LRScheduler": "scheduler",
    "DataLoader": "loader",
}


def _parameters(
    walker: Walker, scope: Env, node: ast.FunctionDef | ast.AsyncFunctionDef, func: Func
) -> dict[str, Value]:
    """Unknown arguments for a root, each as much as its annotation says."""
    values: dict[str, Value] = {}
    spec = node.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    if func.owner is not None:
        arguments = arguments[1:]
    for argument in arguments:
        made = Thing("unknown", argument.arg)
        if argument.annotation is not None and not isinstance(argument.annotation, ast.Constant):
            kind = evaluate(walker, scope, argument.annotation)
            if isinstance(kind, Class):
                made.kind = base_kind(walker, kind)
                made.attrs["__class__"] = kind
            else:
                name = key_of(kind).split(".")[-1]
                made.kind = _ANNOTATED.get(name, "unknown")
        values[argument.arg] = made
    return values
