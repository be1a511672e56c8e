"""Facts about one walk: who the optimizers are, and what each of their windows was made of."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from gradaccum.lint.walk.trace import Event, Loop, Trace
from gradaccum.lint.walk.values import Tensor, Thing

__all__ = ["FINITE", "Facts", "View", "Window", "counted", "facts_of"]


@dataclass(slots=True)
class Window:
    """What one `step()` of one optimizer consumed."""

    step: Event
    fresh: list[Event]
    """Backward passes since the step before, that are still in the gradients."""
    lost: list[tuple[Event, Event]]
    """Backward passes since the step before, each with the zeroing that wiped it."""
    held: list[Event]
    """Backward passes that an earlier step consumed and nobody cleared."""
    since: list[Event]
    """All events of this optimizer since the step before."""


@dataclass(slots=True)
class View:
    """One walk as one optimizer sees it."""

    optimizer: Thing
    windows: list[Window]
    events: list[Event]
    left: list[Event]
    """Backward passes after the last step, still in the gradients."""

    def sizes(self) -> list[int]:
        """Micro-batches that each step consumed."""
        return [len(window.fresh) for window in self.windows]

    def usual(self, step: Event | None = None) -> int:
        """The window length that occurs most, at the line of `step` if given; 0 without windows."""
        sizes = [
            len(window.fresh)
            for window in self.windows
            if step is None or window.step.node is step.node
        ]
        return max(set(sizes), key=lambda size: (sizes.count(size), size)) if sizes else 0


@dataclass(slots=True)
class Facts:
    """One walk, read."""

    trace: Trace
    views: list[View]
    opaque: bool
    """Code we cannot see runs backward or steps: nothing can be said of windows."""
    driven: bool
    repeated: bool
    backwards: list[Event] = field(default_factory=list)
    schedulers: list[Event] = field(default_factory=list)
    together: list[frozenset[Thing]] = field(default_factory=list)
    """Optimizers that always step at once: two halves of one model, and so one to a window."""


FINITE = ("norm@", "isfinite", "isnan", "isinf")
"""What a condition on whether a loss or the gradients are finite is made of."""
_SCHEDULER_WORD = re.compile(r"sched", re.IGNORECASE)
_OPTIMIZER_WORD = re.compile(r"optim|(^|[._])opt([._\d]|$)", re.IGNORECASE)
_BESIDE_WORD = re.compile(r"prof|timer|meter|env|bar\b|sched|track|log|callback", re.IGNORECASE)
"""What also steps beside training: profilers, environments, progress bars."""
_KNOWN_BY = frozenset({"zero_grad", "param_groups", "scaler_step", "unscale", "scheduled"})


def facts_of(trace: Trace, driven: bool, repeated: bool) -> Facts:
    """Read one walk."""
    optimizers, schedulers, opaque = _roles(trace)
    backwards = [event for event in trace.events if event.kind == "backward"]
    opaque = opaque or any("engine" in event.flags for event in backwards)
    facts = Facts(trace, [], opaque, driven, repeated, backwards)
    facts.schedulers = [
        event for event in trace.events if event.kind == "step" and event.thing in schedulers
    ]
    for optimizer in optimizers:
        facts.views.append(_view(trace, optimizer, optimizers))
    facts.together = _together(trace, optimizers)
    return facts


def _together(trace: Trace, optimizers: list[Thing]) -> list[frozenset[Thing]]:
    """Groups of optimizers between whose steps no backward pass and no decision ever lies."""
    if len(optimizers) < 2:
        return []
    runs: list[tuple[list[Thing], tuple[Loop, ...], tuple[str, ...]]] = []
    open_ = False
    for event in trace.events:
        if event.kind == "backward":
            open_ = False
        elif event.kind == "step" and event.thing in optimizers:
            if open_ and runs[-1][1:] == (event.loops, event.unsure):
                runs[-1][0].append(event.thing)
            else:
                runs.append(([event.thing], event.loops, event.unsure))
            open_ = True
    groups = {frozenset(things) for things, _, _ in runs if len(things) > 1}
    return [
        group
        for group in groups
        if all(group == frozenset(things) and len(things) == len(group)
               for things, _, _ in runs if group & set(things))
    ]  # fmt: skip


def _roles(trace: Trace) -> tuple[list[Thing], list[Thing], bool]:
    optimizers: list[Thing] = []
    schedulers: list[Thing] = []
    doubtful: list[Thing] = []
    opaque = False
    backwards = any(event.kind == "backward" for event in trace.events)
    for event in trace.events:
        thing = event.thing
        if event.kind != "step" or thing is None:
            continue
        if thing in optimizers or thing in schedulers or thing in doubtful:
            continue
        if thing.uses & {"backward"}:
            opaque = True
        elif thing.varies and thing.node is None and "hook" not in event.flags:
            # picked anew in each iteration: nobody can say which one it is
            opaque = opaque or bool(thing.uses & _KNOWN_BY)
        elif thing.kind == "optimizer":
            optimizers.append(thing)
        elif thing.kind == "scheduler" or "from_optimizer" in thing.uses:
            schedulers.append(thing)
        elif thing.kind in ("unknown", "instance"):
            names = (thing.key.split(".")[-1], _spelled(event.node))
            if thing.uses & _KNOWN_BY:
                optimizers.append(thing)
            elif any(_SCHEDULER_WORD.search(name) for name in names):
                schedulers.append(thing)
            elif any(_OPTIMIZER_WORD.search(name) for name in names):
                optimizers.append(thing)
            elif not any(_BESIDE_WORD.search(name) for name in names):
                doubtful.append(thing)
    # Where gradients are made and one unnamed thing steps beside them, that is the optimizer.
    if trace.named:
        doubtful = []
    if backwards and not optimizers and len(doubtful) == 1 and _beside(trace, doubtful[0]):
        optimizers.append(doubtful[0])
    return optimizers, schedulers, opaque


def _spelled(node: ast.AST) -> str:
    """What the thing that steps is called where it steps."""
    func = node.func if isinstance(node, ast.Call) else None
    holder = func.value if isinstance(func, ast.Attribute) else None
    return getattr(holder, "attr", getattr(holder, "id", ""))


def _beside(trace: Trace, thing: Thing) -> bool:
    before: Event | None = None
    for event in trace.events:
        if event.kind == "backward":
            before = event
        elif event.kind == "step" and event.thing is thing:
            if "args" in event.flags or before is None:
                return False
            return before.loops == event.loops and before.path == event.path
    return False


def twins(left: Thing, right: Thing) -> bool:
    """Whether two optimizers are one line's, made anew in each iteration of a loop."""
    return left.depth > 0 and left.depth == right.depth and left.key == right.key


def _life(trace: Trace, optimizer: Thing, optimizers: list[Thing]) -> tuple[int, int]:
    """Between which events an optimizer lives that is made anew in a loop."""
    family = [other for other in optimizers if other is optimizer or twins(other, optimizer)]
    if len(family) == 1:
        return 0, len(trace.events)
    spans: dict[int, tuple[int, int]] = {}
    for index, event in enumerate(trace.events):
        if event.thing is not None and event.kind in ("zero", "step", "unscale"):
            start, _ = spans.get(id(event.thing), (index, index))
            spans[id(event.thing)] = start, index
    own = spans.get(id(optimizer))
    if own is None:
        return 0, 0
    others = [spans[id(other)] for other in family if other is not optimizer and id(other) in spans]
    if any(start < own[1] and own[0] < end for start, end in others):
        return 0, 0  # they are used in turns, so nobody can say whose a backward is
    built = [
        index
        for index, event in enumerate(trace.events)
        if event.kind == "built" and event.thing is optimizer
    ]
    before = max((end + 1 for _, end in others if end < own[0]), default=0)
    start = max(before, built[0]) if built else before
    later = [start for start, _ in others if start > own[1]]
    return start, min(later) if later else len(trace.events)


def reaches(event: Event, optimizer: Thing, others: list[Thing]) -> bool | None:
    """Whether a backward surely fills this optimizer's gradients and no other's; None: maybe."""
    tensor = event.tensor
    models = tensor.models if tensor is not None else frozenset()
    own = optimizer.models
    others = [other for other in others if other is optimizer or not twins(other, optimizer)]
    if len(others) == 1:
        apart = bool(models) and bool(own) and not models & own
        return not (apart and _plain(models) and _plain(own))
    if not models or not own:
        return None
    hit = [other for other in others if not other.models or other.models & models]
    if optimizer not in hit:
        return False
    return True if hit == [optimizer] else None


def _plain(models: frozenset[Thing]) -> bool:
    """Models of torch's own layers: nothing can hide in them."""
    return all(
        model.kind == "leaf" or (model.kind == "model" and "__class__" not in model.attrs)
        for model in models
    )


def _vague(models: frozenset[Thing]) -> bool:
    return any(model.kind == "unknown" for model in models)


def zeroes(event: Event, optimizer: Thing, others: list[Thing]) -> bool | None:
    """Whether a zeroing clears this optimizer's gradients; None: maybe."""
    thing = event.thing
    if thing is optimizer or _groups_of(optimizer, thing) or _groups_of(thing, optimizer):
        return True
    others = [other for other in others if other is optimizer or not twins(other, optimizer)]
    if thing is not None and thing.kind == "optimizer":
        if thing.models and optimizer.models and thing.models & optimizer.models:
            return None
        return False
    if thing is not None and thing in others:
        return False
    if thing is not None and optimizer.models:
        if thing in optimizer.models or thing.models & optimizer.models:
            return True
        if thing.kind == "model" and not _vague(optimizer.models):
            return None if optimizer.models & thing.models else False
    return True if len(others) == 1 else None


def _groups_of(outer: Thing | None, inner: Thing | None) -> bool:
    """Whether one optimizer is made of the groups of another, so that they share parameters."""
    return outer is not None and any(
        isinstance(part, Thing) and part.kind == "param_groups" and inner in part.args
        for part in outer.args
    )


_OWN = frozenset({"clip", "unscale", "grad_scale", "set_grad", "scaler_update", "escape",
                  "param_write", "zero", "step", "backward", "autograd_grad"})  # fmt: skip


def _view(trace: Trace, optimizer: Thing, optimizers: list[Thing]) -> View:
    view = View(optimizer, [], [], [])
    fresh: list[Event] = []
    lost: list[tuple[Event, Event]] = []
    held: list[Event] = []
    since: list[Event] = []
    start, end = _life(trace, optimizer, optimizers)
    for index, event in enumerate(trace.events):
        if event.kind not in _OWN or not start <= index < end:
            continue
        if event.kind == "backward":
            if reaches(event, optimizer, optimizers) is False:
                continue
            fresh.append(event)
        elif event.kind == "zero":
            cleared = zeroes(event, optimizer, optimizers)
            if cleared is False:
                continue
            lost.extend((mark, event) for mark in fresh)
            fresh, held = [], []
        elif event.kind == "step":
            if event.thing is not optimizer:
                continue
            view.windows.append(Window(event, fresh, lost, list(held), since))
            held.extend(fresh)
            fresh, lost, since = [], [], []
            view.events.append(event)
            continue
        elif event.kind == "unscale":
            if event.thing is not optimizer:
                continue
        elif event.kind == "clip" and not _clips(event, optimizer, optimizers):
            continue
        since.append(event)
        view.events.append(event)
    view.left = fresh
    return view


def _clips(event: Event, optimizer: Thing, optimizers: list[Thing]) -> bool:
    thing = event.thing
    if len(optimizers) == 1:
        return True
    models = (thing.models | {thing}) if thing is not None else frozenset()
    return bool(models & optimizer.models)


def certain(view: View, facts: Facts, event: Event) -> bool:
    """Whether a backward is surely this optimizer's and nobody else's."""
    own = view.optimizer
    others = [other.optimizer for other in facts.views]
    partners = next((group for group in facts.together if own in group), None)
    if partners is not None:
        if tensor_of(event).models and own.models:
            if not tensor_of(event).models & own.models:
                return False
        elif len({mark.node for mark in facts.backwards}) > 1:
            return False  # one loss for each, perhaps
        others = [other for other in others if other is own or other not in partners]
    return reaches(event, own, others) is True


def owned(view: View, facts: Facts, window: Window) -> bool:
    """Whether a window's passes are surely this optimizer's.

    Either the loss reaches no other optimizer's parameters, or the window is fenced: this optimizer
    clears, the passes run, it steps, and no other optimizer steps in between.
    """
    if all(certain(view, facts, event) for event in window.fresh):
        return True
    opened = [event for event in window.since if event.kind == "zero"
              and event.thing is view.optimizer]  # fmt: skip
    if not opened or not window.fresh:
        return False
    events = facts.trace.events
    start, end = events.index(opened[-1]), events.index(window.step)
    if start > events.index(window.fresh[0]):
        return False
    return not any(event.kind == "step" and event.thing is not view.optimizer
                   and any(other.optimizer is event.thing for other in facts.views)
                   for event in events[start:end])  # fmt: skip


def common_loop(first: Event, second: Event) -> Loop | None:
    """The innermost loop that holds both events."""
    found = None
    for left, right in zip(first.loops, second.loops, strict=False):
        if left.node is not right.node:
            break
        found = left
    return found


def is_model_root(node: ast.AST) -> bool:
    """Whether a loop is the one we made by calling a function again and again."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def counted(facts: Facts) -> bool:
    """Whether the windows of a walk are as long as the script says.

    Where it does not say, the walk chose a length, and no message may state it as a fact.
    """
    return not facts.trace.window_keys


def tensor_of(event: Event) -> Tensor:
    """The loss of a backward."""
    return event.tensor if event.tensor is not None else Tensor()
