"""GA6xx: what ranks exchange, and when."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from gradaccum.lint.facts import Facts, View, Window, certain, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Thing

__all__ = ["GLOBAL", "RULES"]


def synced_each(facts: Facts, view: View) -> Iterator[Hit]:
    """GA601."""
    trace = facts.trace
    if facts.opaque or any(event.kind == "sync_toggle" for event in trace.events):
        return
    wrapped = _wrapped(facts)
    if not wrapped:
        return
    for window in view.windows:
        usual = view.usual(window.step)
        if usual < 2 or len(window.fresh) < usual:
            continue
        reached = all(_reached(view, facts, event, wrapped) for event in window.fresh)
        if not reached and not _one_loss(facts, window):
            continue
        spots = [event.spot for event in window.fresh]
        again = [event for event in window.fresh if spots.count(event.spot) > 1]
        if not again or "hook" in window.step.flags:
            continue
        early = again[0]
        if any("unsynced" in tensor_of(event).flags for event in window.fresh):
            continue
        if {"no_sync", "accumulate"} & early.flags or "unsynced" in tensor_of(early).flags:
            continue
        models = tensor_of(early).models or view.optimizer.models
        if models and not models & wrapped:
            continue
        if any(item.value == 1 for item in tensor_of(early).divisors):
            continue  # the script refuses to accumulate with several ranks
        if "accelerate" in early.flags or "fabric" in early.flags:
            continue
        yield hit(
            "GA601",
            _both_passes(facts, early, wrapped),
            "every micro-batch synchronises the gradients of all ranks; once a window is enough",
            (window.step, "the update"),
        )
        return


def _one_loss(facts: Facts, window: Window) -> bool:
    """Whether one line differentiates for all optimizers, once an iteration."""
    nodes = {event.node for event in facts.backwards}
    return len(nodes) == 1 and len({event.loops for event in window.fresh}) == len(window.fresh)


def _both_passes(facts: Facts, mark: Event, wrapped: set[Thing]) -> Event:
    """Where `no_sync` would stand: the call with both passes, if the backward is in a helper."""
    events = facts.trace.events
    models = tensor_of(mark).models & wrapped
    forwards = [event for event in events[: events.index(mark)]
                if event.kind == "forward" and event.thing in models]  # fmt: skip
    if not forwards:
        return mark
    shared = 0
    for one, other in zip(forwards[-1].calls, mark.calls, strict=False):
        if one is not other:
            break
        shared += 1
    if shared == len(mark.calls):
        return mark
    node, path = mark.calls[shared]
    return replace(mark, node=node, path=path)


def _reached(view: View, facts: Facts, event: Event, wrapped: set[Thing]) -> bool:
    """Whether a backward surely synchronises parameters of this optimizer: others may as well."""
    known = tensor_of(event).models & view.optimizer.models & wrapped
    return bool(known) or certain(view, facts, event)


def _wrapped(facts: Facts) -> set[Thing]:
    found: set[Thing] = set()
    for event in facts.trace.events:
        if event.kind not in ("forward", "backward"):
            continue
        things = [event.thing] if event.thing else []
        if event.tensor is not None:
            things.extend(event.tensor.models)
        found.update(thing for thing in things if "ddp" in thing.uses)
    return found


def forward_outside(facts: Facts) -> Iterator[Hit]:
    """GA602."""
    wrapped = _wrapped(facts)
    for event in facts.backwards:
        if "no_sync" not in event.flags or "fabric" in event.flags:
            continue
        loss = tensor_of(event)
        if "unsynced" not in loss.flags and loss.forwards and loss.models & wrapped:
            yield hit(
                "GA602",
                event,
                "the forward ran outside `no_sync`, and it is the forward that decides: "
                "this backward synchronises all the same",
            )
            return


def last_unsynced(facts: Facts, view: View) -> Iterator[Hit]:
    """GA603."""
    if facts.opaque or any(event.kind == "sync_toggle" for event in facts.trace.events):
        return
    for window in view.windows:
        if len(window.fresh) < 2 or len(window.fresh) != view.usual(window.step):
            continue
        if not all(certain(view, facts, event) for event in window.fresh):
            continue
        quiet = ["unsynced" in tensor_of(event).flags for event in window.fresh]
        if quiet[-1] and not all(quiet) and "fabric" not in window.fresh[-1].flags:
            yield hit(
                "GA603",
                window.fresh[-1],
                "the last backward before the step runs under `no_sync`, and an earlier one does "
                "not: the ranks step with different gradients",
                (window.step, "the update"),
            )
            return


def flush_unsynced(facts: Facts, view: View) -> Iterator[Hit]:
    """GA603: the short window at the end steps on what no rank has exchanged."""
    if facts.opaque or any(event.kind == "sync_toggle" for event in facts.trace.events):
        return
    full = [window for window in view.windows if len(window.fresh) == view.usual() > 1]
    if not full or any(_quiet(window.fresh[-1]) for window in full):
        return
    ways = {"escape", "grad_scale", "set_grad"}
    for window in view.windows:
        if not 0 < len(window.fresh) < view.usual() or not all(map(_quiet, window.fresh)):
            continue
        if any(event.kind in ways for event in window.since) or window.fresh[-1].unsure:
            continue
        if all(certain(view, facts, event) for event in window.fresh):
            yield hit("GA603", window.fresh[-1], "the last, short window runs under `no_sync` as a "
                      "whole: the ranks step with different gradients",
                      (window.step, "the step of the short window"))  # fmt: skip
            return


def _quiet(event: Event) -> bool:
    return "unsynced" in tensor_of(event).flags and "fabric" not in event.flags


def set_late(facts: Facts) -> Iterator[Hit]:
    """GA603: `require_backward_grad_sync` set after the forward that reads it."""
    events = facts.trace.events
    wrapped = _wrapped(facts)
    for index, event in enumerate(events):
        if event.kind != "sync_toggle" or event.thing not in wrapped or not event.loops:
            continue
        turn = [other for other in events if other.loops == event.loops]
        before = [
            other
            for other in turn
            if events.index(other) < index
            and other.kind in ("sync_toggle", "forward")
            and other.thing is event.thing
        ]
        after = next((other for other in events[index + 1 :]
                      if other.kind in ("forward", "backward", "sync_toggle")), None)  # fmt: skip
        if not before or any(other.kind == "sync_toggle" for other in before):
            continue
        if after is None or after.kind != "backward" or after.loops != event.loops:
            continue
        if before[-1].tensor is not None and before[-1].tensor.forwards & tensor_of(after).forwards:
            yield hit("GA603", event, "set after the forward, and it is the forward that reads it: "
                      "each micro-batch does what the one before was told",
                      (before[-1], "the forward decides whether this backward synchronises"),
                      (after, "backward"))  # fmt: skip
            return


def past_wrapper(facts: Facts) -> Iterator[Hit]:
    """GA604."""
    events = facts.trace.events
    if facts.opaque or any(event.kind in ("escape", "grad_hook") for event in events):
        return
    if not any(view.windows for view in facts.views):
        return
    passes = {next(iter(tensor_of(event).forwards), 0): event for event in events
              if event.kind == "forward"}  # fmt: skip
    for event in facts.backwards:
        made = [passes[number] for number in sorted(tensor_of(event).forwards) if number in passes]
        through = [one for one in made if one.thing is not None and "ddp" in one.thing.uses]
        if not through or not event.loops or not all("past_ddp" in one.flags for one in through):
            continue
        after = events[events.index(event) :]
        upto = next((at for at, one in enumerate(after) if one.kind == "step"), None)
        ways = {"set_grad", "grad_scale"}
        if upto is not None and not any(one.kind in ways for one in after[:upto]):
            yield hit("GA604", through[0], "`.module` is called past DistributedDataParallel, so "
                      "nothing exchanges these gradients: each rank trains a model of its own",
                      (event, "this backward synchronises nothing"))  # fmt: skip
            return


def first_synced(facts: Facts) -> Iterator[Hit]:
    """GA603: where the step itself is not seen."""
    runs: dict[tuple[int, object], list[Event]] = {}
    for event in facts.backwards:
        if event.loops:
            runs.setdefault((event.loops[-1].entry, event.node), []).append(event)
    events = facts.trace.events
    for run in runs.values():
        quiet = ["unsynced" in tensor_of(event).flags for event in run[:2]]
        if quiet != [False, True] or run[0].flags & {"fabric", "accelerate"}:
            continue
        if tensor_of(run[0]).models != tensor_of(run[1]).models:
            continue
        between = events[events.index(run[0]) : events.index(run[1])]
        ends = {"escape", "grad_scale", "param_write", "set_grad", "step", "zero"}
        if not any(event.kind in ends for event in between) and not _steps_somehow(run[0]):
            yield hit("GA603", run[0], "the first micro-batch synchronises and the next do not: "
                      "`no_sync` counts one off, and the window's last one is not synchronised",
                      (run[1], "not synchronised"))  # fmt: skip
            return


_STEP_WORD = re.compile(r"step|optim|update", re.IGNORECASE)


def _steps_somehow(event: Event) -> bool:
    """Whether the loop around calls something that may well step each time."""
    return any(
        isinstance(node, ast.Call)
        and _STEP_WORD.search(getattr(node.func, "attr", getattr(node.func, "id", "")))
        for node in ast.walk(event.loops[-1].node)
    )


RULES = (synced_each, last_unsynced, flush_unsynced)
GLOBAL = (first_synced, forward_outside, past_wrapper, set_late)
