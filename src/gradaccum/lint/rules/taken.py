"""Which parameters an optimizer was given, and when: GA304 and GA309."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.lint.facts import Facts, View
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Thing

__all__ = ["GLOBAL", "RULES"]


def rebuilt(facts: Facts, view: View) -> Iterator[Hit]:
    """GA304."""
    optimizer = view.optimizer
    if facts.driven:
        return  # the loop is ours
    if optimizer.kind != "optimizer" or optimizer.depth == 0 or optimizer.node is None:
        return
    if "load_state_dict" in optimizer.uses or not optimizer.models:
        return
    if any(model.depth >= optimizer.depth or model.kind == "leaf" for model in optimizer.models):
        return
    name = optimizer.key.split(".")[-1].lower()
    if "sgd" in name and "momentum" not in optimizer.kwargs:
        return
    twins = [
        other
        for other in facts.views
        if other.optimizer is not optimizer
        and other.optimizer.node is optimizer.node
        and other.optimizer.models == optimizer.models
    ]
    made = [event for event in facts.trace.events if event.kind == "built"
            and event.thing is optimizer]  # fmt: skip
    if made and "hook" in made[0].flags:
        return
    if made and _begins_anew(facts, optimizer):
        return
    if not _sees_gradients(facts, optimizer):
        return  # a plot of the schedule, say
    if twins and made and view.windows and view.windows[0].step.loops:
        yield hit(
            "GA304",
            made[0],
            "the optimizer is built anew in every iteration, so its moments start from zero",
            (view.windows[0].step, "it steps here"),
        )


def _sees_gradients(facts: Facts, optimizer: Thing) -> bool:
    """Whether anything fills gradients from the first one of these to the last step of one."""
    events = facts.trace.events
    own = [at for at, event in enumerate(events) if event.thing is not None
           and event.thing.node is optimizer.node and event.thing.kind == "optimizer"]  # fmt: skip
    fills = ("backward", "set_grad", "autograd_grad", "escape")
    return any(event.kind in fills for event in events[own[0] : own[-1]]) if own else True


def _begins_anew(facts: Facts, optimizer: Thing) -> bool:
    """Whether what it optimizes is another model, or another set of parameters, each time.

    The old moments are of weights that are gone, or of fewer parameters.
    """
    models = optimizer.models
    inside = [event for event in facts.trace.events if len(event.loops) >= optimizer.depth]
    for event in inside:
        thing = event.thing
        if thing is None or event.kind not in ("weights_set", "escape", "freeze", "unfreeze"):
            continue
        if not (
            thing in models
            or thing.models & models
            or any(thing.key.startswith((f"{model.key}.", f"{model.key}[")) for model in models)
        ):
            continue
        if event.kind != "escape":
            return True
        if any(step.kind == "step" and len(step.loops) > len(event.loops)
               and step.loops[: len(event.loops)] == event.loops for step in inside):  # fmt: skip
            return True  # what was handed the model before it is trained may begin it anew
    return False


def unfrozen_late(facts: Facts) -> Iterator[Hit]:
    """GA309."""
    frozen: set[str] = set()
    filtered: list[Thing] = []
    built: Event | None = None
    events = facts.trace.events
    for index, event in enumerate(events):
        if event.kind == "freeze" and event.thing is not None:
            frozen.add(event.thing.key)
        elif event.kind == "built" and event.thing is not None and frozen:
            for value in event.thing.args:
                if isinstance(value, Thing) and value.kind == "params" and "filtered" in value.uses:
                    filtered.extend(value.models)
                    built = event
        elif event.kind == "unfreeze" and event.thing is not None and built is not None:
            key = event.thing.key
            if key in frozen and any(key.startswith(model.key) for model in filtered):
                if _taken_up(facts, built, index, filtered):
                    return
                yield hit("GA309", event, "unfrozen after the optimizer took only what required "
                          "grad at that time: these parameters are never stepped",
                          (built, "the optimizer is built here"))  # fmt: skip
                return


def _taken_up(facts: Facts, built: Event, at: int, models: list[Thing]) -> bool:
    """Whether an optimizer takes what is unfrozen at `at` all the same.

    It gets a group of its own, before or after; or one that is built afterwards takes all that
    requires grad by then.
    """
    for index, event in enumerate(facts.trace.events):
        if event.kind == "add_group":
            return True
        if index > at and event.kind == "built" and event is not built and event.thing is not None:
            if not event.thing.models or not event.thing.models.isdisjoint(models):
                return True
    return False


RULES = (rebuilt,)
GLOBAL = (unfrozen_late,)
