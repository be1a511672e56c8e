"""GA5xx to GA8xx: graphs, ranks, coupled batches, precision."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.source import lines_that
from gradaccum.doctor.checks.story import Window, place_of
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]

_NARROW = {"bfloat16", "float16"}
_MANY = 32
"""Micro-batches from which on a sum in bfloat16 is off by a percent (measured: 0.7% at 32)."""


def counted_again(context: Context) -> Iterator[Hit]:
    """GA502: one graph is differentiated in several backwards of an update."""
    for window in [*context.story.windows, *context.story.open]:
        seen: dict[int, Event] = {}
        again: dict[int, int] = {}
        last: Event | None = None
        for event in context.story.micros(window):
            for term in context.story.readings_of(event):
                if term.serial < 0 or term.serial >= 1 << 62:
                    continue
                if term.serial in seen:
                    again[term.serial] = again.get(term.serial, 1) + 1
                    last = event
                seen.setdefault(term.serial, event)
        if again and last is not None:
            first = seen[next(iter(again))]
            yield from hit(
                "GA502",
                last,
                f"{plural(len(again), 'loss').replace('losss', 'losses')} of this update are "
                f"differentiated more than once, the first {max(again.values())} times: each time "
                "it is added to the gradient again",
                (first, "differentiated here first"),
            )
            return
    yield from _graph_of_the_gradient(context)


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
                "`create_graph=True` makes gradients that keep the graph of their own making alive, "
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
    if not owned:
        return
    for event in trace.events:
        if event.kind != "backward" or event.get("nested") or event.get("inputs"):
            continue
        reading = context.story.readings.get(event.get("b"))
        leaf = event.get("leaf") or (reading is not None and "no graph" in reading.why)
        if not leaf or set(event.get("arrived", ())) & owned:
            continue
        same = [e for e in trace.events if e.kind == "backward" and place_of(e) == place_of(event)]
        if any(set(e.get("arrived", ())) & owned for e in same):
            continue
        yield from hit(
            "GA503",
            _silenced(event) or event,
            f"the loss has no graph that leads to a parameter: its backward brings no gradient "
            f"({plural(len(same), 'backward')} in what was looked at)",
            (event, "this backward reaches only the loss itself"),
        )
        context.faulty.update(o.index for o in trace.optimizers)
        return


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
    """GA601, GA602: ranks exchange gradients more often, or less, than once an update."""
    for windows in [*(w for _, w in context.lines()), *([w] for w in context.story.open)]:
        for window in windows:
            micros = context.story.micros(window)
            sent = [_sends(window, event) for event in micros]
            if not micros or None in sent:
                continue
            if len(micros) >= 2 and all(sent):
                entered = window.of("no_sync")
                if entered:
                    yield from hit(
                        "GA602",
                        next((m for m in micros if m.n > entered[0].n), micros[0]),
                        f"`no_sync()` was entered only after the forward, where DDP decides: "
                        f"gradients are sent {len(micros)} times an update",
                        (entered[0], "entered here"),
                    )
                else:
                    yield from hit(
                        "GA601",
                        micros[0],
                        f"gradients are sent {len(micros)} times an update instead of once",
                        (window.line, "the step"),
                    )
                return
            if any(sent) and not sent[-1]:
                entered = window.of("no_sync")
                yield from hit(
                    "GA601",
                    entered[-1] if entered else micros[-1],
                    "the last backward of the window runs under `no_sync()`: what came after the "
                    "last exchange stays on its rank, and ranks step apart",
                    (micros[-1], "this gradient is not sent"),
                    severity="error",
                )
                return


def _sends(window: Window, backward: Event) -> bool | None:
    """Whether a backward's gradients are exchanged; DDP decides in the forward."""
    forwards = [
        e for e in window.of("forward") if e.get("sync") is not None and e.n < backward.n
    ]
    if forwards:
        return bool(forwards[-1].get("sync"))
    return None


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
    modes = [e for e in context.trace.events if e.kind == "mode"]
    backs = [e for e in context.trace.events if e.kind == "forward" and not e.get("nograd")]
    sensitive = [
        m for m in context.trace.modules
        if "BatchNorm" in str(m.get("kind")) or "Dropout" in str(m.get("kind"))
    ]  # fmt: skip
    if not sensitive:
        return
    for mode in modes:
        kind = mode.get("module")
        if mode.get("train"):
            continue
        later = [e for e in modes if e.n > mode.n and e.get("module") == kind]
        end = later[0].n if later else 1 << 62
        earlier = [e for e in backs if e.n < mode.n and e.get("module") == kind]
        after = [e for e in backs if mode.n < e.n < end and e.get("module") == kind]
        trained = [e for e in after if _trains(context, e)]
        if any(e.get("training") and _trains(context, e) for e in earlier) and len(trained) >= 2:
            if all(e.get("training") is False for e in trained):
                yield from hit(
                    "GA703",
                    mode,
                    f"from here on the model trains in eval mode: {len(trained)} of the forwards "
                    "that were looked at, with dropout off and BatchNorm's statistics frozen",
                    (trained[0], "a training forward in eval mode"),
                )
                return


def _trains(context: Context, forward: Event) -> bool:
    """Whether the next event that matters is a backward."""
    for event in context.trace.events:
        if event.n > forward.n and event.kind in ("backward", "forward", "mode", "step"):
            return event.kind == "backward"
    return False


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
    no_graph,
    counted_again,
    synchronised,
    batchnorm,
    coupled,
    left_in_eval,
    narrow_sums,
)
