"""Conditions: which branch a walk takes, and which decisions that needs."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradaccum.lint.files.slicing import CORE, Slice
from gradaccum.lint.walk.arithmetic import condition
from gradaccum.lint.walk.ends import at_end
from gradaccum.lint.walk.evaluate import evaluate, text
from gradaccum.lint.walk.multiples import divides_evenly, rest
from gradaccum.lint.walk.trace import SET, Doubt, Gate
from gradaccum.lint.walk.values import Env, Num, Thing, Value, varies

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["branch", "match", "truth"]


_SPECIAL = CORE | {"ddp"}
_WEIGHS = frozenset({"multiply_grads", "scale_gradients", "scale_grads"})
_TRAINS = frozenset({"step", "backward", "manual_backward"})


@dataclass(slots=True)
class Fork:
    """What the text of an `if` says of its branches, read once for all walks."""

    leaves: bool
    """The body does nothing but leave; so does the other branch below."""
    other_leaves: bool
    trains: bool
    """Calls of training lie in it."""
    special: bool
    steps: bool
    binds: bool
    forks: bool
    """It binds what a training call is made of, or scales gradients."""
    skips: bool
    less: bool
    """Only the other branch holds a backward pass."""
    rank: int
    """0 if both branches train, 1 if one wraps a model, 2 for all others."""
    unbound: frozenset[str] = frozenset()
    """Names that all arms of an `if`, `elif` chain bind, where this is its last arm."""


def _fork(walker: Walker, node: ast.If, env: Env) -> Fork:
    found = walker.module_slice(env.module)
    known = found.branches.get(id(node))
    if known is None:
        mentioned = found.mentions[id(node)]
        body, other = _kept(node.body, found), _kept(node.orelse, found)
        known = found.branches[id(node)] = Fork(
            _only_leaves(body, found),
            _only_leaves(other, found),
            bool(mentioned & CORE),
            bool(mentioned & _SPECIAL),
            "step" in mentioned,
            any(not isinstance(child, ast.Expr) for child in (*body, *other)),
            id(node) in found.forks or bool(mentioned & _WEIGHS),
            _skips(body, found),
            _trains(node.body, found) < _trains(node.orelse, found),
            _rank(node, found),
            _bound_by_all(node, found),
        )
    assert isinstance(known, Fork)
    return known


def _bound_by_all(node: ast.If, found: Slice) -> frozenset[str]:
    """The names that a chain's arms bind, kept for its last arm if that is an `elif`."""
    names = found.arms.get(id(node))
    own = frozenset(
        target.id
        for child in node.body
        if isinstance(child, ast.Assign)
        for target in child.targets
        if isinstance(target, ast.Name)
    )
    names = own if names is None else names & own
    if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        found.arms[id(node.orelse[0])] = names
        return frozenset()
    return names if id(node) in found.arms and not node.orelse else frozenset()


def branch(walker: Walker, node: ast.If, env: Env) -> str:
    """Walk an `if`."""
    start = len(walker.trace.events)
    refuses = any(isinstance(one, ast.Raise) for one in node.body)
    whole = rest(node.test, none=False) if refuses else None
    if whole is not None:
        length, number = evaluate(walker, env, whole.left), evaluate(walker, env, whole.right)
        divides_evenly(walker, length, number)
    value = truth(walker, env, node.test, node)
    fork = _fork(walker, node, env)
    if fork.steps:
        asked = [event for event in walker.trace.events[start:] if event.kind == "stream_length"]
        if asked:
            walker.note("step_by_length", asked[0].node, asked[0].thing)
    if isinstance(value, bool):
        if fork.steps and walker.loops and all(frame.exact for frame in walker.loops):
            gate = walker.trace.gates.setdefault(
                id(node), Gate(node, walker.paths[-1], tuple(frame.now for frame in walker.loops))
            )
            gate.taken |= value
        refused = value and fork.leaves and refuses
        # a script that refuses its settings does not train with them
        return walker.block(node.body if value and not refused else node.orelse, env)
    key, changes, positive = value
    if fork.unbound and all(env.find(name) is None for name in fork.unbound):
        # none of the arms would leave a name that is used later without a value
        walker.trace.decisions.setdefault(key, (positive, changes))
        walker.turnable.add(key)
        return walker.block(node.body, env)
    if fork.leaves:
        # the windows that are full are counted, and the loop ends or skips behind them
        if changes and _FULL.search(key) and _in_training(walker, env):
            walker.trace.trimmed = True
        return walker.block(node.orelse, env)
    if fork.other_leaves:
        return walker.block(node.body, env)
    if not fork.trains and not fork.binds and not fork.forks:
        walker.unsure.append(("?" if changes else SET) + key)
        try:
            signal = walker.block(node.body, env)
            return "" if signal else walker.block(node.orelse, env)
        finally:
            walker.unsure.pop()
    usual = not fork.skips if positive else True
    if key in walker.joints and not walker.joints[key][0] and usual and not node.orelse:
        usual = fork.special  # several things at once are rarely so
    if node.orelse and usual and fork.less:
        usual = not positive
    walker.ranks[key] = min(fork.rank, walker.ranks.get(key, 2))
    matters = fork.trains or fork.forks or _wraps_optimizer(node, env)
    taken = walker.decide(key, changes, matters, usual) == positive
    walker.unsure.append(key)
    try:
        return walker.block(node.body if taken else node.orelse, env)
    finally:
        walker.unsure.pop()


def _wraps_optimizer(node: ast.If, env: Env) -> bool:
    """Whether a branch puts an optimizer into something: `if half: opt = wrapped(opt)`."""
    for child in node.body:
        if isinstance(child, ast.Assign) and isinstance(child.value, ast.Call):
            names = {one.id for one in child.targets if isinstance(one, ast.Name)}
            given = {one.id for one in child.value.args if isinstance(one, ast.Name)}
            for name in names & given:
                value = env.find(name)
                if value is not None and _is_optimizer(value.names[name]):
                    return True
    return False


def _is_optimizer(value: Value) -> bool:
    return isinstance(value, Thing) and value.kind == "optimizer"


_TOUCHES = _TRAINS | {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_"}


def _rank(node: ast.If, found: Slice) -> int:
    sides = [[found.mentions[id(child)] for child in body] for body in (node.body, node.orelse)]
    if all(any(words & _TOUCHES for words in side) for side in sides):
        return 0
    return 1 if any("ddp" in words for side in sides for words in side) else 2


_FULL = re.compile(r"#windows|\(\d+(\.\d+)? FloorDiv ")
"""How the number of windows that are full is spelled: a counter, divided by a window's length."""


def _in_training(walker: Walker, env: Env) -> bool:
    found = walker.module_slice(env.module)
    loop = walker.loops[-1].node if walker.loops else None
    return bool(found.mentions.get(id(loop), frozenset()) & {"backward", "manual_backward"})


def _kept(body: list[ast.stmt], found: Slice) -> list[ast.stmt]:
    return [node for node in body if id(node) in found.keep]


def _trains(body: list[ast.stmt], found: Slice) -> bool:
    """Whether a branch holds a backward pass."""
    return any(found.mentions[id(node)] & {"backward", "manual_backward"} for node in body)


def _only_leaves(kept: list[ast.stmt], found: Slice) -> bool:
    """Whether a branch does nothing but leave: an early stop, which says nothing of the loop."""
    return (
        bool(kept)
        and isinstance(kept[-1], (ast.Return, ast.Break, ast.Continue, ast.Raise))
        and not any(found.mentions[id(node)] & CORE for node in kept)
    )


def _skips(kept: list[ast.stmt], found: Slice) -> bool:
    """Whether a branch leaves without training: it clears, as for a loss that is NaN, or looks."""
    out = bool(kept) and isinstance(kept[-1], ast.Return)
    return (
        bool(kept)
        and isinstance(kept[-1], (ast.Return, ast.Break, ast.Continue))
        and not any(
            found.mentions[id(node)] & ({"backward", "manual_backward"} if out else _TRAINS)
            for node in kept
        )
    )


def truth(walker: Walker, env: Env, test: ast.expr, around: ast.AST | None = None) -> bool | Doubt:
    """A condition's value; else the key of the decision, whether it changes, and its sense."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = truth(walker, env, test.operand, around)
        if isinstance(value, bool):
            return not value
        return value[0], value[1], not value[2]
    if isinstance(test, ast.BoolOp):
        wanted = isinstance(test.op, ast.Or)
        open_: list[Doubt] = []
        ends: list[bool | None] = []
        for operand in test.values:
            value = truth(walker, env, operand, around)
            if not isinstance(value, bool):
                settled = walker.settled(value)
                if settled is None:
                    open_.append(value)
                    ends.append(at_end(walker, env, operand) if value[1] and value[2] else None)
                    continue
                value = settled
            if value is wanted:
                return wanted
        if wanted and len(open_) < len(test.values) and None not in ends:
            return any(ends)
        if len(open_) < 2:
            return open_[0] if open_ else not wanted
        return walker.join(wanted, open_)
    return condition(walker, env, test, around)


def match(walker: Walker, node: ast.Match, env: Env) -> str:
    """Walk a `match`."""
    subject = evaluate(walker, env, node.subject)
    for case in node.cases:
        pattern = case.pattern
        fits: bool | None = None
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
            fits = True
            if pattern.name:
                env.set(pattern.name, subject)
        elif isinstance(pattern, ast.MatchValue):
            wanted = evaluate(walker, env, pattern.value)
            if isinstance(subject, Num) and isinstance(wanted, Num):
                fits = subject.value == wanted.value
            elif isinstance(subject, (str, bool)) and type(subject) is type(wanted):
                fits = subject == wanted
        elif isinstance(pattern, ast.MatchSingleton) and not isinstance(subject, Thing):
            fits = subject is pattern.value
        if fits is False:
            continue
        if fits is None:
            name = subject.key if isinstance(subject, Thing) else text(node.subject)
            fits = walker.decide(f"{name} matches {ast.dump(pattern)}", varies(subject))
        if fits and case.guard is not None:
            guard = truth(walker, env, case.guard)
            fits = guard if isinstance(guard, bool) else walker.decide(*guard[:2]) == guard[2]
        if fits:
            return walker.block(case.body, env)
    return ""
