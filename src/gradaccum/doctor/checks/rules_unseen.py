"""What a script catches, repeats or logs: the source says what, the run that it happened."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from gradaccum.doctor.checks.averages import averaged_in_loop
from gradaccum.doctor.checks.certain import (
    adds_to_gradient,
    logged_by_updates,
    reads_gradients,
    repeats,
    thrown_away,
    walked_twice,
)
from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.origin import made
from gradaccum.doctor.checks.patterns import receiver
from gradaccum.doctor.checks.source import statement
from gradaccum.doctor.checks.story import place_of
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]


def _finished(context: Context) -> bool:
    """Whether the run came to its end, or died of a gradient that was None."""
    trace = context.trace
    return trace.complete and (not trace.error or "NoneType" in trace.error)


def added_to_none(context: Context) -> Iterator[Hit]:
    """GA106: a line that adds to a gradient must have run, and no gradient was ever written."""
    trace = context.trace
    if not _finished(context) or not context.story.whole:
        return
    written = {
        (place.path, place.line)
        for e in trace.events
        if e.kind == "write" and (place := place_of(e)) is not None
    }
    for event in trace.events:
        place = place_of(event) if event.kind == "zero" else None
        for line in adds_to_gradient(place) if place is not None else ():
            if (line.path, line.line) in written or _between(context, event, line):
                continue
            yield from hit(
                "GA106",
                line,
                "the gradient is None here, since nothing has made one after it was cleared, and "
                "adding to None raises: no gradient was written by this line",
                (event, "cleared to None here"),
            )
            return


def _between(context: Context, cleared: Event, line: Place) -> bool:
    """Whether a backward that runs between a clearing and a line may have made the gradient."""
    for event in context.trace.events:
        place = place_of(event) if event.kind in ("backward", "grad") else None
        if event.n > cleared.n and place is not None:
            start = place_of(cleared)
            if place.function != line.function or start is None:
                return True
            return start.line <= place.line <= line.line or place.line <= start.line
    return False


def read_of_none(context: Context) -> Iterator[Hit]:
    """GA409: a line that reads each parameter's gradient must have run, and some have none."""
    trace = context.trace
    if not _finished(context):
        return
    written = {
        p
        for e in trace.events
        if e.kind == "write" and e.get("target") == "grad"
        for p in e.get("params", ())
    }
    params = {p.index: p for p in trace.params}
    for event in trace.events:
        place = place_of(event) if event.kind == "backward" else None
        for line, module in reads_gradients(place) if place is not None else ():
            held = [params[i] for i in trace.holders.get(module, ()) if i in params]
            none = [p for p in held if not p.arrivals and p.index not in written]
            if not none or line.line < 1:
                continue
            names = ", ".join(f"`{p.name or p.shape}`" for p in none[:3])
            names += f" and {len(none) - 3} more" if len(none) > 3 else ""
            frozen = [p for p in none if p.requires_grad is False]
            yield from hit(
                "GA409",
                line,
                f"{names} of `{module}` had no gradient in the whole run, so `.grad` is None and "
                f"this raises ({len(frozen)} frozen, {len(none) - len(frozen)} not used by the "
                "loss)",
                (event, "this backward reached the others"),
            )
            return


def computed_and_lost(context: Context) -> Iterator[Hit]:
    """GA306: a new value of each parameter is computed beside the step, and kept nowhere."""
    for line in dict.fromkeys(place for e in context.steps if (place := place_of(e)) is not None):
        found = thrown_away(line)
        if found is not None:
            where, written = found
            yield from hit(
                "GA306",
                where,
                f"`{written}(...)` returns a new tensor, which is kept nowhere: nothing is changed "
                f"by this line ({plural(len(context.steps), 'step')} beside it in what was looked "
                "at)",
                (line, "the step"),
                mend=f"Write in place, `{written}_(...)`, under `torch.no_grad()`.",
            )
            return


def nothing_left_to_walk(context: Context) -> Iterator[Hit]:
    """GA407: a function of the script's own walks twice over a generator of parameters."""
    for line in dict.fromkeys(place for e in context.steps if (place := place_of(e)) is not None):
        found = walked_twice(line)
        if found is not None:
            where, call = found
            yield from hit(
                "GA407",
                where,
                "this walks over what was walked over before: a generator is used up by then, and "
                "nothing is done to any parameter",
                (call, "it is given a generator here"),
                (line, "the step"),
                mend="Begin the function with `parameters = list(parameters)`.",
            )
            return


def collected_twice(context: Context) -> Iterator[Hit]:
    """GA504: a module under a checkpoint collects on itself in its forward."""
    events = context.trace.events
    for event in events:
        if event.kind != "checkpoint" or not any(
            e.kind == "backward" and e.n > event.n for e in events
        ):
            continue
        for path, line in event.get("forwards", ()):
            found = repeats(path, line)
            if found is not None:
                yield from hit(
                    "GA504",
                    Place(path, found, "forward"),
                    "this runs in the forward and once more in the backward, which computes the "
                    "checkpointed forward again",
                    (event, "the checkpoint"),
                )
                return


def logged(context: Context) -> Iterator[Hit]:
    """GA205: undivided losses are summed, and divided by the updates."""
    for line, windows in context.lines():
        for window in windows:
            micros = context.story.micros(window)
            place = place_of(micros[-1]) if len(micros) >= 2 else None
            if place is None or not context.gated(window, line):
                continue
            found = logged_by_updates(place, line, _undivided(place))
            if found is not None:
                yield from hit(
                    "GA205",
                    found,
                    f"a sum of all losses is divided by the updates, which hold {len(micros)} "
                    f"micro-batches each: the log shows {len(micros)} times the mean loss",
                    (micros[-1], "the loss that is optimised is divided"),
                    (line, "one update for all of them"),
                )
                return
            break


def _undivided(backward: Place) -> set[str]:
    """Names that stand for a loss before it was divided for its backward."""
    node = statement(backward)
    name = receiver(node)
    if name and not receiver(node, plain=True):
        return {name}  # (loss / 4).backward()
    lines = made(backward)
    value = lines[0][1] if lines else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div | ast.Mult):
        return {one for one in (getattr(value.left, "id", ""),) if one and one != name}
    return set()


def written_behind(context: Context) -> Iterator[Hit]:
    """GA308: a value that the graph had saved was changed, and its version was not."""
    for event in context.trace.events:
        if event.kind == "behind":
            backward = context.story.backwards.get(event.get("b"))
            yield from hit(
                "GA308",
                event,
                f"`{event.get('how')}` changes a value that the graph had saved "
                f"(`{event.get('node')}`), by a way that autograd does not see: backward uses the "
                "new value for the derivative of the old",
                (backward, "this backward's gradient is wrong"),
                mend="Write before the forward or after the backward; without `.data`, autograd "
                "would have refused.",
            )
            return


def narrow_log(context: Context) -> Iterator[Hit]:
    """GA802: a running sum for the log in 16 bit."""
    for event in context.trace.events:
        if event.kind == "narrow":
            yield from hit(
                "GA802",
                event,
                f"{plural(event.get('count'), 'number')} and more are added up in one "
                f"{event.get('dtype')} value, which stops growing where a summand is less than "
                "half of its last bit",
            )
            return


def _follows_each_time(context: Context) -> Iterator[Hit]:
    """GA317: an average of the weights is moved between the micro-batches of an update."""
    trace = context.trace
    shapes = {p.index: p.shape for p in trace.params}
    still = {p.index for p in trace.params if not p.arrivals and not p.owners}
    for line, windows in context.lines():
        trained = {shapes.get(p) for p in windows[0].params}
        for window in windows:
            micros = context.story.micros(window)
            if len(micros) < 2 or not context.are_micros(window, line):
                continue
            writes = [
                e
                for e in window.of("write")
                if e.get("target") == "param"
                and set(e.get("params", ())) <= still
                and {shapes.get(p) for p in e.get("params", ())} <= trained
                and place_of(e) is not None
            ]
            between = [
                [e for e in writes if one.n < e.n < after.n] for one, after in pairwise(micros)
            ]
            if not between[0] or not all(between):
                continue
            yield from hit(
                "GA317",
                between[0][-1],
                f"the average of the weights is moved {len(micros)} times an update, between "
                "micro-batches that have not changed them: it follows that much faster than meant "
                f"({plural(context.updates(windows), 'update')})",
                (micros[1], "the next micro-batch of the same update"),
                (line, "the weights change only here"),
            )
            return


def follows(context: Context) -> Iterator[Hit]:
    """GA317, by the writes that were seen, or else by the source."""
    seen = list(_follows_each_time(context))
    yield from seen or _follows_by_its_source(context)


def _follows_by_its_source(context: Context) -> Iterator[Hit]:
    """GA317: the same for an average in tensors that are no leaves, and which no run shows."""
    for line, windows in context.lines():
        for window in windows:
            micros = context.story.micros(window)
            if len(micros) < 2 or not context.gated(window, line) or not context.one_line(window):
                continue
            moved = averaged_in_loop(place_of(micros[-1]), line)
            if moved is not None:
                yield from hit(
                    "GA317",
                    moved,
                    f"this moves an average of the weights once a micro-batch, {len(micros)} times "
                    "an update, while the weights change once: it follows that much faster than "
                    f"meant ({plural(context.updates(windows), 'update')})",
                    (line, "the weights change only here"),
                )
                return


def lost_in_rounding(context: Context) -> Iterator[Hit]:
    """GA803: steps that change no parameter, each change being less than half of a last bit."""
    narrow = {p.index for p in context.trace.params if p.dtype in ("bfloat16", "float16")}
    for line, windows in context.lines():
        seen = [w.step for w in windows if w.step is not None and w.step.get("change") is not None]
        if len(seen) < 3 or not windows[0].params or not windows[0].params <= narrow:
            continue
        none = [e for e in seen if e.get("change") == 0.0 and (e.get("norm") or 0.0) > 0.0]
        if len(none) < len(seen) or not all((e.get("lr") or 0.0) > 0.0 for e in seen):
            continue
        kind = next(p.dtype for p in context.trace.params if p.index in windows[0].params)
        yield from hit(
            "GA803",
            line,
            f"{plural(len(none), 'step')} with gradients, at a rate of {seen[0].get('lr'):.3g}, "
            f"changed no value of {kind} that was looked at: each change is rounded away",
        )
        return


def checkpointed_constant(context: Context) -> Iterator[Hit]:
    """GA503: a reentrant checkpoint whose inputs ask for no gradient passes none on."""
    trace = context.trace
    stepped = {o.index for o in trace.optimizers if o.steps}
    for event in trace.events:
        if event.kind != "checkpoint" or not event.get("constant"):
            continue
        inner = set(event.get("params", ()))
        none = [
            p
            for p in trace.params
            if p.index in inner and not p.arrivals and p.requires_grad and stepped & set(p.owners)
        ]
        later = [e for e in trace.events if e.kind == "backward" and e.n > event.n]
        if not none or len(none) < len(inner) or len(later) < 2:
            continue
        names = ", ".join(f"`{p.name or p.shape}`" for p in none[:3])
        yield from hit(
            "GA503",
            event,
            f"nothing that this reentrant checkpoint is given asks for a gradient, so it passes "
            f"none on: {names} never get one",
            (later[0], "this backward ends at the checkpoint"),
            mend="Pass `use_reentrant=False`, or let an input require grad.",
        )
        context.replaced.update(inner)
        return


RULES = (
    checkpointed_constant,
    follows,
    lost_in_rounding,
    written_behind,
    added_to_none,
    read_of_none,
    collected_twice,
    computed_and_lost,
    nothing_left_to_walk,
    logged,
    narrow_log,
)
