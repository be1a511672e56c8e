"""GA312 where Lightning runs the loop: when it steps a schedule, and in what unit that is planned.

A trainer steps a schedule once an epoch, or once an update if its `interval` is `step`; it does so
by itself, so no walk of a loop would show it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gradaccum.lint.files.program import Module, Program
from gradaccum.lint.files.slicing import slice_module
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.rules.plans import Plan, planned
from gradaccum.lint.walk.calls import instantiate
from gradaccum.lint.walk.classes import find_method
from gradaccum.lint.walk.evaluate import evaluate
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Class, Num, Seq, Thing, Value
from gradaccum.lint.walk.walker import Exhausted, Walker

__all__ = ["configured_schedules"]

_METHOD = "configure_optimizers"
_WORDS = (_METHOD, "training_step")
_BY_HAND = ("lr_scheduler_step", "lr_schedulers", "manual_backward", "automatic_optimization")
"""What shows that a class steps its schedules itself."""
_BATCHES = re.compile(r"len\(=?.*loader.*\)|.*\.estimated_stepping_batches", re.IGNORECASE)
_UPDATES = re.compile(r".*\.estimated_stepping_batches")
_EPOCHS = re.compile(r".*(^|\.)(max|num|n)_?epochs")


def configured_schedules(program: Program, module: Module) -> Iterator[Hit]:
    """Faults in what the Lightning modules of one file configure."""
    source = program.source(module.path)
    if not all(word in source for word in _WORDS) or "sched" not in source.lower():
        return
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and _is_automatic(node):
            yield from _of_class(program, module, node)


def _is_automatic(node: ast.ClassDef) -> bool:
    """Whether a class leaves its loop to the trainer."""
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    if not methods >= set(_WORDS) or "lr_scheduler_step" in methods:
        return False
    return not any(
        isinstance(part, ast.Attribute) and part.attr in _BY_HAND for part in ast.walk(node)
    )


def _of_class(program: Program, module: Module, node: ast.ClassDef) -> Iterator[Hit]:
    walker = Walker(program, [], {}, slices={module.path: slice_module(module, program)})
    walker.paths.append(module.path)
    scope = walker.scope(module)
    home = Class(node, scope, module)
    try:
        owner = instantiate(walker, node, home, [], {})
        method = find_method(walker, home, _METHOD)
        if method is None:
            return
        method.owner = owner
        pairs = list(_pairs(walker.function(method, [], {})))
    except Exhausted:
        return
    for thing, interval in pairs:
        what = _wrong(walker, module, planned(thing), interval)
        path = walker.trace.made_in.get(id(thing.node)) if thing.node is not None else None
        if what and path and thing.node is not None:
            made = Event("built", thing.node, path, (), thing)
            yield hit("GA312", made, what)


def _pairs(value: Value, depth: int = 0) -> Iterator[tuple[Thing, str]]:
    """The schedules in what `configure_optimizers` returns, each with its interval."""
    if isinstance(value, Seq) and depth < 4:
        for item in value.items:
            yield from _pairs(item, depth + 1)
    elif isinstance(value, Thing) and value.kind == "scheduler":
        yield value, "epoch"
    elif isinstance(value, Thing) and value.kind == "dict" and depth < 4:
        inner = value.attrs.get("scheduler")
        interval = value.attrs.get("interval", "epoch")
        if isinstance(inner, Thing) and inner.kind == "scheduler":
            if isinstance(interval, str):
                yield inner, interval
        else:
            yield from _pairs(value.attrs.get("lr_scheduler"), depth + 1)


def _wrong(walker: Walker, module: Module, plans: list[Plan], interval: str) -> str:
    """What is wrong with a plan, given when its schedule steps."""
    for plan in plans:
        if plan.under:
            continue
        batches = [name for name in plan.over if _BATCHES.fullmatch(name)]
        if interval == "epoch" and batches:
            return (
                "the schedule is planned in batches, but Lightning steps it once an epoch, unless "
                "its `interval` is `step`: it hardly gets past its beginning"
            )
        if interval != "step":
            continue
        if batches and not any(map(_UPDATES.fullmatch, batches)) and _accumulates(walker, module):
            return (
                "the schedule is planned in micro-batches, but Lightning steps it once an update: "
                "it gets no further than the N-th part of its way"
            )
        if plan.over and not plan.scaled and all(map(_EPOCHS.fullmatch, plan.over)):
            return (
                "the schedule is planned in epochs, but its `interval` is `step`: it is through "
                "long before they are"
            )
    return ""


def _accumulates(walker: Walker, module: Module) -> bool:
    """Whether a trainer of this file is told to accumulate."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        for word in node.keywords if name.endswith("Trainer") else ():
            if word.arg == "accumulate_grad_batches":
                value = evaluate(walker, walker.scope(module), word.value)
                return isinstance(value, Thing) or (isinstance(value, Num) and value.value > 1)
    return False
