"""What the length of a schedule was made of: loaders, epochs, windows, and what divides them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gradaccum.lint.facts import Facts
from gradaccum.lint.walk.evaluate import key_of
from gradaccum.lint.walk.sizes import KNOWN
from gradaccum.lint.walk.trace import Loop
from gradaccum.lint.walk.values import Env, Func, Num, Seq, Thing, Value

__all__ = ["Plan", "numbers", "plan_of", "planned", "turns", "walked_over"]

_KINDS: dict[str, dict[str, int]] = {
    "ConstantLR": {"total_iters": 2},
    "CosineAnnealingLR": {"T_max": 1},
    "CosineAnnealingWarmRestarts": {"T_0": 1},
    "CyclicLR": {"step_size_up": 3, "step_size_down": 4},
    "LinearLR": {"total_iters": 3},
    "MultiStepLR": {"milestones": 1},
    "OneCycleLR": {"total_steps": 2},
    "PolynomialLR": {"total_iters": 1},
    "SequentialLR": {"milestones": 2},
    "StepLR": {"step_size": 1},
    "get_scheduler": {"num_warmup_steps": 2, "num_training_steps": 3},
}
"""Where the schedules of pytorch and transformers take their lengths, after the optimizer."""
_WARMUP = {"num_warmup_steps": 1, "num_training_steps": 2, "warmup_steps": 1, "t_total": 2}
_LENGTH = re.compile(
    r"(num_|n_)?(total|train(ing)?|scheduler?|max)_?(steps|iters|iterations|updates)|t_total|T_max",
    re.IGNORECASE,
)
"""What other schedules call the number of all their steps."""
_WHOLE = frozenset({"ceil", "float", "floor", "int", "max", "round"})
"""Calls that leave a number what it counts."""
_OTHER = frozenset({"floor", "#windows", "#epochs"})
_BESIDE = (ast.Mult, ast.FloorDiv, ast.Mod, ast.Attribute)
"""What makes another number of a step than the step itself."""
_DEEP = 8


@dataclass(slots=True)
class Plan:
    """A number, as a product of what it counts."""

    over: frozenset[str] = frozenset()
    """What it is a multiple of: `len(...)` of a loader, or settings by their keys."""
    under: frozenset[str] = frozenset()
    """What it was divided by."""
    scaled: bool = False
    """A written number greater than 1 is among its factors."""

    def times(self, other: Plan) -> Plan:
        """Its product with another one."""
        under = self.under | other.under
        return Plan((self.over | other.over) - under, under, self.scaled or other.scaled)


_NOTHING = Plan()


def plan_of(value: Value, depth: int = 0) -> Plan:
    """What a number was made of."""
    if isinstance(value, Num):
        under = frozenset(tag[1:] for tag in value.tags if tag[0] == "/")
        over = frozenset(tag for tag in value.tags if tag[0] != "/") - under - _OTHER
        return Plan(over, under, not value.tags and value.value > 1)
    if not isinstance(value, Thing) or depth > _DEEP:
        return _NOTHING
    if len(value.args) == 2 and value.uses & {"times", "over", "plus"} and value.node is None:
        left, right = (plan_of(part, depth + 1) for part in value.args)
        if "times" in value.uses:
            return left.times(right)
        if "plus" in value.uses:
            return Plan(left.over | right.over, left.under | right.under, left.scaled)
        below = right.over or frozenset((key_of(value.args[1]),))
        return Plan(left.over - below, left.under | below | right.under, left.scaled)
    if value.args and isinstance(value.node, ast.Call) and _named(value.node.func) in _WHOLE:
        parts = [plan_of(part, depth + 1) for part in value.args]
        over = frozenset().union(*(part.over for part in parts))
        under = frozenset().union(*(part.under for part in parts))
        return Plan(over, under, any(part.scaled for part in parts))
    return Plan(frozenset((value.key,)))


def _named(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def planned(thing: Thing, depth: int = 0) -> list[Plan]:
    """The lengths that a schedule was made with."""
    found = [plan_of(value) for value, _ in _lengths(thing)]
    if thing.key == "OneCycleLR":
        pair = [_given(thing, name, at) for name, at in (("epochs", 3), ("steps_per_epoch", 4))]
        if None not in pair:
            found.append(plan_of(pair[0]).times(plan_of(pair[1])))
    for value in (*thing.args, *thing.kwargs.values()):
        if isinstance(value, Func):
            found += _of_function(value)
        elif isinstance(value, Thing) and value.kwargs and key_of(value).startswith("partial"):
            found += [
                plan_of(part) for name, part in value.kwargs.items() if _LENGTH.fullmatch(name)
            ]
        elif isinstance(value, Seq) and depth < 2:
            for part in value.items:
                if isinstance(part, Thing) and part.kind == "scheduler":
                    found += planned(part, depth + 1)
    return found


def numbers(thing: Thing) -> Iterator[tuple[Value, ast.expr | None]]:
    """The lengths that a schedule of pytorch was made with, each with how it is written."""
    if thing.key in _KINDS and "__class__" not in thing.attrs:
        yield from _lengths(thing)


def _lengths(thing: Thing) -> Iterator[tuple[Value, ast.expr | None]]:
    own = "__class__" in thing.attrs
    places = {} if own else _KINDS.get(thing.key)
    if places is None:
        places = _WARMUP if "warmup" in thing.key.lower() else {}
    for name, at in places.items():
        value = _given(thing, name, at)
        for part in value.items if isinstance(value, Seq) else [value]:
            if part is not None:
                yield part, _written(thing, name, at)
    if own or not places:
        for name, value in thing.kwargs.items():
            if _LENGTH.fullmatch(name):
                yield value, None


def _given(thing: Thing, name: str, at: int) -> Value:
    if name in thing.kwargs:
        return thing.kwargs[name]
    return thing.args[at] if at < len(thing.args) else None


def _written(thing: Thing, name: str, at: int) -> ast.expr | None:
    if not isinstance(thing.node, ast.Call):
        return None
    spelled = {word.arg: word.value for word in thing.node.keywords}
    if name in spelled:
        return spelled[name]
    args = thing.node.args
    plain = not any(isinstance(part, ast.Starred) for part in args)
    return args[at] if plain and at < len(args) else None


def _of_function(func: Func) -> list[Plan]:
    """What a function of the step divides the step by."""
    spec = func.node.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    step = names[-1] if names else ""
    found: list[Plan] = []
    for node in ast.walk(func.node):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        inside = list(ast.walk(node.left))
        if not any(isinstance(part, ast.Name) and part.id == step for part in inside):
            continue
        if any(isinstance(part, _BESIDE) for part in inside):
            continue
        plan = _expression(node.right, func.env)
        if plan is not None:
            found.append(plan)
    return found


def _expression(node: ast.expr, env: Env) -> Plan | None:
    """What an expression in a closure was made of, from the names around it."""
    if isinstance(node, ast.Constant):
        return plan_of(Num(node.value)) if isinstance(node.value, (int, float)) else None
    if isinstance(node, ast.Name):
        home = env.find(node.id)
        return None if home is None else plan_of(home.names[node.id])
    if isinstance(node, ast.Attribute):
        home = env.find(node.value.id) if isinstance(node.value, ast.Name) else None
        owner = home.names[node.value.id] if home is not None else None  # type: ignore[attr-defined]
        value = owner.attrs.get(node.attr) if isinstance(owner, Thing) else None
        return plan_of(value) if value is not None else None
    if isinstance(node, ast.Call) and _named(node.func) in _WHOLE and not node.keywords:
        parts = [_expression(part, env) for part in node.args]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts):
            return None
        return Plan(
            frozenset().union(*(part.over for part in known)),
            frozenset().union(*(part.under for part in known)),
        )
    if isinstance(node, ast.BinOp):
        left, right = _expression(node.left, env), _expression(node.right, env)
        if left is None or right is None:
            return None
        if isinstance(node.op, ast.Mult):
            return left.times(right)
        if isinstance(node.op, (ast.Add, ast.Sub)):
            return Plan(left.over | right.over, left.under | right.under, left.scaled)
        if isinstance(node.op, (ast.Div, ast.FloorDiv)):
            below = right.over or frozenset(("?",))
            return Plan(left.over - below, left.under | below | right.under, left.scaled)
    return None


def walked_over(facts: Facts, entry: int) -> Iterator[Value]:
    """What a loop draws from: the lists, loaders and ranges below what is wrapped around them."""
    todo: list[tuple[Value, int]] = [(facts.trace.over.get(entry), 0)]
    while todo:
        value, depth = todo.pop()
        if depth > 3:
            continue
        yield value
        if not isinstance(value, Thing) or value.kind == "range":
            continue
        called = value.kind == "unknown" and isinstance(value.node, ast.Call)
        if called or value.kind in ("enumerate", "zip", "wrapped", "cycle", "generator"):
            todo += [(part, depth + 1) for part in value.args]


def turns(facts: Facts, loop: Loop) -> frozenset[str]:
    """What counts the turns of a loop: `len(...)` of what it walks over, or its bound."""
    found: set[str] = set()
    for value in walked_over(facts, loop.entry):
        if isinstance(value, Thing) and value.kind == "range":
            bound = value.args[1] if len(value.args) > 1 else value.args[0] if value.args else None
            plan = plan_of(bound)
            if not plan.under and not plan.scaled and len(value.args) < 3:
                found |= plan.over
        elif isinstance(value, Thing) or (isinstance(value, Seq) and value.key):
            found |= {f"len({value.key})", f"{KNOWN}{value.key})"}
    return frozenset(found)
