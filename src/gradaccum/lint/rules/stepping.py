"""GA3xx: when optimizers step, and what is done to parameters beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gradaccum.lint.facts import Facts, View, Window, certain, common_loop, counted, is_model_root
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.multiples import leaves_whole
from gradaccum.lint.walk.trace import Event

__all__ = ["GLOBAL", "RULES"]


def step_without_backward(facts: Facts, view: View) -> Iterator[Hit]:
    """GA301."""
    if facts.opaque:
        return
    for before, window in zip(view.windows, view.windows[1:], strict=False):
        step = window.step
        if window.fresh or window.lost or not before.fresh:
            continue
        if any(
            event.kind in ("escape", "set_grad", "grad_scale", "zero") for event in window.since
        ):
            continue
        if step.loops != before.step.loops or "closure" in step.flags or "hook" in step.flags:
            continue
        if "scaler" in step.flags and "scaler" not in before.step.flags:
            continue  # GA406 says it better
        yield hit(
            "GA301",
            step,
            "steps again although no backward came since the last step",
            (before.step, "this step consumed the gradients"),
        )
        return


def tail(facts: Facts, view: View) -> Iterator[Hit]:
    """GA302."""
    if facts.opaque or facts.driven or not view.windows or facts.trace.trimmed:
        return
    if facts.trace.measured & facts.trace.window_keys:
        return
    usual = view.usual()
    if usual and any(number % usual == 0 for number in facts.trace.multiples):
        return  # all windows are whole
    if any(leaves_whole(loop.node) for window in view.windows for loop in window.step.loops):
        return
    if not all(certain(view, facts, event) for window in view.windows for event in window.fresh):
        return
    yield from _tail_wiped(view)
    yield from _tail_leaks(facts, view)
    yield from _tail_lost(facts, view)


def _tail_wiped(view: View) -> Iterator[Hit]:
    for window in view.windows:
        usual = view.usual(window.step)
        if usual < 2:
            continue
        outer = [
            (mark, zero)
            for mark, zero in window.lost
            if _after_loop(mark, zero) and len(mark.loops) == len(window.step.loops)
        ]
        if outer and len(outer) < usual and len(window.fresh) >= 1:
            mark, zero = outer[0]
            if "closure" in window.step.flags or mark.node not in [e.node for e in window.fresh]:
                continue
            yield hit(
                "GA302",
                zero,
                "the last, short window of an epoch is zeroed before it was ever stepped",
                (mark, "these micro-batches are computed for nothing"),
                (window.step, "the step comes only after a full window"),
            )
            return


def _after_loop(mark: Event, zero: Event) -> bool:
    """Whether a zeroing comes only once the loop of a pass is over: outside, or when it is anew."""
    if len(zero.loops) < len(mark.loops):
        return True
    at = len(mark.loops) - 1
    return (
        at >= 0
        and mark.loops[at].node is zero.loops[at].node
        and (mark.loops[at].entry != zero.loops[at].entry)
    )


def _tail_leaks(facts: Facts, view: View) -> Iterator[Hit]:
    if facts.repeated and facts.trace.guessed:
        return
    for window in view.windows:
        usual = view.usual(window.step)
        if usual < 2 or len(window.fresh) == usual or not window.step.loops:
            continue
        last = window.fresh[-1] if window.fresh else window.step
        at = min(len(window.step.loops), len(last.loops))
        if not at or window.step.loops[:at] != last.loops[:at]:
            continue
        entries = [event.loops[at - 1].entry for event in window.fresh if len(event.loops) >= at]
        each = _each(window.fresh)
        if len(set(entries)) < 2 or not each:
            continue
        first = view.windows[0].fresh
        anew = entries.count(entries[-1]) == len(first) and len({e.loops[:-1] for e in first}) == 1
        if len(window.fresh) < usual and not anew:
            continue  # the counter may well go on
        longer = "longer than all others"
        if facts.trace.exact and counted(facts):
            shorter = len(first if anew else range(usual)) // each
            longer = f"{len(window.fresh) // each} micro-batches instead of {shorter}"
        yield hit(
            "GA302",
            window.step,
            "the counter starts anew in each epoch but the gradients do not: the last, short "
            f"window leaks into the next epoch's first, which is then {longer}",
            (last, "backward adds to what is left over"),
        )
        return


def _each(passes: list[Event]) -> int:
    """Backward passes of one micro-batch; 0 if they differ in it."""
    if len({event.loops for event in passes}) == len(passes):
        return int(len({tuple([loop.node for loop in event.loops]) for event in passes}) == 1)
    counts = Counter(event.node for event in passes)
    return len(counts) if len(set(counts.values())) == 1 else 0


def _tail_lost(facts: Facts, view: View) -> Iterator[Hit]:
    usual = view.usual()
    if usual < 2 or not view.left or not facts.trace.exact or facts.repeated:
        return
    last = view.left[-1]
    step = view.windows[-1].step
    if not last.loops or common_loop(step, last) is None or len(view.left) >= usual:
        return
    if not view.windows[-1].fresh or last.node is not view.windows[-1].fresh[-1].node:
        return
    yield hit(
        "GA302",
        step,
        f"the last {len(view.left)} micro-batches are computed but never stepped",
        (last, "backward fills gradients that nobody consumes"),
    )


def off_by_one(facts: Facts, view: View) -> Iterator[Hit]:
    """GA303."""
    if facts.opaque or facts.driven or not view.windows or facts.trace.shifted:
        return
    if len(view.windows) < 3:
        yield from _at_first(facts, view)
        return
    first = view.windows[0].step
    if not first.loops or "hook" in first.flags:
        return
    runs: dict[int, list[Window]] = {}
    for window in view.windows:
        if window.step.loops and window.step.loops[-1].node is first.loops[-1].node:
            runs.setdefault(window.step.loops[-1].entry, []).append(window)
    run = runs[first.loops[-1].entry]
    sizes = [len(window.fresh) for window in run]
    later = {len(window.fresh) for window in view.windows[1:]}
    if len(run) < 3 < len(view.windows) and len(later) == 1:
        run = view.windows  # counted over all epochs
        sizes = [len(window.fresh) for window in run]
    if min(sizes) < 1 or max(sizes) < 2 or len({window.step.node for window in run}) != 1:
        return
    if len({event.node for window in run for event in window.fresh}) > 1 and not all(
        _each(window.fresh) == 1 for window in run
    ):
        return
    for window in run:
        if any(facts.trace.decisions.get(key, (True, True))[1] for key in window.step.unsure):
            return
        last = window.fresh[-1]
        if common_loop(window.step, last) != last.loops[-1] or window.lost:
            return
        if not all(certain(view, facts, event) for event in window.fresh):
            return
    if len(run) < 3 and not (len(run) == 2 and _again(list(runs.values()), sizes)):
        return
    full = sizes[1:-1] or sizes[1:]
    if sizes[0] < min(full) and len(set(full)) == 1:
        before = f"{sizes[0]} micro-batch{'es' if sizes[0] > 1 else ''}, all others after {full[0]}"
        if not counted(facts):
            before = "1 micro-batch" if sizes[0] == 1 else "fewer micro-batches"
            before += ", all others after a full window" if sizes[0] == 1 else " than all others"
        message = f"the first update comes after {before}"
    elif sizes[0] == full[0] + 1 and len(set(full)) == 1 and sizes[-1] <= full[0]:
        message = f"the first window holds {sizes[0]} micro-batches, all others {full[0]}"
        if not counted(facts):
            message = "the first window holds one micro-batch more than all others"
    elif (
        len(run) > 2
        and len(set(sizes[:-1])) > 1
        and (facts.trace.exact or sizes[:-1].count(1) >= len(run) / 2)
    ):
        shown = ": " + ", ".join(str(size) for size in sizes[:6]) + " micro-batches between updates"
        message = f"windows of unequal length{shown if counted(facts) else ''}"
        yield hit("GA303", first, message, (run[0].fresh[-1], "backward"))
        return
    else:
        return
    yield hit("GA303", first, f"off by one: {message}", (run[0].fresh[-1], "backward"))


def _at_first(facts: Facts, view: View) -> Iterator[Hit]:
    """A loop as short as the script says, that steps at its very first micro-batch."""
    window, rest = view.windows[0], [*(other.fresh for other in view.windows[1:]), view.left]
    step = window.step
    if not facts.trace.exact or facts.repeated or not counted(facts) or step.unsure:
        return
    if len(window.fresh) != 1 or window.lost or not step.loops or step.loops[-1].index:
        return
    if any(other.step.node is not step.node or other.lost for other in view.windows):
        return
    passes = [window.fresh[0], *(event for part in rest for event in part)]
    if len({event.node for event in passes}) > 1 or not all(
        event.loops and event.loops[-1].entry == step.loops[-1].entry
        and certain(view, facts, event) for event in passes
    ):  # fmt: skip
        return
    if len(rest[0]) > 1:
        yield hit("GA303", step, "off by one: the first update comes after 1 micro-batch, all "
                  "others after a full window", (passes[0], "backward"))  # fmt: skip


def _again(runs: list[list[Window]], sizes: list[int]) -> bool:
    """Whether each epoch has the windows of the first one, left-overs of the one before aside."""
    own = [
        [
            sum(event.loops[-1].entry == window.step.loops[-1].entry for event in window.fresh)
            for window in run
        ]
        for run in runs
        if run[0].fresh and all(event.loops for window in run for event in window.fresh)
    ]
    return len(own) > 1 and all(other == sizes for other in own)


def parameters_changed(facts: Facts, view: View) -> Iterator[Hit]:
    """GA307."""
    usual = view.usual()
    if facts.opaque or usual < 2 or not view.optimizer.models:
        return
    for window in view.windows:
        if len(window.fresh) != usual:
            continue
        writes = [
            event
            for event in window.since
            if event.kind == "param_write"
            and "grad" not in event.flags
            and event.thing is not None
            and event.thing.models & view.optimizer.models
        ]
        first = facts.trace.events.index(window.fresh[0])
        inside = [event for event in writes if facts.trace.events.index(event) > first]
        if inside:
            yield hit("GA307", inside[0], "parameters change inside the window, so its "
                      "micro-batches belong to different models",
                      (window.step, "the update"))  # fmt: skip
            return


def update_tracked(facts: Facts) -> Iterator[Hit]:
    """GA308."""
    for event in facts.trace.events:
        if event.kind != "param_write" or "grad" not in event.flags or "data" in event.flags:
            continue
        if event.flags & {"no_grad", "inference_mode"}:
            continue
        yield hit("GA308", event, "a leaf that requires grad is updated in place outside "
                  "`torch.no_grad()`, which torch refuses")  # fmt: skip


def written_unseen(facts: Facts) -> Iterator[Hit]:
    """GA308: a write through `.data` to what a graph still needs."""
    events = facts.trace.events
    for index, event in enumerate(events):
        if event.kind != "data_write" or event.tensor is None:
            continue
        for other in events[index + 1 :]:
            if other.kind == "forward" or other.loops[: len(event.loops)] != event.loops:
                break
            if other.kind == "backward" and other.tensor is not None:
                if other.tensor.models & event.tensor.models:
                    yield hit("GA308", event, "a write through `.data` hides from autograd: the "
                              "backward uses the new value in a graph of the old one",
                              (other, "backward"))  # fmt: skip
                    return
                break


def rebound(facts: Facts) -> Iterator[Hit]:
    """GA306."""
    for event in facts.trace.events:
        if event.kind == "rebind":
            yield hit("GA306", event, "this binds a new tensor to the name; "
                      "the parameter itself does not change")  # fmt: skip
            return


def closure_and_backward(facts: Facts) -> Iterator[Hit]:
    """GA104: a backward before `step(closure)` whose closure does its own."""
    for view in facts.views:
        made = view.optimizer
        if made.kind == "optimizer" and made.node is not None and "torch" not in made.uses:
            continue  # a class of somebody's own may clear before it calls the closure
        for window in view.windows:
            if "closure" not in window.step.flags:
                continue
            nodes = [event for event in window.fresh if event.loops == window.step.loops]
            if len({event.node for event in nodes}) > 1 and not any(
                event.kind == "zero" and event.node.lineno >= nodes[0].line  # type: ignore[attr-defined]
                for event in window.since
            ):
                yield hit("GA104", nodes[0], "the closure runs its own backward, so this one is "
                          "added to it",
                          (window.step, "step(closure)"))  # fmt: skip
                return


def stale_forward(facts: Facts) -> Iterator[Hit]:
    """GA307: a step between a forward and its own backward."""
    order = facts.trace.events
    if not any("retain_graph" in event.flags for event in facts.backwards):
        return
    for index, event in enumerate(order):
        if event.kind != "backward" or event.tensor is None or not event.tensor.forwards:
            continue
        for other in order[:index]:
            if other.kind == "backward" and "retain_graph" in other.flags and other.tensor:
                shared = other.tensor.forwards & event.tensor.forwards
                between = [
                    step
                    for step in order[order.index(other) : index]
                    if step.kind == "step"
                    and step.thing is not None
                    and step.thing.kind == "optimizer"
                    and step.thing.models & event.tensor.models
                ]
                if shared and between and other.node is event.node:
                    yield hit("GA502", event, "`retain_graph` lets this backward go through the "
                              "graph of an earlier iteration again, whose parameters a step has "
                              "changed since",
                              (between[0], "the step"))  # fmt: skip
                    return
                if shared and between and not is_model_root(event.node):
                    yield hit("GA307", event, "the parameters of this graph were changed by a step "
                              "between its forward and this backward",
                              (between[0], "the step"))  # fmt: skip
                    return


RULES = (step_without_backward, tail, off_by_one, parameters_changed)
GLOBAL = (
    update_tracked,
    written_unseen,
    rebound,
    closure_and_backward,
    stale_forward,
)
