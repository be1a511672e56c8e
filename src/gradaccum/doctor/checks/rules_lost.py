"""GA306 and GA309: parameters that an optimizer and the losses do not share."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.origin import cut_of, given, replaced
from gradaccum.doctor.checks.patterns import lines_that, rebinds
from gradaccum.doctor.checks.story import place_of
from gradaccum.doctor.trace.model import Event, Opt, Param, Place

__all__ = ["RULES"]


def rebound(context: Context) -> Iterator[Hit]:
    """GA306: gradients came, no parameter ever changed, and the source binds the name anew."""
    trace = context.trace
    if any(p.changes for p in trace.params) or any(o.steps for o in trace.optimizers):
        return
    got = [p for p in trace.params if p.arrivals]
    for event in trace.events if got else ():
        place = place_of(event) if event.kind == "backward" else None
        line = None if place is None else rebinds(place)
        if line is not None:
            yield from hit(
                "GA306",
                line,
                "this binds the name to a new tensor: of "
                f"{plural(len(got), 'parameter')} with a gradient none has changed in the run",
                (event, "the gradients were made here"),
            )
            context.lost = True
            return


def _orphans(context: Context) -> list[Param]:
    """Parameters with gradients that no optimizer owns and nothing changes."""
    hands = {p for w in context.story.windows if w.optimizer is None for p in w.params}
    return [
        p
        for p in context.trace.params
        if p.is_parameter
        and p.arrivals
        and not p.owners
        and p.index not in hands
        and p.index not in context.explained
    ]


def _twin(context: Context, new: Param, old: list[Param]) -> tuple[Param, Event, Event] | None:
    """The parameter whose place another took, that one's backward, a step that missed it."""
    own = context.arrived(new.index)
    if not own:
        return None
    numbers = {e.n for e in own}
    for one in old:
        gone = not one.name and not one.arrivals and len(one.shape) == len(new.shape)
        if not gone and (not new.name or one.name != new.name):
            continue
        if any(e.n in numbers for e in context.arrived(one.index)):
            continue
        for step in context.steps:
            late = step.n > own[0].n and step.get("optimizer") in one.owners
            came = any(e.n > own[0].n for e in context.arrived(one.index))
            if late and (one.index in step.get("idle", ()) or (one.arrivals and not came)):
                return one, own[0], step
    return None


def taken_over(context: Context) -> Iterator[Hit]:
    """GA306: a model or a layer was replaced, and the optimizer keeps the old parameters."""
    trace = context.trace
    stepped = {o.index: o for o in trace.optimizers if o.steps}
    old = [p for p in trace.params if p.is_parameter and stepped.keys() & set(p.owners)]
    by_name: dict[str, list[Param]] = {}
    for one in old:
        if one.name or not one.arrivals:
            by_name.setdefault(one.name, []).append(one)
    found: list[tuple[Param, Param, Event, Event]] = []
    for new in _orphans(context):
        alike = [*by_name.get(new.name, ()), *(by_name.get("", ()) if new.name else ())]
        twin = None if new.changes else _twin(context, new, alike)
        if twin is not None:
            found.append((new, *twin))
            by_name[twin[0].name].remove(twin[0])
    if not found:
        return
    new, one, backward, step = found[0]
    optimizer = next(o for index, o in stepped.items() if index in one.owners)
    made = optimizer.user or optimizer.at
    line = replaced(made, place_of(backward), new.name)
    names = ", ".join(f"`{p.name or p.shape}`" for p, *_ in found[:3])
    names += f" and {len(found) - 3} more" if len(found) > 3 else ""
    yield from hit(
        "GA306",
        line or made,
        f"{names}, where the gradients arrive, are not those that {optimizer.kind} was given: its "
        "own have been replaced, get none, and what the model now uses never changes",
        (made, f"{optimizer.kind} took its parameters here"),
        (backward, "this backward brings the new ones their gradients"),
        (step, "this step finds no gradient for the old ones"),
        mend="Make the optimizer after the last change to the model, or change values in place: "
        "`copy_()`, `load_state_dict()`.",
    )
    names_found = {p.name for p, *_ in found}
    beside = {name.rpartition(".")[0] for name in names_found if "parametrizations." in name}
    context.explained.update(
        p.index
        for p in _orphans(context)
        if p.name in names_found or p.name.rpartition(".")[0] in beside  # one became several
    )
    everything = not _orphans(context)
    if everything and {p.index for p in old} <= set(step.get("idle", ())):
        context.faulty.add(optimizer.index)
    context.replaced.update(one.index for _, one, *_ in found)


def unowned(context: Context) -> Iterator[Hit]:
    """GA309, as a note: each backward computes gradients that no optimizer uses."""
    trace = context.trace
    if not trace.complete or trace.error:
        return
    stepped = [o for o in trace.optimizers if o.steps]
    owned = {o.index: frozenset(o.params) for o in stepped}
    beside: dict[tuple[int, int], bool] = {}
    seen: dict[int, list[Param]] = {}
    for one in _orphans(context):
        own = context.arrived(one.index)
        if len(own) < 2 or not one.name or one.zeroed:
            continue
        for optimizer in stepped:
            both = 0
            for event in own:
                key = event.n, optimizer.index
                if key not in beside:
                    beside[key] = not owned[optimizer.index].isdisjoint(event.get("arrived", ()))
                both += beside[key]
            if 2 * both > len(own):
                seen.setdefault(optimizer.index, []).append(one)
                break
    for optimizer in stepped:
        params = seen.get(optimizer.index)
        if params:
            yield from _told_unowned(context, optimizer, params)


def _told_unowned(context: Context, optimizer: Opt, params: list[Param]) -> list[Hit]:
    names = ", ".join(f"`{p.name}`" for p in params[:3])
    names += f" and {len(params) - 3} more" if len(params) > 3 else ""
    context.explained.update(p.index for p in params)
    return hit(
        "GA309",
        optimizer.user or optimizer.at,
        f"{names} {'get' if len(params) > 1 else 'gets'} a gradient in each of "
        f"{plural(params[0].arrivals, 'backward')}, and nothing owns or clears them",
        (context.arrived(params[0].index)[-1], "each backward computes them"),
        severity="note",
        mend="Give them to the optimizer if they are to be trained; else call "
        "`requires_grad_(False)` on them, or compute what they give under `torch.no_grad()`.",
    )


def idle(context: Context) -> Iterator[Hit]:
    """GA309, as a note: what an optimizer owns and no loss reaches.

    A layer that is not used is nobody's mistake. Told are those whose output is seen to leave the
    graph, and whole groups.
    """
    trace = context.trace
    if not trace.complete or trace.error:
        return
    for optimizer in trace.optimizers:
        windows = [w for w in context.story.windows if w.optimizer == optimizer.index]
        mine = set(optimizer.params)
        owned = [p for p in trace.params if p.index in mine]
        if len(windows) < 2 or not any(p.arrivals for p in owned):
            continue
        idle_in = [set(w.step.get("idle", ())) if w.step else set() for w in windows]
        always = set.intersection(*idle_in)
        still = [
            p
            for p in owned
            if not p.arrivals
            and not p.changes
            and p.requires_grad
            and p.index not in context.replaced
            and p.index in always
        ]
        backwards = [e for e in trace.events if e.kind == "backward"]
        place = place_of(backwards[-1]) if backwards else None
        if still and place is not None:
            yield from _told_idle(context, optimizer, still, place)


def _told_idle(
    context: Context, optimizer: Opt, still: list[Param], backward: Place
) -> Iterator[Hit]:
    made = optimizer.user or optimizer.at
    names = {part for p in still for part in p.name.split(".")[:-1]}
    names |= {name.rpartition(".")[2] for name in given(made)}
    paths = dict.fromkeys(p.path for p in (backward, made) if p is not None)
    cuts = [line for path in paths for name in sorted(names) if (line := cut_of(path, name))]
    lost = {p.index for p in still}
    groups = [g for g in _groups(context, optimizer) if g and set(g) <= lost]
    if not cuts and not groups:
        return
    if not cuts:
        still = [p for p in still if p.index in {i for group in groups for i in group}]
    shown = ", ".join(f"`{p.name or p.shape}`" for p in still[:3])
    shown += f" and {len(still) - 3} more" if len(still) > 3 else ""
    yield from hit(
        "GA309",
        cuts[0] if cuts else made,
        f"{shown} never {'get' if len(still) > 1 else 'gets'} a gradient, though {optimizer.kind} "
        "owns them" + (": what they compute leaves the graph here" if cuts else ""),
        (made, f"{optimizer.kind} is given them here"),
        severity="note",
        mend="Use what they compute without `detach()` if they are to be trained; else leave them "
        "out of the optimizer.",
    )


def _groups(context: Context, optimizer: Opt) -> list[tuple[int, ...]]:
    """The optimizer's parameters by group, where it has several."""
    for event in context.trace.events:
        if event.kind == "optimizer" and event.get("optimizer") == optimizer.index:
            sizes, params = event.get("groups", ()), event.get("params", ())
            if len(sizes) > 1 and sum(sizes) == len(params):
                ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
                return [tuple(params[end - n : end]) for end, n in zip(ends, sizes, strict=True)]
    return []


def never_steps(context: Context) -> Iterator[Hit]:
    """GA309: an optimizer whose gradients are made and cleared, and that never steps."""
    trace = context.trace
    if not trace.complete or trace.error or any(o.steps for o in trace.optimizers):
        return
    if trace.totals.get("scaler_step") or trace.totals.get("step_failed") or context.story.windows:
        return
    changed = {p.index for p in trace.params if p.changes}
    for optimizer in trace.optimizers:
        own = set(optimizer.params)
        lost = [
            e
            for e in trace.events
            if e.kind == "zero" and any(own & set(g["params"]) for g in e.get("lost", ()))
        ]
        came = [e for e in trace.events if e.kind == "backward" and own & set(e.get("arrived", ()))]
        if len(lost) < 2 or len(came) < 3 or own & changed:
            continue
        lines = [
            one
            for one in lines_that(place_of(came[-1]), "step")
            if (place := place_of(came[-1])) is not None and one.function == place.function
        ]
        yield from hit(
            "GA309",
            lines[0] if len(lines) == 1 else optimizer.user or optimizer.at,
            f"{optimizer.kind} never steps: the gradients of {plural(len(came), 'backward')} are "
            "computed and cleared, and no parameter ever changes",
            (optimizer.user or optimizer.at, f"{optimizer.kind} is made here"),
            (came[-1], "gradients that nothing uses"),
            (lost[0], "they are cleared here"),
            mend="Call `optimizer.step()`, with parentheses, once for each window.",
        )
        return


RULES = (taken_over, never_steps)
NOTES = (unowned, idle)
"""For when all else has had its turn."""
