"""GA5xx, GA7xx and GA8xx: graphs, modes and precision."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.lint.facts import Facts, View, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.evaluate import text
from gradaccum.lint.walk.trace import SET, Event
from gradaccum.lint.walk.values import Class, Thing

__all__ = ["GLOBAL"]


def running_loss(facts: Facts) -> Iterator[Hit]:
    """GA501."""
    losses = [event for event in facts.backwards if tensor_of(event).forwards]
    for event in facts.trace.events:
        if event.kind not in ("running", "store") or event.tensor is None or not event.loops:
            continue
        tensor = event.tensor
        if not tensor.graph or not tensor.forwards or event.flags & {"no_grad", "inference_mode"}:
            continue
        if event.kind == "running" and "again" not in event.flags:
            continue
        if event.kind == "store" and ("kept" not in event.flags or _emptied(facts, event)):
            continue
        if any("isinstance(" in key for key in event.unsure):
            continue  # what is no tensor is added as it is
        own = [
            mark
            for mark in losses
            if tensor.forwards <= tensor_of(mark).forwards
            and mark.loops[: len(event.loops)] == event.loops
            and _parts(event) <= _parts(mark)
            and "gradient" not in mark.flags
        ]
        if not own or any("running" in tensor_of(mark).flags for mark in own):
            continue
        if any(len(mark.loops) < len(event.loops) for mark in own):
            continue
        yield hit(
            "GA501",
            event,
            "this keeps the graph of every batch alive: memory grows with each iteration",
            (own[0], "the loss's own backward"),
        )
        return


def _emptied(facts: Facts, store: Event) -> bool:
    """Whether a list is made anew for each update, or is cut in the loop: it cannot grow."""
    depth = store.thing.depth if store.thing is not None else 0
    kept = getattr(getattr(store.node, "func", None), "value", None)
    if kept is not None and any(_empties(loop.node, text(kept)) for loop in store.loops[depth:]):
        return True
    return any(
        0 < len(window.step.loops) <= depth
        and window.step.loops == store.loops[: len(window.step.loops)]
        for view in facts.views
        for window in view.windows
    )


def _empties(loop: ast.AST, name: str) -> bool:
    """Whether a loop takes something out of a list, or binds its name anew."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("clear", "pop", "popleft") and text(node.func.value) == name:
                return True
        elif isinstance(node, (ast.Assign, ast.Delete)):
            for target in node.targets:
                held = target.value if isinstance(target, ast.Subscript) else target
                whole = isinstance(node, ast.Delete) or held is target
                if whole and text(held) == name:
                    return True
    return False


def _parts(event: Event) -> set[str]:
    """Which of an unknown call's results a tensor is: the others may well have no graph."""
    return {flag for flag in tensor_of(event).flags if flag.startswith("part")}


def retained(facts: Facts) -> Iterator[Hit]:
    """GA502."""
    if facts.opaque:
        return
    events = facts.trace.events
    for index, event in enumerate(events):
        if event.kind != "backward" or "retain_graph" not in event.flags:
            continue
        tensor = tensor_of(event)
        if "running" in tensor.flags and "again" in tensor.flags:
            sums = [other for other in events[:index] if other.kind == "running"
                    and other.loops == event.loops]  # fmt: skip
            if sums and "again" in sums[-1].flags:
                yield hit(
                    "GA502",
                    event,
                    "the running total is differentiated each time, so earlier losses count "
                    "again and again; `retain_graph` only hides it",
                )
                return
        if not tensor.forwards or tensor.flags & {"opaque", "running"} or not event.loops:
            continue
        if "others" in event.flags:
            continue
        whole = any(tensor.models <= model.models | {model} for model in tensor.models)
        if not whole or len(facts.backwards) < 2:
            continue
        if any(other.node is not event.node for other in facts.backwards):
            continue
        if _each_its_own(event):
            continue  # one loss after the other, of one graph perhaps
        if any(other.kind in ("autograd_grad", "store") for other in events):
            continue
        if any(_uses(other, event) for other in events[index + 1 :]):
            continue
        if len(tensor.forwards) == 1 or tensor.forwards <= _made_beside(facts, event):
            yield hit(
                "GA502",
                event,
                "nothing uses this graph again: `retain_graph` only keeps it in memory, "
                "or hides that a tensor of an earlier iteration is still in it",
            )
            return


def _each_its_own(event: Event) -> bool:
    """Whether a loop goes over losses, and differentiates each."""
    loop, func = event.loops[-1].node, getattr(event.node, "func", None)
    owner = getattr(func, "value", None)
    if not isinstance(loop, ast.For) or not isinstance(owner, ast.Name):
        return False
    return any(isinstance(part, ast.Name) and part.id == owner.id for part in ast.walk(loop.target))


def _made_beside(facts: Facts, event: Event) -> set[int]:
    """The forward passes of the same iteration: what they made is made anew in the next."""
    found: set[int] = set()
    for other in facts.trace.events:
        if other.kind == "forward" and other.loops[: len(event.loops)] == event.loops:
            found |= tensor_of(other).forwards
    return found


def _uses(other: Event, event: Event) -> bool:
    return other.tensor is not None and bool(other.tensor.forwards & tensor_of(event).forwards)


def graph_kept(facts: Facts) -> Iterator[Hit]:
    """GA502: `create_graph` in the training backward itself."""
    for view in facts.views:
        for window in view.windows:
            for event in window.fresh:
                if "create_graph" in event.flags and event.loops == window.step.loops:
                    reads = any(
                        other.kind in ("escape", "autograd_grad", "set_grad", "grad_scale")
                        for other in window.since[window.since.index(event) :]
                    )
                    if not reads and "closure" not in window.step.flags and _torch(view):
                        yield hit(
                            "GA502",
                            event,
                            "`create_graph` makes the gradients themselves part of a graph that "
                            "nobody differentiates",
                            (window.step, "they are only stepped"),
                        )
                        return


def _torch(view: View) -> bool:
    # AdaHessian and its kin do differentiate the gradients
    return view.optimizer.key in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam")


def detached(facts: Facts) -> Iterator[Hit]:
    """GA503."""
    leaves = {
        id(event.tensor): event for event in facts.trace.events if event.kind == "requires_grad"
    }
    for event in facts.trace.events:
        if event.kind == "unfreeze" and event.thing is not None and event.loops:
            if "differentiated" in event.thing.uses and event.thing.varies:
                yield hit("GA503", event, "a computed value is made a leaf: its backward reaches "
                          "no parameter")  # fmt: skip
                return
        if event.kind == "requires_grad" and event.tensor is not None:
            loss = event.tensor
            backs = [
                mark
                for mark in facts.backwards
                if tensor_of(mark).made is loss.made and loss.made is not None
            ]
            if backs and (loss.forwards or not loss.graph):
                yield hit(
                    "GA503",
                    event,
                    "a computed loss is made a leaf: its backward reaches no parameter",
                    (backs[0], "backward"),
                )
                return
    for event in facts.backwards:
        loss = tensor_of(event)
        if loss.graph or id(loss) in leaves or "opaque" in loss.flags:
            continue
        if any(
            other.kind == "forward" and other.path != event.path for other in facts.trace.events
        ):
            continue  # what another file does on the way is not followed closely enough
        if "detached" in loss.flags or "blind" in loss.flags:
            yield hit("GA503", event, "this loss has no graph: no parameter gets a gradient")
            return
    if any("inference" in tensor_of(event).flags for event in facts.backwards):
        for event in facts.trace.events:
            if event.kind == "forward" and "inference_mode" in event.flags:
                yield hit(
                    "GA503",
                    event,
                    "made under `inference_mode`, which autograd refuses later; "
                    "`no_grad` is what is meant",
                )
                return


def penalty_without_graph(facts: Facts) -> Iterator[Hit]:
    """GA503: a term made of `torch.autograd.grad` without `create_graph`."""
    for event in facts.trace.events:
        if event.kind != "ungraphed_term" or not event.loops or event.tensor is None:
            continue
        if event.flags & {"no_grad", "inference_mode"}:
            continue
        used = [mark for mark in facts.backwards if tensor_of(mark).forwards
                and event.tensor.forwards <= tensor_of(mark).forwards
                and mark.loops[: len(event.loops)] == event.loops]  # fmt: skip
        if used:
            yield hit("GA503", event, "one term comes from `torch.autograd.grad` without "
                      "`create_graph=True`: it is a constant, and no parameter learns from it",
                      (used[0], "this backward gets nothing from that term"))  # fmt: skip
            return


def post_hook_parameter(facts: Facts) -> Iterator[Hit]:
    """GA308: a post-accumulate hook that takes its parameter for the gradient."""
    for event in facts.trace.events:
        if event.kind == "hook_write":
            yield hit(
                "GA308",
                event,
                "a post-accumulate hook is given the parameter, not its gradient: "
                "this changes the weight",
            )
            return


def recomputed(facts: Facts) -> Iterator[Hit]:
    """GA504 and GA505: what a second forward does differently."""
    for event in facts.trace.events:
        if event.kind == "checkpoint_side":
            yield hit("GA504", event, "this runs twice under activation checkpointing: once in the "
                      "forward and once in the backward")  # fmt: skip
        elif event.kind == "checkpoint" and "no_rng" in event.flags and "dropout" in event.flags:
            yield hit("GA505", event, "the backward recomputes this with other dropout masks than "
                      "the loss was computed with")  # fmt: skip


def left_in_eval(facts: Facts) -> Iterator[Hit]:
    """GA703."""
    mode: dict[Thing, Event] = {}
    trained: set[Thing] = set()
    restored = {
        event.thing
        for event in facts.trace.events
        if event.kind == "mode" and "eval" not in event.flags and event.loops
    }
    for event in facts.trace.events:
        thing = event.thing
        if thing is None:
            continue
        if event.kind == "mode":
            mode[thing] = event
        elif event.kind == "forward" and not event.flags & {"no_grad", "inference_mode"}:
            last = mode.get(thing)
            if last is None or "eval" not in last.flags:
                trained.add(thing)
            elif (
                thing in restored
                or _trains_itself(thing)
                or any(_inside(part, thing) for part in restored)
            ):
                continue
            elif event.loops[: len(last.loops)] == last.loops and last.path == event.path:
                restored.add(thing)  # set just before it is used: somebody wants to train so
            elif thing in trained and last.loops and event.loops and _by_settings(facts, last):
                if any(thing in tensor_of(mark).models for mark in facts.backwards):
                    if len(last.loops) <= len(event.loops):
                        yield hit(
                            "GA703",
                            last,
                            "put into eval mode and never back: training goes on without dropout "
                            "and with frozen BatchNorm statistics",
                            (event, "the next training forward"),
                        )
                        return


def _trains_itself(thing: Thing) -> bool:
    """Whether its class says what `train()` does, and may keep a part in eval mode."""
    home = thing.attrs.get("__class__")
    return isinstance(home, Class) and any(
        isinstance(node, ast.FunctionDef) and node.name == "train" for node in home.node.body
    )


def _by_settings(facts: Facts, event: Event) -> bool:
    """Whether only the script's settings decide that an event comes, whatever the data are."""
    return not any(
        facts.trace.decisions.get(key, (True, True))[1]
        for key in event.unsure
        if not key.startswith(SET)
    )


def _inside(part: Thing | None, whole: Thing) -> bool:
    """A part that is put back by itself: what stays in eval mode is meant to."""
    if part is None or part is whole:
        return False
    return part in whole.models or part.key.startswith(f"{whole.key}.")


def low_precision(facts: Facts) -> Iterator[Hit]:
    """GA801."""
    steps = any(event.kind == "step" for event in facts.trace.events)
    for event in facts.backwards:
        if not event.loops:
            continue
        loop = event.loops[-1]
        count = sum(1 for other in facts.backwards if other.loops and other.node is event.node
                    and other.loops[-1].entry == loop.entry)  # fmt: skip
        cleared = any(
            other.kind == "zero" and other.loops and other.loops[-1].entry == loop.entry
            for other in facts.trace.events
        )
        for model in () if cleared else tensor_of(event).models:
            if not steps and "grad" not in model.attrs:
                continue  # nobody reads these gradients: the passes are timed, or tested
            if "low" in model.uses and count > 1 and "many" in facts.trace.window_keys:
                yield hit(
                    "GA801",
                    event,
                    "many micro-batches are summed in a 16-bit type, which stops growing early",
                )
                return


def coupled(facts: Facts) -> Iterator[Hit]:
    """GA701 and GA702: what no split of a batch can equal."""
    seen: set[int] = set()
    for event in facts.backwards:
        loss = tensor_of(event)
        again = [other for other in facts.backwards if other.node is event.node]
        if not event.loops or len(again) < 2 or id(event.node) in seen:
            continue
        whole = bool(loss.divisors) or any(
            sum(mark.node is event.node for mark in window.fresh) > 1
            for view in facts.views
            for window in view.windows
        )
        if not whole:
            continue
        seen.add(id(event.node))
        if "similarity" in loss.flags:
            yield hit("GA702", event, "this loss compares the samples of one micro-batch with each "
                      "other, so the split changes the objective")  # fmt: skip
        if any("BatchNorm" in model.key for model in loss.models):
            yield hit("GA701", event, "BatchNorm takes its statistics from each micro-batch, so no "
                      "accumulation equals the whole batch")  # fmt: skip


GLOBAL = (
    coupled, recomputed, running_loss, retained, graph_kept, detached,
    penalty_without_graph, post_hook_parameter, left_in_eval, low_precision,
)  # fmt: skip
