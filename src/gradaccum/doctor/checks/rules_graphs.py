"""GA502 to GA8xx: graphs, ranks, coupled batches, precision."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.doctor.checks.constant import constant_summand
from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, figure, hit, plural
from gradaccum.doctor.checks.origin import chosen, cut, leaves_inference
from gradaccum.doctor.checks.patterns import (
    exchanges,
    forward_of_module,
    lines_that,
    turned_off,
)
from gradaccum.doctor.checks.story import Window, place_of
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]

_NARROW = {"bfloat16", "float16"}
_MANY = 32
"""Micro-batches from which on a sum in bfloat16 is off by a percent (measured: 0.7% at 32)."""


_FEW = 8
"""Losses of an update whose weights are told one by one."""


def counted_again(context: Context) -> Iterator[Hit]:
    """GA502: one graph is differentiated in several backwards of an update."""
    for window in [*context.story.windows, *context.story.open]:
        seen: dict[int, Event] = {}
        again: dict[int, int] = {}
        weights: dict[int, float | None] = {}
        last: Event | None = None
        for event in context.story.micros(window):
            for term in context.story.readings_of(event):
                if term.serial < 0 or term.serial >= 1 << 62:
                    continue
                if term.serial in seen:
                    again[term.serial] = again.get(term.serial, 1) + 1
                    last = event
                seen.setdefault(term.serial, event)
                before, weight = weights.get(term.serial, 0.0), term.weight
                scale = context.factor.get(event.get("b", -1), 1.0)
                lost = before is None or weight is None
                weights[term.serial] = None if lost else before + weight / scale
        if again and last is not None:
            first = seen[next(iter(again))]
            summed = [figure(one) for one in weights.values() if one is not None]
            told = "; they weigh " + ", ".join(summed[:_FEW]) if len(summed) == len(weights) else ""
            yield from hit(
                "GA502",
                last,
                f"{plural(len(again), 'loss').replace('losss', 'losses')} of this update are "
                f"differentiated more than once, the first {max(again.values())} times: each time "
                f"it is added to the gradient again{told}",
                (first, "differentiated here first"),
            )
            return
    yield from _older_graph(context)
    yield from _graph_of_the_gradient(context)


def _older_graph(context: Context) -> Iterator[Hit]:
    """GA502: what an earlier pass computed is differentiated again, after its weights changed."""
    last: dict[Place | None, Event] = {}
    found: list[tuple[Event, Event, Event]] = []
    for event in context.trace.events:
        if event.kind != "backward" or event.get("nested"):
            continue
        before, old = last.get(place_of(event)), set(event.get("old", ()))
        last[place_of(event)] = event
        steps = [
            e
            for e in (context.steps if before is not None and old else ())
            if before is not None and before.n < e.n < event.n and old & set(e.get("changed", ()))
        ]
        if steps and before is not None:
            found.append((event, before, steps[-1]))
    refused = "modified by an inplace operation" in context.trace.error
    if len(found) >= 2 or (found and refused and found[0][1].get("retain")):
        event, before, step = found[0]
        yield from hit(
            "GA502",
            event,
            "this loss is made of what earlier passes computed, too, whose graphs `retain_graph` "
            "keeps: they are differentiated once more, with weights that have changed since "
            f"({plural(len(found), 'backward')} in what was looked at)",
            (before, "differentiated before, here"),
            (step, "the step that has changed the weights since"),
            mend="Start each pass from `detach()`ed values or an empty list, and leave "
            "`retain_graph=True` out: torch then says what is old.",
        )


def _graph_of_the_gradient(context: Context) -> Iterator[Hit]:
    for line, windows in context.lines():
        kept = []
        for window in windows:
            micros = context.story.micros(window)
            if micros and micros[-1].get("create") and not window_uses(window, micros[-1]):
                kept.append(micros[-1])
        if kept and len(kept) * 2 >= len(windows):
            yield from hit(
                "GA502",
                kept[0],
                "`create_graph=True` makes gradients that keep the graph they were made by alive, "
                f"and nothing differentiates them ({plural(context.updates(windows), 'update')})",
                (line, "the step uses only their values"),
            )
            return


def window_uses(window: Window, backward: Event) -> bool:
    """Whether something was differentiated after a backward and before the step."""
    return any(event.n > backward.n for event in window.of("backward", "grad"))


def no_graph(context: Context) -> Iterator[Hit]:
    """GA503."""
    trace = context.trace
    owned = {p for o in trace.optimizers for p in o.params}
    if not owned or context.lost:
        return
    reached = any(set(e.get("arrived", ())) & owned for e in trace.events if e.kind == "backward")
    real = {p.index for p in trace.params if p.is_parameter}
    for event in trace.events:
        if event.kind != "backward" or event.get("nested") or event.get("inputs"):
            continue
        reading = context.story.readings.get(event.get("b"))
        leaf = event.get("leaf") or (reading is not None and "no graph" in reading.why)
        arrived = set(event.get("arrived", ()))
        # A loss of inputs alone, as an attack's is, stands beside others that train.
        leaf = leaf or (not reached and bool(arrived) and not arrived & real and _steps(context))
        if not leaf or arrived & owned:
            continue
        same = [e for e in trace.events if e.kind == "backward" and place_of(e) == place_of(event)]
        if any(set(e.get("arrived", ())) & owned for e in same):
            continue
        yield from hit(
            "GA503",
            _silenced(event) or cut(place_of(event)) or event,
            f"the loss has no graph that leads to a parameter: its backward brings no gradient "
            f"({plural(len(same), 'backward')} in what was looked at)",
            (event, "this backward reaches no parameter of the optimizer"),
        )
        context.faulty.update(o.index for o in trace.optimizers)
        return


def part_without_graph(context: Context) -> Iterator[Hit]:
    """GA503: a summand of the loss has no graph, while the others have."""
    seen: dict[Place, list[Event]] = {}
    for event in context.trace.events:
        place = place_of(event)
        if event.kind == "backward" and event.get("constant") and place is not None:
            seen.setdefault(place, []).append(event)
    for place, events in seen.items():
        found = constant_summand(place)
        if found is None or not any(e.get("arrived") for e in events):
            continue
        line, meant = found
        yield from hit(
            "GA503",
            line,
            "a term of the loss has no graph from here on: it is added as a number, its weight in "
            f"the gradient is 0 ({plural(len(events), 'backward')} in what was looked at)",
            (events[0], "this backward brings nothing of it"),
            severity="note" if meant else "",
            mend="Compute the term with its graph: without `.data`, `.item()` or `no_grad`, and "
            "with `create_graph=True` where it is made of a gradient.",
        )
        return


def switched_off(context: Context) -> Iterator[Hit]:
    """GA503: the last backward of the run was refused, for its loss has no graph."""
    came = [e for e in context.trace.events if e.kind == "backward" and not e.get("nested")]
    last = came[-1] if came else None
    if last is None or last.get("requires_grad", True) or last.get("leaf") is None:
        return
    same = [e for e in came[:-1] if place_of(e) == place_of(last) and e.get("arrived")]
    line = turned_off(place_of(last))
    if same and line is not None:
        yield from hit(
            "GA503",
            line,
            "autograd is turned off here and not on again: the next loss has no graph, and its "
            f"backward is refused after {plural(len(same), 'backward')}",
            (last, "refused here"),
            mend="Use `with torch.no_grad():`, which ends.",
        )


def refused(context: Context) -> Iterator[Hit]:
    """GA503: what was made under `inference_mode` goes into a loss, and no backward follows."""
    events = [e for e in context.trace.events if e.kind in ("forward", "backward")]
    for made, used, after in zip(events, events[1:], [*events[2:], None], strict=False):
        if not made.get("inference") or made.kind != "forward" or used.kind != "forward":
            continue
        if used.get("nograd") or (after is not None and after.kind == "backward"):
            continue
        place = place_of(made)
        if place is not None and leaves_inference(place):
            yield from hit(
                "GA503",
                made,
                "this is computed under `inference_mode` and used in a loss, which autograd "
                "refuses: no backward followed. Under `no_grad` the numbers are the same",
                (used, "refused here"),
            )
            return


def _steps(context: Context) -> bool:
    return any(o.steps for o in context.trace.optimizers)


def _silenced(event: Event) -> Place | None:
    """The line that made the loss require grad."""
    place = place_of(event)
    if place is None:
        return None
    found = [
        one
        for name in ("requires_grad", "requires_grad_")
        for one in lines_that(place, name)
        if one.function == place.function and place.line - 12 <= one.line <= place.line
    ]
    return found[-1] if found else None


def synchronised(context: Context) -> Iterator[Hit]:
    """GA601: ranks exchange gradients more often than once an update, or not at its end."""
    for window in [*context.story.windows, *context.story.open]:
        micros = context.story.micros(window)
        sent = [_sends(window, event) for event in micros]
        if len(micros) < 2 or None in sent:
            continue
        if all(sent) and len({place_of(event) for event in micros}) == 1:
            if not any(_too_late(window, event) for event in micros):
                yield from hit(
                    "GA601",
                    micros[0],
                    f"gradients are sent {len(micros)} times an update instead of once",
                    (window.line, "the step"),
                )
                return
        if any(sent) and not sent[-1]:
            entered = window.of("no_sync")
            where = entered[-1] if entered else micros[-1]
            yield from hit(
                "GA603",
                chosen(place_of(where)) or where,
                "the last backward of the window runs under `no_sync()`: what came after the "
                "last exchange stays on its rank, and ranks step apart",
                (micros[-1], "this gradient is not sent"),
            )
            return


def never_sent(context: Context) -> Iterator[Hit]:
    """GA603: an update of which no gradient was exchanged, beside others of which some was."""
    if any(e.kind == "write" and e.get("target") == "param" for e in context.trace.events):
        return  # ranks may exchange their weights instead
    for line, windows in context.lines():
        sent = [
            [_sends(w, e) for e in context.story.micros(w)] for w in windows if w.whole and w.fresh
        ]
        none = [one for one in sent if one and not any(one) and None not in one]
        if not none or not any(True in one for one in sent) or exchanges(line):
            continue
        window = next(w for w in windows if not any(_sends(w, e) for e in context.story.micros(w)))
        micros, entered = context.story.micros(window), window.of("no_sync")
        if not micros or not entered:
            continue
        where = chosen(place_of(entered[-1])) or entered[-1]
        yield from hit(
            "GA603",
            where,
            f"all {len(micros)} micro-batches of an update run under `no_sync()`, though others "
            "exchange their gradients: each rank steps with its own, and ranks drift apart "
            f"({plural(len(none), 'update')} of {len(sent)} in what was looked at)",
            (micros[-1], "the last backward of it sends nothing"),
            (line, "the step"),
        )
        return


def entered_late(context: Context) -> Iterator[Hit]:
    """GA602."""
    for window in [*context.story.windows, *context.story.open]:
        late = [e for e in context.story.micros(window) if _too_late(window, e)]
        if late:
            entered = [e for e in window.of("no_sync") if e.n < late[0].n]
            yield from hit(
                "GA602",
                late[0],
                f"this backward runs under `no_sync()`, its forward did not, and DDP decides in "
                f"the forward: {plural(len(late), 'gradient')} of the window are sent all the same",
                (entered[-1] if entered else None, "entered only here"),
            )
            return


def past_the_ranks(context: Context) -> Iterator[Hit]:
    """GA604: gradients of what DDP wraps come by another way than its forward."""
    trace = context.trace
    for made in (e for e in trace.events if e.kind == "parallel"):
        params = set(made.get("params", ()))
        if not params or any(e.kind == "ddp_forward" and not e.get("nograd") for e in trace.events):
            return
        came = [
            e for e in trace.events if e.kind == "backward" and params & set(e.get("arrived", ()))
        ]
        steps = [e for e in context.steps if params & set(e.get("changed", ()))]
        if len(came) < 2 or not steps or exchanges(place_of(came[-1])):
            continue
        inner = forward_of_module(place_of(came[-1]))
        yield from hit(
            "GA604",
            inner or came[-1],
            f"the model is called past DDP, which prepares the exchange of gradients in its own "
            f"forward: {plural(len(came), 'backward')} in what was looked at, and none was sent",
            (made, "DDP is made here"),
            (came[-1] if inner else None, "this gradient stays on its rank"),
            (steps[-1], "each rank steps with its own"),
        )
        return


def _too_late(window: Window, backward: Event) -> bool:
    return _sends(window, backward) is True and False in (backward.get("sync") or ())


def _sends(window: Window, backward: Event) -> bool | None:
    """Whether a backward's gradients are exchanged; DDP decides in the forward."""
    forwards = [e for e in window.of("ddp_forward") if not e.get("nograd") and e.n < backward.n]
    return bool(forwards[-1].get("sync")) if forwards else None


def batchnorm(context: Context) -> Iterator[Hit]:
    """GA701."""
    norms = [
        m for m in context.trace.modules if "BatchNorm" in str(m.get("kind")) and m.get("training")
    ]
    if not norms:
        return
    for window in [*context.story.windows, *context.story.open]:
        micros = context.story.micros(window)
        if len(micros) < 2 or len({place_of(e) for e in micros}) != 1:
            continue
        names = ", ".join(f"`{m.get('name') or m.get('kind')}`" for m in norms[:3])
        yield from hit(
            "GA701",
            micros[0],
            f"{names} normalise each of the {len(micros)} micro-batches by its own statistics, and "
            f"move the running ones {len(micros)} times an update: no split equals the whole batch",
            (window.line, "the step"),
        )
        return


def coupled(context: Context) -> Iterator[Hit]:
    """GA702."""
    for window in [*context.story.windows, *context.story.open]:
        micros = context.story.micros(window)
        marked = [e for e in micros if any(t.coupled for t in context.story.readings_of(e))]
        if len(marked) < 2 or len({place_of(e) for e in marked}) != 1:
            continue
        yield from hit(
            "GA702",
            marked[0],
            f"the loss compares each sample with all others of its micro-batch, so {len(marked)} "
            "micro-batches are not the whole batch, however they are scaled",
            (window.line, "the step"),
        )
        return


def left_in_eval(context: Context) -> Iterator[Hit]:
    """GA703."""
    modes = [e for e in context.trace.events if e.kind == "mode" and not e.get("train")]
    for mode in modes:
        index = mode.get("index")
        if index is None:
            continue
        back = [
            e
            for e in context.trace.events
            if e.kind == "mode" and e.n > mode.n and e.get("train") and e.get("index") == index
        ]
        end = back[0].n if back else 1 << 62
        later = [e for e in context.trace.events if e.kind == "backward" and mode.n < e.n < end]
        inside = [e for e in later if index in e.get("eval", ())]
        used = any(context.story.used.get(e.get("b", -1)) for e in inside)
        if len(inside) >= 2 and used and any(mode.n < e.n < end for e in context.steps):
            yield from hit(
                "GA703",
                mode,
                f"from here on the model trains in eval mode, with dropout off and BatchNorm's "
                f"statistics frozen: {len(inside)} backwards in what was looked at",
                (inside[0], "a backward through the model in eval mode"),
            )
            return


def narrow_sums(context: Context) -> Iterator[Hit]:
    """GA801."""
    narrow = {p.index for p in context.trace.params if p.dtype in _NARROW}
    if not narrow:
        return
    for window in [*context.story.windows, *context.story.open]:
        for group in window.used:
            if group.held < _MANY or not group.params & narrow:
                continue
            last = context.story.backwards.get(group.backwards[-1])
            kind = next(p.dtype for p in context.trace.params if p.index in group.params & narrow)
            yield from hit(
                "GA801",
                last or window.line,
                f"{group.held} micro-batches are added up in {kind}",
                (window.line, "the step that uses the sum"),
            )
            return


RULES = (
    switched_off,
    refused,
    no_graph,
    part_without_graph,
    counted_again,
    past_the_ranks,
    entered_late,
    synchronised,
    never_sent,
    batchnorm,
    coupled,
    left_in_eval,
    narrow_sums,
)
