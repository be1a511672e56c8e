"""Which parameters an optimizer was given, and when: GA301, GA304, GA306 and GA309."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.lint.facts import Facts, View, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.rules.modules import is_own, is_parameter
from gradaccum.lint.walk.evaluate import learns
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Class, Seq, Thing

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


def replaced_after(facts: Facts) -> Iterator[Hit]:
    """GA306 and GA309: what the optimizer was given is no longer what the model has."""
    events = facts.trace.events
    for index, event in enumerate(events):
        anew = event.kind == "weights_set" and "anew" in event.flags
        if event.thing is None or not (anew or event.kind == "part_replaced"):
            continue
        built = [one for one in events[:index] if one.kind == "built" and one.thing is not None
                 and event.thing in one.thing.models]  # fmt: skip
        later = any(one.kind in ("built", "add_group") for one in events[index:])
        trained = any(event.thing in tensor_of(mark).models for mark in facts.backwards
                      if events.index(mark) > index)  # fmt: skip
        if not built or later or not trained:
            continue
        if anew:
            yield hit("GA306", event, "`assign=True` puts new tensors in the place of the "
                      "parameters, and the optimizer still steps the old ones",
                      (built[-1], "the optimizer was given the old ones here"))  # fmt: skip
        else:
            yield hit("GA309", event, "this part is replaced after the optimizer was built: it "
                      "still holds the old parameters, and the new ones are never stepped",
                      (built[-1], "the optimizer is built here"))  # fmt: skip
        return


def in_two(facts: Facts) -> Iterator[Hit]:
    """GA301: parameters that two optimizers own, and both step with one gradient."""
    for one in facts.views:
        for other in facts.views:
            shared = _plainly(one.optimizer) & _plainly(other.optimizer)
            if one is other or not shared or facts.opaque:
                continue
            for window in other.windows:
                first = [before for before in one.windows if before.fresh
                         and before.fresh[-1] in window.fresh
                         and before.step.loops == window.step.loops
                         and tensor_of(before.fresh[-1]).models & shared]  # fmt: skip
                order = facts.trace.events
                if first and order.index(first[0].step) < order.index(window.step):
                    if any(event.kind == "zero" for event in order[
                        order.index(first[0].step) : order.index(window.step)]):  # fmt: skip
                        continue
                    yield hit("GA301", window.step, "a second optimizer steps the same parameters "
                              "with the same gradient: they move twice for one backward",
                              (first[0].step, "the first optimizer steps them here"),
                              (window.fresh[-1], "the only backward"))  # fmt: skip
                    return


def _plainly(optimizer: Thing) -> frozenset[Thing]:
    """The models all of whose parameters an optimizer was surely given."""
    first = optimizer.args[0] if optimizer.args else None
    if optimizer.kind != "optimizer" or "torch" not in optimizer.uses:
        return frozenset()
    if not isinstance(first, Thing) or first.kind != "params" or "filtered" in first.uses:
        return frozenset()
    if not first.key.endswith(".parameters()"):
        return frozenset()
    return frozenset(model for model in first.models if model.kind == "model")


def not_taken(facts: Facts) -> Iterator[Hit]:
    """GA309: a criterion, or another module, whose own parameters no optimizer was given."""
    owned = {part for event in facts.trace.events if event.kind == "built" and event.thing
             for part in (event.thing.models | {event.thing})}  # fmt: skip
    owned |= {part for view in facts.views for part in view.optimizer.models}
    if facts.opaque or not facts.views or not all(view.optimizer.models for view in facts.views):
        return
    if any(model.kind == "unknown" and model.args for model in owned):
        return
    touched = {
        event.thing
        for event in facts.trace.events
        if event.kind
        in ("escape", "freeze", "param_write", "set_grad", "add_group", "weights_set", "tie")
    }
    if any(event.kind == "add_group" for event in facts.trace.events):
        return
    evaluated = {event.thing for event in facts.trace.events
                 if event.kind == "mode" and "eval" in event.flags}  # fmt: skip
    called = {event.thing: event for event in facts.trace.events
              if event.kind == "forward" and event.loops}  # fmt: skip
    for mark in facts.backwards:
        reached = tensor_of(mark).models
        if not mark.loops or not reached & owned:
            continue
        for whole in reached & called.keys():
            assert whole is not None
            home = whole.attrs.get("__class__")
            if not isinstance(home, Class) or whole in owned | touched | evaluated:
                continue
            parts = [part for part in whole.attrs.values()
                     if isinstance(part, Thing) and part.kind == "leaf"]  # fmt: skip
            if not _has_parameter(home):
                continue
            if any(part in owned or part in touched for part in parts):
                continue
            if any(whole in model.models for model in owned | reached):
                continue
            yield hit("GA309", called[whole], "this module has parameters of its own, and no "
                      "optimizer was given them: they get gradients and never move",
                      (mark, "its backward reaches them"))  # fmt: skip
            return


_LOOKS = frozenset({"enumerate", "zip", "len", "reversed", "range"})
_REGISTERS = frozenset({"add_module", "register_module", "setattr", "register_parameter"})


def _has_parameter(home: Class) -> bool:
    """Whether a class makes a trained parameter of its own."""
    return any(
        isinstance(node, ast.Assign) and is_own(node.targets[0]) and is_parameter(node.value)
        for method in home.node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for node in ast.walk(method)
    )


def in_plain_list(facts: Facts) -> Iterator[Hit]:
    """GA309: layers in a list, where `parameters()` does not find them."""
    taken = {part for view in facts.views for part in _plainly(view.optimizer)}
    for event in facts.trace.events:
        holder = event.thing
        if event.kind != "unregistered" or holder is None or holder not in taken:
            continue
        name = event.node.attr if isinstance(event.node, ast.Attribute) else ""
        home, value = holder.attrs.get("__class__"), holder.attrs.get(name)
        if not isinstance(home, Class) or not isinstance(value, Seq):
            continue
        layers = [item for item in value.items if isinstance(item, Thing) and item.kind == "model"]
        lost = [item for item in layers if item not in holder.models and learns(item)]
        trained = any(holder in tensor_of(mark).models for mark in facts.backwards)
        if lost and trained and _only_walked(home, name):
            yield hit("GA309", event, "a plain list hides these layers from `parameters()`: "
                      "no optimizer steps them; `nn.ModuleList` is what is meant")  # fmt: skip
            return


def _only_walked(home: Class, name: str) -> bool:
    """Whether a class only walks over one of its lists, and registers nothing by hand."""
    reads = 0
    for node in ast.walk(home.node):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in _REGISTERS:
                return False
            given = [part.value if isinstance(part, ast.Starred) else part for part in node.args]
            if called not in _LOOKS and any(_named(part, name) for part in given):
                return False
        elif isinstance(node, ast.FunctionDef) and node.name in ("parameters", "named_parameters"):
            return False
        elif _named(node, name) and isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
            reads += 1
    return reads > 0


def _named(node: ast.AST, name: str) -> bool:
    return is_own(node) and getattr(node, "attr", "") == name


RULES = (rebuilt,)
GLOBAL = (unfrozen_late, replaced_after, in_two, not_taken, in_plain_list)
