"""GA205, GA302, GA307, GA309, GA316: what lives for one pass, is not put back, or never comes."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.logs import (
    divides_what_is_left,
    means_by_samples,
    never_begun_anew,
    samples_by_batches,
)
from gradaccum.doctor.checks.named import (
    gated_beside,
    in_plain_list,
    made_in_forward,
    moved_in_init,
    never_restored,
    waits_for,
)
from gradaccum.doctor.checks.story import place_of
from gradaccum.doctor.trace.model import Param, Place

__all__ = ["RULES"]


def _nameless(context: Context) -> list[Param]:
    """Parameters that belong to no module and no optimizer, and get gradients."""
    return [
        p
        for p in context.trace.params
        if p.is_parameter and p.arrivals and not p.owners and not p.name and not p.changes
    ]


def made_each_time(context: Context) -> Iterator[Hit]:
    """GA309: a parameter is made anew in every forward."""
    trace = context.trace
    backwards = [e for e in trace.events if e.kind == "backward" and not e.get("nested")]
    short = [p for p in _nameless(context) if p.arrivals == 1]
    if len(short) < 3 or not any(o.steps for o in trace.optimizers):
        return
    for path in sorted({place.path for e in backwards if (place := place_of(e)) is not None}):
        line = made_in_forward(path)
        if line is None:
            continue
        yield from hit(
            "GA309",
            line,
            f"each forward makes this parameter anew: {len(short)} of them got one gradient each, "
            "and none was ever stepped or kept",
            (backwards[-1], "a backward brings the newest one its gradient"),
            mend="Make the parameter once, in `__init__`.",
        )
        context.explained.update(p.index for p in short)
        return


def moved_when_made(context: Context) -> Iterator[Hit]:
    """GA309: what a module keeps is not the parameter, but what moving it gave."""
    trace = context.trace
    hidden = [p for p in _nameless(context) if p.arrivals >= 2]
    if not hidden or not any(o.steps for o in trace.optimizers):
        return
    own = context.arrived(hidden[0].index)
    made = [o.user or o.at for o in trace.optimizers]
    for place in [*map(place_of, own[-1:]), *made]:
        line = None if place is None else moved_in_init(place.path)
        if line is None:
            continue
        yield from hit(
            "GA309",
            line,
            "moving a parameter gives a tensor that is none: it is not among the module's "
            f"parameters, and what it was made of gets {plural(hidden[0].arrivals, 'gradient')} "
            "that no optimizer uses",
            (own[-1], "each backward computes them"),
            mend="Move the values first, `nn.Parameter(torch.ones(n, dtype=dtype))`, or the module "
            "afterwards.",
        )
        context.explained.update(p.index for p in hidden)
        return


def kept_in_a_list(context: Context) -> Iterator[Hit]:
    """GA309, as a note: a module keeps parameters in a plain list, where nobody finds them."""
    trace = context.trace
    hidden = [p for p in _nameless(context) if p.arrivals >= 2]
    own = context.arrived(hidden[0].index) if hidden else []
    if not own or not any(o.steps for o in trace.optimizers):
        return
    for place in [*map(place_of, own[-1:]), *(o.user or o.at for o in trace.optimizers)]:
        line = None if place is None else in_plain_list(place.path)
        if line is None:
            continue
        yield from hit(
            "GA309",
            line,
            f"a plain list registers nothing: {plural(len(hidden), 'parameter')} in it get a "
            "gradient in each backward, and no optimizer was given them",
            (own[-1], "each backward computes them"),
            severity="note",
            mend="Use `nn.ParameterList`, or `nn.ParameterDict`.",
        )
        context.explained.update(p.index for p in hidden)
        return


def never_full(context: Context) -> Iterator[Hit]:
    """GA302: an epoch is shorter than a window, whose count begins anew: no step is made."""
    trace = context.trace
    if not trace.complete or trace.error or not trace.optimizers or context.story.windows:
        return
    if any(o.steps for o in trace.optimizers) or any(p.changes for p in trace.params):
        return
    if any(map(trace.totals.get, ("scaler_step", "step_failed", "grad"))):
        return
    came = [e for e in trace.events if e.kind == "backward" and e.get("arrived")]
    gate = waits_for(place_of(came[-1])) if came else None
    if gate is None or trace.totals.get("backward", 0) < gate[1]:
        return
    yield from hit(
        "GA302",
        gate[0],
        f"no update is made in {plural(trace.totals.get('backward', 0), 'backward')}: the step "
        f"waits for {gate[1]} micro-batches of one epoch, and no epoch has as many",
        (came[-1], "gradients that nothing uses"),
        mend="Count over the epochs, or step at the end of each, and divide by the micro-batches "
        "that the window then holds.",
    )


def steps_beside_the_clip(context: Context) -> Iterator[Hit]:
    """GA316: what belongs to a window's end stands under its condition, and the step does not."""
    for line, windows in context.lines():
        if line in context.settled or windows[0].optimizer is None or len(windows) < 4:
            continue
        if any(len(w.fresh) != 1 or w.stale or not w.whole for w in windows):
            continue
        divided = [frozenset().union(*(one.divisors for one in context.series(w))) for w in windows]
        for number in sorted(frozenset.intersection(*divided)):
            condition = gated_beside(line, number)
            micro = context.story.micros(windows[0])
            if condition is None or not micro:
                continue
            yield from hit(
                "GA316",
                line,
                f"the loss is divided by {number} and clipped with every {number}th micro-batch, "
                f"but this step runs after each: every update is 1/{number} of one micro-batch's "
                f"({plural(context.updates(windows), 'update')})",
                (condition, "this condition does not hold the step"),
                (micro[-1], f"the loss is divided by {number}"),
                mend="Move `optimizer.step()` and `zero_grad()` under the condition.",
            )
            context.settled.add(line)
            return


def average_left_in(context: Context) -> Iterator[Hit]:
    """GA307: the averaged weights are put into the model to validate, and nothing puts its back."""
    events = context.trace.events
    for event in events:
        place = place_of(event) if event.kind == "write" else None
        if place is None or event.get("target") != "param":
            continue
        line = never_restored(place)
        later = [e for e in events if e.kind == "backward" and e.n > event.n]
        if line is None or not later or not any(e.n < event.n for e in context.steps):
            continue
        yield from hit(
            "GA307",
            line,
            "the averaged weights are put into the model here, and its own are stored but never "
            "restored: training goes on from the average",
            (event, "written here"),
            (later[0], "this backward is of the averaged weights"),
            mend="Call `restore()` after the validation.",
        )
        return


def logged_by_samples(context: Context) -> Iterator[Hit]:
    """GA205: means of batches are summed, and divided by the number of samples."""
    for event in (e for e in context.trace.events if e.kind == "backward"):
        terms = context.story.readings_of(event)
        if len(terms) != 1 or terms[0].reduction != "mean" or (terms[0].count or 0) < 2:
            continue
        found = means_by_samples(place_of(event))
        if found is not None:
            shown, added = found
            yield from hit(
                "GA205",
                shown,
                "means of batches are added up and divided by the number of samples: the log "
                "shows the mean loss divided by about the batch size",
                (added, "the mean of a batch is added here"),
                mend="Add `loss.item() * len(x)`, or divide by the number of batches.",
            )
        return


def logged_by_batches(context: Context) -> Iterator[Hit]:
    """GA205, as a note: a sum over samples divided by batches, or one that never begins anew."""
    seen: dict[Place | None, int] = {}
    for event in (e for e in context.trace.events if e.kind == "backward"):
        seen[place_of(event)] = seen.get(place_of(event), 0) + 1
    for place, count in seen.items():
        found = samples_by_batches(place)
        if found is not None:
            shown, added = found
            yield from hit(
                "GA205",
                shown,
                "losses are added up for each sample and divided by the number of batches: the log "
                "shows the mean loss times about the batch size",
                (added, "a batch's loss times its samples is added here"),
                severity="note",
                mend="Divide by `len(loader.dataset)`, or by the samples that were seen.",
            )
            return
        left = divides_what_is_left(place)
        if left is not None:
            yield from hit(
                "GA205",
                left[0],
                "this divides by all passes what was added up since the sum was last set back to "
                "zero: the mean that is shown is too small",
                (left[1], "set back to zero here, now and then"),
                severity="note",
                mend="Keep one sum for each of the two means.",
            )
            return
        running = never_begun_anew(place)
        if running is not None and count > max(1, running[1]):
            yield from hit(
                "GA205",
                running[0],
                "this divides a running sum by the passes since the last time, and the sum is "
                "never set back to zero: what is shown grows with every time",
                (place, "the loss that is added up"),
                severity="note",
                mend="Set the sum to 0 after it was shown.",
            )
            return


RULES = (
    average_left_in,
    kept_in_a_list,
    logged_by_batches,
    logged_by_samples,
    made_each_time,
    moved_when_made,
    never_full,
    steps_beside_the_clip,
)
