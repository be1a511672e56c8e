"""Walk one training loop with small numbers in place of unknown ones, and note what happens when.

Nothing is run: statements are interpreted over values.py. A condition that cannot be evaluated is
decided once per walk and the other way in another walk, so that a walk is always one consistent
configuration of the script.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from gradaccum.lint.files.program import Module, Program
from gradaccum.lint.files.slicing import Slice, opened, slice_module
from gradaccum.lint.walk.classes import counted_by, ones
from gradaccum.lint.walk.evaluate import EXPRESSIONS, evaluate, text
from gradaccum.lint.walk.expressions import HANDLERS
from gradaccum.lint.walk.generators import Turning, postponed
from gradaccum.lint.walk.loops import UNEVEN, WINDOW
from gradaccum.lint.walk.statements import STATEMENTS
from gradaccum.lint.walk.trace import Doubt, Event, Frame, Trace
from gradaccum.lint.walk.values import Class, Env, Func, Num, Seq, Tensor, Thing, Value

__all__ = ["Exhausted", "Walker"]

EXPRESSIONS.update(HANDLERS)
_FREE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
DEPTH = 12
PER_WALK = 12_000
"""Statements and calls of one walk."""


class Exhausted(Exception):
    """The walk grew past its budget; what was seen until then stands."""


@dataclass(slots=True)
class Walker:
    """One walk from one root."""

    program: Program
    choices: list[bool]
    known: dict[str, float]
    """Symbols that an earlier walk found to count something, with the numbers chosen for them."""
    asserted: dict[str, float] = field(default_factory=dict)
    """Symbols that the script refuses to run with other numbers for."""
    budget: int = PER_WALK
    windows: set[str] = field(default_factory=set)
    """Symbols that count micro-batches, shared by all walks of a root."""
    trace: Trace = field(default_factory=Trace)
    order: list[str] = field(default_factory=list)
    usual: list[bool] = field(default_factory=list)
    turnable: set[str] = field(default_factory=set)
    """Conditions in `order`; one that did not matter at first may matter later."""
    loops: list[Frame] = field(default_factory=list)
    contexts: list[tuple[str, Value]] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    visited: set[int] = field(default_factory=set)
    globals: dict[str, Env] = field(default_factory=dict)
    slices: dict[str, Slice] = field(default_factory=dict)
    clock: int = 0
    sync: bool = True
    accumulations: int = 0
    spent: set[int] = field(default_factory=set)
    """Forward passes that were differentiated."""
    engines: dict[int, int] = field(default_factory=dict)
    """Micro-batches that each Accelerate engine has counted in this epoch."""
    driver: Frame | None = None
    aliases: dict[int, tuple[Tensor, Thing]] = field(default_factory=dict)
    joints: dict[str, tuple[bool, list[Doubt]]] = field(default_factory=dict)
    """Conditions made of several doubts, by their key."""
    parts: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    """Conditions that choose between two ways to train, or wrap a model: turned before others."""
    hooks: list[tuple[Func, Thing]] = field(default_factory=list)
    """Hooks that run in every backward, with the parameter they stand on."""
    turnings: list[Turning] = field(default_factory=list)
    """Loops that are walked from inside the generators they draw from."""
    step_hooks: list[tuple[str, Thing | None, Value]] = field(default_factory=list)
    """Functions that run before or after a step, with the optimizer they stand on; none: any."""
    owners: list[tuple[Value, Class | None]] = field(default_factory=list)
    """Of each method that is being walked: its object, and the class that defines it."""
    result: Value = None
    stack: list[ast.AST] = field(default_factory=list)
    here: ast.AST = field(default_factory=ast.Pass)
    """The statement that is walked."""
    calls: list[tuple[ast.AST, str]] = field(default_factory=list)
    """The statements that called, one for each function in `stack`; a new tuple for each call."""

    at_start: tuple[dict[str, float], set[str]] = field(init=False)
    """What was known when this walk began."""

    def __post_init__(self) -> None:
        self.trace.window_keys = self.windows
        self.at_start = dict(self.known), set(self.windows)

    # -- what the evaluator needs -------------------------------------------------------------

    def note(
        self,
        kind: str,
        node: ast.AST,
        thing: Thing | None = None,
        tensor: Tensor | None = None,
        *flags: str,
    ) -> None:
        """Record one event here and now."""
        event = Event(
            kind,
            node,
            self.paths[-1],
            tuple([frame.now for frame in self.loops]),
            thing,
            tensor,
            frozenset([*flags, *[name for name, _ in self.contexts]]),
            tuple(self.unsure),
            tuple(self.calls) if kind in ("forward", "backward") else (),
        )
        self.trace.events.append(event)

    def tick(self) -> int:
        """A number that never comes again in this walk."""
        self.clock += 1
        return self.clock

    def quiet(self) -> str:
        """The innermost context that switches graphs off, if one is in force."""
        for name, _ in reversed(self.contexts):
            if name in ("no_grad", "inference_mode"):
                return name
            if name == "enable_grad":
                return ""
        return ""

    def inside(self, name: str) -> bool:
        """Whether a context of that name is open."""
        return any(context == name for context, _ in self.contexts)

    def symbol(self, key: str, value: float | None = None) -> Num:
        """The number chosen for `key`, the same in all walks of this root."""
        if key in self.asserted:
            return Num(self.asserted[key], frozenset((key,)))
        if key not in self.known:
            used = {number for name, number in self.known.items() if name != "length"}
            free = [number for number in (WINDOW, 2, 5, 4, 7) if number not in used]
            self.known[key] = value if value is not None else (free[0] if free else WINDOW)
            if self.known[key] != WINDOW:
                self.known["length"] = UNEVEN  # so that this one leaves a tail as well
        self.trace.exact = False
        return Num(self.known[key], frozenset((key,)))

    def decide(self, key: str, changes: bool, matters: bool = True, usual: bool = True) -> bool:
        """How an unknown condition is taken in this walk; `usual` where nothing was planned."""
        known = self.trace.decisions.get(key)
        if known is not None and (not matters or key in self.turnable):
            return known[0]
        if not matters:
            self.trace.decisions[key] = (usual, changes)
            return usual
        self.turnable.add(key)
        forced = None if changes else self._forced(key)
        if forced is not None:
            self.trace.decisions[key] = (forced, changes)
            return forced
        position = len(self.order)
        choice = self.choices[position] if position < len(self.choices) else usual
        self.usual.append(usual)
        self.order.append(key)
        self.trace.decisions[key] = (choice, changes)
        return choice

    def join(self, wanted: bool, parts: list[Doubt]) -> Doubt:
        """One doubt for several: for `or` (`wanted`) any of them, for `and` all of them."""
        names = [f"{'' if positive else 'not '}{key}" for key, _, positive in parts]
        key = (" or " if wanted else " and ").join(names)
        self.joints[key] = wanted, parts
        return key, any(changes for _, changes, _ in parts), True

    def settled(self, doubt: Doubt) -> bool | None:
        """What earlier decisions of this walk make of a doubt."""
        key, changes, positive = doubt
        if changes or (key in self.trace.decisions and key not in self.turnable):
            return None
        known = self.trace.decisions.get(key)
        taken = known[0] if known is not None else self._forced(key)
        return None if taken is None else taken == positive

    def _forced(self, key: str) -> bool | None:
        """What earlier decisions on conditions that hold this one leave open for it."""
        for name, (wanted, parts) in self.joints.items():
            outcome = self.trace.decisions.get(name)
            if outcome is None or name not in self.turnable:
                continue  # not decided, or only for what did not matter
            if not any(part[0] == key for part in parts):
                continue
            positive = next(part[2] for part in parts if part[0] == key)
            if outcome[0] is not wanted:
                return (not wanted) == positive
            others = [self.trace.decisions.get(part[0]) for part in parts if part[0] != key]
            senses = [part[2] for part in parts if part[0] != key]
            if all(other is not None and (other[0] == sense) is not wanted
                   for other, sense in zip(others, senses, strict=True)):  # fmt: skip
                return wanted == positive
        return None

    def module_slice(self, module: Module) -> Slice:
        """The slice of a file, made once for all walks of a root."""
        found = self.slices.get(module.path)
        if found is None:
            found = self.program.wide.get(module.path)
            if found is None:
                found = self.program.wide[module.path] = opened(slice_module(module, self.program))
            self.slices[module.path] = found
        return found

    def scope(self, module: Module) -> Env:
        """The top-level names of a file."""
        env = self.globals.get(module.path)
        if env is None:
            env = self.globals[module.path] = Env({}, None, module)
        return env

    # -- statements ---------------------------------------------------------------------------

    def block(self, body: list[ast.stmt], env: Env) -> str:
        """Walk statements; returns how they were left: '', 'break', 'continue' or 'return'."""
        slice_ = self.module_slice(env.module)
        kept = slice_.bodies.get(id(body))
        if kept is None:
            keep = slice_.keep
            kept = [(node, STATEMENTS[type(node)], not isinstance(node, _FREE))
                    for node in body if id(node) in keep and type(node) in STATEMENTS]  # fmt: skip
            slice_.bodies[id(body)] = kept
        for node, handler, costs in kept:
            if costs:
                self.here = node
                self.budget -= 1
                if self.budget < 0:
                    raise Exhausted
            signal = handler(self, node, env)
            if signal:
                return signal
        return ""

    def function(
        self, func: Func, args: list[Value], kwargs: dict[str, Value], now: bool = False
    ) -> Value:
        """Walk a call of a function whose source we have; a generator runs later, if not `now`."""
        node = func.node
        if len(self.stack) >= DEPTH or node in self.stack:
            return Thing("unknown", f"{getattr(node, 'name', 'lambda')}()", bool(self.loops))
        if not now:
            later = postponed(self, func, args, kwargs)
            if later is not None:
                return later
        env = Env({}, func.env, func.module)
        _bind(self, func, env, [*func.bound, *args], {**func.bound_kw, **kwargs})
        whole = not _unsaid_window(func, len(func.bound) + len(args), kwargs)
        begun = len(self.trace.events)
        self.stack.append(node)
        self.calls.append((self.here, self.paths[-1]))
        self.paths.append(func.module.path)
        self.owners.append((func.owner, func.home))
        mark = len(self.contexts)
        if func.within:
            self.contexts.append((func.within, None))
        try:
            if isinstance(node, ast.Lambda):
                return evaluate(self, env, node.body)
            for decorator in node.decorator_list:
                name = text(decorator).split("(")[0].split(".")[-1]
                if name in ("no_grad", "inference_mode", "enable_grad"):
                    self.contexts.append((name, None))
            self.result = None
            self.block(node.body, env)
            value, self.result = self.result, None
            return value
        finally:
            del self.contexts[mark:]
            self.stack.pop()
            self.here = self.calls.pop()[0]
            self.paths.pop()
            self.owners.pop()
            if whole and self._trained(func, begun):
                self.visited.add(id(node))  # what was not is walked by itself as well

    def _trained(self, func: Func, begun: int) -> bool:
        """Whether a call came by the backward that its function spells out, if any."""
        words = self.module_slice(func.module).functions.get(getattr(func.node, "name", ""), ())
        if "backward" not in words and "manual_backward" not in words:
            return True
        return any(event.kind == "backward" for event in self.trace.events[begun:])


def _unsaid_window(func: Func, given: int, kwargs: dict[str, Value]) -> bool:
    """Whether a call leaves the length of a window at a default of 1, which switches it off."""
    node = func.node
    known = node.__dict__.get("_windows")
    if known is None:
        known = node.__dict__["_windows"] = ones(node) & counted_by(node)
    if not known:
        return False
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    given += func.owner is not None
    return not known <= {*names[:given], *kwargs}


def _bind(
    walker: Walker, func: Func, env: Env, args: list[Value], kwargs: dict[str, Value]
) -> None:
    spec = func.node.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    if func.owner is not None and names:
        args = [func.owner, *args]
    defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
    for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        names.append(arg.arg)
        if default is not None:
            defaults[arg.arg] = default
    positional = len(spec.posonlyargs) + len(spec.args)
    for index, name in enumerate(names):
        if name in kwargs:
            env.names[name] = kwargs[name]
        elif index < min(len(args), positional):
            env.names[name] = args[index]
        elif name in defaults:
            env.names[name] = evaluate(walker, func.env, defaults[name])
        else:
            env.names[name] = Thing("unknown", name, depth=len(walker.loops))
    if spec.vararg:
        env.names[spec.vararg.arg] = Seq(list(args[positional:]), open=not args[positional:])
    if spec.kwarg:
        rest = {name: value for name, value in kwargs.items() if name not in names}
        env.names[spec.kwarg.arg] = Thing("unknown", spec.kwarg.arg, attrs=rest)
