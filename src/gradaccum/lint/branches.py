"""Conditions: which branch a walk takes, and which decisions that needs."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.arithmetic import condition
from gradaccum.lint.evaluate import evaluate, text
from gradaccum.lint.slicing import CORE, Slice
from gradaccum.lint.trace import Doubt
from gradaccum.lint.values import Env, Num, Thing, varies

if TYPE_CHECKING:
    from gradaccum.lint.walk import Walker

__all__ = ["branch", "match", "truth"]


_SPECIAL = CORE | {"ddp"}
_TRAINS = frozenset({"step", "backward", "manual_backward"})


def branch(walker: Walker, node: ast.If, env: Env) -> str:
    """Walk an `if`."""
    start = len(walker.trace.events)
    value = truth(walker, env, node.test, node)
    asked = [event for event in walker.trace.events[start:] if event.kind == "stream_length"]
    if asked and walker.module_slice(env.module).mentions[id(node)] & {"step"}:
        walker.note("step_by_length", asked[0].node, asked[0].thing)
    if isinstance(value, bool):
        return walker.block(node.body if value else node.orelse, env)
    key, changes, positive = value
    found = walker.module_slice(env.module)
    if _only_leaves(node.body, found):
        return walker.block(node.orelse, env)
    if node.orelse and _only_leaves(node.orelse, found):
        return walker.block(node.body, env)
    if not found.mentions[id(node)] & CORE and not _binds(node, found):
        walker.unsure.append("?" + key)
        try:
            signal = walker.block(node.body, env)
            return "" if signal else walker.block(node.orelse, env)
        finally:
            walker.unsure.pop()
    matters = bool(found.mentions[id(node)] & CORE) or id(node) in found.forks
    usual = not _skips(node.body, found) if positive else True
    if key in walker.joints and not walker.joints[key][0] and usual and not node.orelse:
        usual = bool(found.mentions[id(node)] & _SPECIAL)  # several things at once are rarely so
    if node.orelse and usual and _trains(node.body, found) < _trains(node.orelse, found):
        usual = not positive
    taken = walker.decide(key, changes, matters, usual) == positive
    walker.unsure.append(key)
    try:
        return walker.block(node.body if taken else node.orelse, env)
    finally:
        walker.unsure.pop()


def _trains(body: list[ast.stmt], found: Slice) -> bool:
    """Whether a branch holds a backward pass."""
    return any(found.mentions[id(node)] & {"backward", "manual_backward"} for node in body)


def _only_leaves(body: list[ast.stmt], found: Slice) -> bool:
    """Whether a branch does nothing but leave: an early stop, which says nothing of the loop."""
    kept = [node for node in body if id(node) in found.keep]
    return (
        bool(kept)
        and isinstance(kept[-1], (ast.Return, ast.Break, ast.Continue, ast.Raise))
        and not any(found.mentions[id(node)] & CORE for node in kept)
    )


def _skips(body: list[ast.stmt], found: Slice) -> bool:
    """Whether a branch leaves without training: it clears, as for a loss that is NaN, or looks."""
    kept = [node for node in body if id(node) in found.keep]
    out = bool(kept) and isinstance(kept[-1], ast.Return)
    return (
        bool(kept)
        and isinstance(kept[-1], (ast.Return, ast.Break, ast.Continue))
        and not any(
            found.mentions[id(node)] & ({"backward", "manual_backward"} if out else _TRAINS)
            for node in kept
        )
    )


def _binds(node: ast.If, found: Slice) -> bool:
    return any(
        id(child) in found.keep and not isinstance(child, ast.Expr)
        for child in (*node.body, *node.orelse)
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
        for operand in test.values:
            value = truth(walker, env, operand, around)
            if not isinstance(value, bool):
                settled = walker.settled(value)
                if settled is None:
                    open_.append(value)
                    continue
                value = settled
            if value is wanted:
                return wanted
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
