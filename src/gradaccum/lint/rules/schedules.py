"""GA305, GA311, GA312: when schedules step, and in what unit they were planned."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.lint.facts import Facts, View, common_loop, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.rules.plans import numbers, plan_of, planned, turns
from gradaccum.lint.walk.trace import Event, Loop
from gradaccum.lint.walk.values import Num, Seq, Thing, Value

__all__ = ["GLOBAL", "RULES"]


def scheduler_early(facts: Facts, view: View) -> Iterator[Hit]:
    """GA305."""
    if facts.opaque or len(facts.views) != 1 or not facts.schedulers:
        return
    usual = view.usual()
    hooked = bool(view.windows) and "hook" in view.windows[0].step.flags
    if usual < 2 and not hooked:
        return
    order = {id(event): index for index, event in enumerate(facts.trace.events)}
    for window in view.windows:
        if hooked or len(window.fresh) != usual:
            continue
        start, end = order[id(window.fresh[0])], order[id(window.step)]
        inside = [
            event
            for event in facts.schedulers
            if start < order[id(event)] < end and event.loops and _free(event, view)
        ]
        for event in inside:
            same = [other for other in inside if other.node is event.node]
            if len(same) < usual - 1 or _in_micro_batches(event, facts):
                continue
            if not any(mark.loops == event.loops for mark in window.fresh):
                continue
            yield hit(
                "GA305",
                event,
                "the scheduler is told the loss of a single micro-batch, and loses its patience "
                "N times too fast"
                if "args" in event.flags
                else "the scheduler steps once a micro-batch, the optimizer once a window: "
                "the schedule runs N times too fast",
                (window.step, "the update"),
            )
            return


def _free(event: Event, view: View) -> bool:
    """Whether a scheduler goes on by itself: it is not told where it stands, nor held back."""
    thing = event.thing
    if "args" in event.flags and not (
        "loss" in event.flags and thing is not None and thing.key.endswith("OnPlateau")
    ):
        return False
    if "prepared" in view.optimizer.uses:
        # a scheduler that Accelerate prepared as well waits; of one that we do not know, who knows
        return thing is not None and thing.node is not None and "prepared" not in thing.uses
    return True


def _in_micro_batches(event: Event, facts: Facts) -> bool:
    """Whether a schedule is planned for the micro-batches that it steps after."""
    thing = event.thing
    if thing is None:
        return True
    plans = [*planned(thing), *(plan_of(value) for value in (*thing.args, *thing.kwargs.values()))]
    if any(plan.over & facts.trace.window_keys for plan in plans):
        return True
    count = turns(facts, event.loops[-1])
    return any(plan.over & count and not plan.under for plan in plans)


def scheduler_in_hook(facts: Facts) -> Iterator[Hit]:
    """GA305 inside an optimizer-in-backward hook."""
    divisors = {
        item.key for event in facts.backwards if event.tensor for item in event.tensor.divisors
    }
    if not divisors & facts.trace.window_keys:
        return
    if any("accelerate" in event.flags for event in facts.backwards):
        return
    for event in facts.schedulers:
        if "hook" in event.flags:
            yield hit("GA305", event, "this hook steps the scheduler in every backward, "
                      "although the loss is divided for a window")  # fmt: skip
            return


def ahead_of_skip(facts: Facts) -> Iterator[Hit]:
    """GA311."""
    scaled: Event | None = None
    for event in facts.trace.events:
        if event.kind == "step" and "scaler" in event.flags:
            scaled = event
        elif event.kind == "scaler_update" and "watched" in event.flags:
            return
        elif event in facts.schedulers and scaled is not None and event.loops:
            if event.loops == scaled.loops and set(event.unsure) <= set(scaled.unsure):
                yield hit("GA311", event, "the scaler may have skipped the step, and the scheduler "
                          "goes on all the same",
                          (scaled, "skipped if a gradient overflowed"))  # fmt: skip
                return


def floor_length(facts: Facts, view: View) -> Iterator[Hit]:
    """GA312."""
    usual = view.usual()
    if usual < 2 or facts.opaque:
        return
    flushed = [
        window
        for window in view.windows[1:]
        if 0 < len(window.fresh) < usual and common_loop(window.step, window.fresh[-1]) is not None
    ]
    if not flushed:
        return
    for event in facts.schedulers:
        thing = event.thing
        if thing is None or thing.node is None or "planned" in thing.uses:
            continue
        if any(_floored(value) for value in (*thing.args, *thing.kwargs.values())):
            made = Event("built", thing.node, event.path, (), thing)
            yield hit("GA312", made, "the schedule is planned for `len // N` updates an epoch, but "
                      "the loop also steps the short window at its end",
                      (flushed[0].step, "one update more an epoch"))  # fmt: skip
            return


def _floored(value: Value, depth: int = 0) -> bool:
    if isinstance(value, Num):
        return "floor" in value.tags
    if isinstance(value, Seq):
        return depth < 4 and any(_floored(item, depth + 1) for item in value.items)
    if isinstance(value, Thing):
        return depth < 4 and any(_floored(part, depth + 1) for part in value.args)
    return False


def planned_in_batches(facts: Facts, view: View) -> Iterator[Hit]:
    """GA312: a schedule that steps once an update, planned for as many steps as micro-batches."""
    if facts.opaque or facts.driven or len(facts.views) != 1:
        return
    windows = {
        item.key for mark in facts.backwards for item in tensor_of(mark).divisors
    } & facts.trace.window_keys
    for thing, steps in _by_thing(facts):
        event = steps[-1]
        if thing.node is None or not event.loops or not _once_a_window(facts, view, steps):
            continue
        if _chosen(thing):
            continue
        count = turns(facts, event.loops[-1])
        for plan in planned(thing):
            if plan.under:
                continue
            times = plan.over & windows
            if not times and not plan.over & count:
                continue
            made = Event("built", thing.node, _home(facts, thing), (), thing)
            what = (
                "the length of the schedule is multiplied by the window, but it steps once an "
                "update: it gets no further than the N-th part of its way"
                if times
                else "the schedule is planned in micro-batches, but steps once an update: "
                "it gets no further than the N-th part of its way"
            )
            yield hit("GA312", made, what, (event, "one step for a whole window"))
            return


def _chosen(thing: Thing) -> bool:
    """Whether a setting names the schedule: many are constant then, and have no length."""
    if thing.key.split(".")[-1] != "get_scheduler":
        return False
    name = thing.args[0] if thing.args else thing.kwargs.get("name")
    return not isinstance(name, str)


def _by_thing(facts: Facts) -> list[tuple[Thing, list[Event]]]:
    """The schedules that step by themselves, each with its steps."""
    found: dict[int, tuple[Thing, list[Event]]] = {}
    for event in facts.schedulers:
        if event.thing is not None:
            found.setdefault(id(event.thing), (event.thing, []))[1].append(event)
    return [pair for pair in found.values() if not any("args" in e.flags for e in pair[1])]


def _home(facts: Facts, thing: Thing) -> str:
    """The file that a schedule is made in."""
    return facts.trace.made_in.get(id(thing.node), "")


def _once_a_window(facts: Facts, view: View, steps: list[Event]) -> bool:
    """Whether a schedule steps in the loop of the passes, with the optimizer, once a window.

    Passes whose gradients were cleared too early count as well: the window is as long with them.
    """
    marks, wanted = {id(event) for event in facts.backwards}, {id(event) for event in steps}
    passes: list[Event] = []
    counts: list[int] = []
    for event in facts.trace.events:
        if id(event) in marks:
            passes.append(event)
        elif id(event) in wanted:
            around = [loop.node for loop in event.loops]
            if not passes or any([loop.node for loop in mark.loops] != around for mark in passes):
                return False
            counts.append(len({mark.loops for mark in passes}))
            passes = []
    usual = max(set(counts), key=counts.count, default=0)
    return (
        len(counts) > 1
        and usual > 1
        and counts.count(usual) * 2 > len(counts)
        and abs(len(view.windows) - len(counts)) < 2
    )


def planned_apart(facts: Facts) -> Iterator[Hit]:
    """GA312: a schedule planned in batches that steps once an epoch, or the other way round."""
    if facts.opaque or facts.driven:
        return
    looped = [event for event in facts.backwards if event.loops]
    inner = {tuple([loop.node for loop in event.loops]): event for event in looped}
    for thing, steps in _by_thing(facts):
        if thing.node is None:
            continue
        for mark in inner.values():
            made = Event("built", thing.node, _home(facts, thing), (), thing)
            if _each_epoch(steps, mark) and _counts_batches(facts, thing, mark):
                yield hit("GA312", made, "the schedule is planned in batches, but steps once an "
                          "epoch: it hardly gets past its beginning",
                          (steps[0], "one step for a whole epoch"))  # fmt: skip
                return
            epochs = _each_batch(facts, steps, mark)
            if epochs is not None and _counts_epochs(facts, thing, epochs, mark):
                yield hit("GA312", made, "the schedule is planned in epochs, but steps in every "
                          "batch: it is through long before they are",
                          (steps[0], "a step in each iteration"))  # fmt: skip
                return


def _each_epoch(steps: list[Event], mark: Event) -> bool:
    """Whether a schedule steps only around the loop of a backward, once a turn of an outer one."""
    around = mark.loops[:-1]
    nodes = [loop.node for loop in around]
    turns_seen = {event.loops for event in steps}
    return len(turns_seen) == len(steps) and all(
        bool(event.loops) and [loop.node for loop in event.loops] == nodes[: len(event.loops)]
        for event in steps
    )


def _counts_batches(facts: Facts, thing: Thing, mark: Event) -> bool:
    """Whether a plan is a multiple of how often the loop of a backward turns."""
    count = {name for name in turns(facts, mark.loops[-1]) if name.startswith("len(")}
    return any(plan.over & count and plan.under <= facts.trace.window_keys
               for plan in planned(thing))  # fmt: skip


def _each_batch(facts: Facts, steps: list[Event], mark: Event) -> Loop | None:
    """The loop over epochs around a schedule that steps in every iteration of a backward's loop.

    Or in every window; where it steps more often than the optimizer, that is a fault of its own.
    """
    if len(mark.loops) < 2:
        return None
    node = mark.loops[-1].node
    own = [event for event in steps if event.loops and event.loops[-1].node is node]
    if not own or len(own) != len(steps):
        return None
    entry = own[0].loops[-1].entry
    there = [event for event in own if event.loops[-1].entry == entry]
    updates = [
        event
        for event in facts.trace.events
        if event.kind == "step" and event.loops and event.loops[-1].entry == entry
        and any(view.optimizer is event.thing for view in facts.views)
    ]  # fmt: skip
    if len(there) < 2 or len({event.loops for event in updates}) != len(there):
        return None
    return own[0].loops[-2]


def _counts_epochs(facts: Facts, thing: Thing, epochs: Loop, mark: Event) -> bool:
    """Whether a plan is made of the number of epochs, by value or by name, and of nothing else."""
    over = facts.trace.over.get(epochs.entry)
    if not isinstance(over, Thing) or over.kind != "range":
        return False
    known = turns(facts, epochs)
    inner = turns(facts, mark.loops[-1])
    names = _spelled(epochs.node.iter.args if isinstance(epochs.node, ast.For)
                     and isinstance(epochs.node.iter, ast.Call) else [])  # fmt: skip
    for value, written in numbers(thing):
        plan = plan_of(value)
        if plan.over & inner or any(name.startswith("len(") for name in plan.over):
            return False
        if plan.over and plan.over <= known and not plan.scaled and not plan.under:
            return True
        if written is not None and not plan.over and not _scales(written):
            own = _spelled([written])
            if own and own <= names:
                return True
    return False


def _spelled(nodes: list[ast.expr]) -> set[str]:
    """The names and attributes in expressions, but not what is called."""
    found: set[str] = set()
    for node in nodes:
        todo: list[ast.AST] = [node]
        while todo:
            part = todo.pop()
            if isinstance(part, (ast.Name, ast.Attribute)):
                found.add(ast.unparse(part))
            elif isinstance(part, ast.Call):
                todo += part.args
            else:
                todo += ast.iter_child_nodes(part)
    return found


def _scales(node: ast.expr) -> bool:
    """Whether an expression multiplies by a number greater than 1."""
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult)
        and any(isinstance(side, ast.Constant) and isinstance(side.value, (int, float))
                and side.value > 1 for side in (part.left, part.right))
        for part in ast.walk(node)
    )  # fmt: skip


RULES = (scheduler_early, floor_length, planned_in_batches)
GLOBAL = (ahead_of_skip, scheduler_in_hook, planned_apart)
