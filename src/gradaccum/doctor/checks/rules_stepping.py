"""GA3xx: when optimizers and schedulers step, and who else changes parameters."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.patterns import hook_function, scales_its_argument
from gradaccum.doctor.checks.story import END, Window, inside, place_of, usual
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES", "saved_in_mid_window"]

_STATELESS = {"SGD"}


def steps_on_nothing(context: Context) -> Iterator[Hit]:
    """GA301: no gradient at all, or one that was used before."""
    for line, windows in context.lines():
        number = windows[0].optimizer
        if number is None or number in context.faulty:
            continue
        again = [
            w for w in windows if w.used and w.stale and not w.fresh and not _changed(context, w)
        ]
        if again and 2 * len(again) >= len(windows):
            before = _previous(context, again[0])
            yield from hit(
                "GA301",
                line,
                "this step uses gradients that a step has already used; no backward lies between "
                f"({plural(context.updates(again), 'update')})",
                (before, "the step that used them first"),
            )
            context.faulty.add(number)
            continue
        spent = [w for w in windows if _on_zeros(w)]
        elsewhere = any(
            w.optimizer == number and w.line != line and w.fresh for w in context.story.windows
        )
        if spent and elsewhere and 2 * len(spent) >= len(windows):
            step = spent[0].step
            yield from hit(
                "GA301",
                line,
                f"the gradients are zeros here, since no backward has run since they were cleared, "
                f"and the step changes {plural(len(step.get('changed')) if step else 0, 'tensor')} "
                "all the same, by momentum or weight decay "
                f"({plural(context.updates(spent), 'update')})",
                (_previous(context, spent[0]), "the step that used the last gradients"),
            )
            continue
        idle = [w for w in windows if _idle(context, w)]
        if elsewhere and not any(w.step and w.step.get("changed") for w in idle):
            continue  # for what may be left over, with nothing left: it does nothing
        if not idle or 2 * len(idle) < len(windows) or context.trace.totals.get("schedule"):
            continue
        if context.trace.totals.get("backward", 0) == 0 and context.trace.totals.get("grad", 0):
            continue
        gone = [e for w in windows for e in w.of("zero") if e.get("via") == "step"]
        if len(idle) == 1 and len(context.story.windows) > 1 and not gone:
            continue
        yield from hit(
            "GA301",
            line,
            f"the step finds no gradient, since no backward made any: nothing is updated "
            f"({len(idle)} of {plural(context.updates(windows), 'update')})",
            (gone[0] if gone else None, "the step itself clears the gradients that it has used"),
        )
        context.faulty.add(number)


def _idle(context: Context, window: Window) -> bool:
    step = window.step
    if step is None or window.used or window.of("write", "grad"):
        return False
    owned = next((o.params for o in context.trace.optimizers if o.index == window.optimizer), ())
    return bool(owned) and set(step.get("idle", ())) >= set(owned) and not step.get("closure")


def _on_zeros(window: Window) -> bool:
    """Whether a step found gradients that no backward had brought, and changed something."""
    step = window.step
    if step is None or window.used or window.of("write", "grad") or step.get("closure"):
        return False
    return bool(set(step.get("changed", ())) - set(step.get("idle", ())))


def _changed(context: Context, window: Window) -> bool:
    return context.handled(window) is not None or bool(window.step and window.step.get("closure"))


def _previous(context: Context, window: Window) -> Event | None:
    earlier = [
        w.step
        for w in context.story.windows
        if w.optimizer == window.optimizer and w.order < window.order
    ]
    return earlier[-1] if earlier else None


def tail_dropped(context: Context) -> Iterator[Hit]:
    """GA302: micro-batches stand unused at the end."""
    if not context.trace.complete or context.trace.error:
        return
    for left in context.story.open:
        micros = context.story.micros(left)
        if any(context.story.used.get(e.get("b", -1)) for e in micros):
            continue
        for line, windows in context.lines():
            owned = {p for w in windows for p in w.params}
            size = usual(windows)
            if line in context.settled or windows[0].optimizer in context.faulty:
                continue
            if size < 2 or not owned & left.params or not micros or len(left.fresh) >= size:
                continue
            places = {place_of(e) for w in windows for e in context.story.micros(w)}
            if {place_of(e) for e in micros} <= places and windows[-1].order < micros[0].n:
                count = len(left.fresh)
                word = "micro-batch" if count == 1 else "micro-batches"
                yield from hit(
                    "GA302",
                    context.gate(windows[-1]) or line,
                    f"the run ended with {count} {word} that no step had used; an update holds "
                    f"{size}"
                    if left.order == END
                    else f"{count} {word} that no step had used were cleared after the last "
                    f"update; an update holds {size}",
                    (micros[0], "computed, and never used"),
                    (line, "the step of a full window"),
                )
                context.settled.add(line)
                return


def rebuilt(context: Context) -> Iterator[Hit]:
    """GA304."""
    groups: dict[tuple[Place, tuple[int, ...]], list[int]] = {}
    for one in context.trace.optimizers:
        place = one.user or one.at
        if place is not None and one.steps and one.params and one.kind not in _STATELESS:
            groups.setdefault((place, one.params), []).append(one.index)
    loads = [e for e in context.trace.events if e.kind == "write" and e.get("target") == "param"]
    real = {p.index for p in context.trace.params if p.is_parameter}
    for (place, params), numbers in groups.items():
        if not set(params) <= real:
            continue  # such leaves may be others that only look the same
        rates = {o.lr for o in context.trace.optimizers if o.index in numbers}
        made = [
            e
            for e in context.trace.events
            if e.kind == "optimizer" and e.get("optimizer") in numbers
        ]
        reloaded = any(
            set(event.get("params", ())) & set(params) and made and made[0].n < event.n < made[-1].n
            for event in loads
        )
        resumed = {e.get("optimizer") for e in context.trace.events if e.kind == "load"}
        numbers = [n for n in numbers if n not in resumed]
        if len(numbers) < 2 or len(rates) > 1 or reloaded:
            continue
        kind = (
            context.trace.optimizers[numbers[0]].kind
            if numbers[0] < len(context.trace.optimizers)
            else "The optimizer"
        )
        yield from hit(
            "GA304",
            place,
            f"{kind} is made {len(numbers)} times over the same parameters, each time without the "
            "state that it had gathered",
        )


def changed_in_mid_window(context: Context) -> Iterator[Hit]:
    """GA307."""
    seen = set()
    for _, windows in context.lines():
        bad: list[tuple[Window, Event, Event]] = []
        for window in windows:
            micros = context.story.micros(window)
            if window.optimizer is None or len(micros) < 2:
                continue
            for event in window.of("write"):
                params = set(event.get("params", ())) & window.params
                before = [e for e in micros if e.end <= event.start]
                after = [e for e in micros if e.start >= event.end]
                if event.get("target") == "param" and params and before and after:
                    if not inside(event, context.story):
                        bad.append((window, event, after[0]))
                        break
        tried = [one for one in bad if _put_back(context, *one)]
        if tried and len(tried) == len(bad):
            yield from _tried(context, tried)
            continue
        if bad and 2 * len(bad) >= len([w for w in windows if len(w.fresh) >= 2]):
            window, event, after_it = bad[0]
            place = place_of(event)
            if place is None or place in seen:
                continue
            seen.add(place)
            times = sum(
                e.get("target") == "param" and place_of(e) == place for e in window.of("write")
            )
            yield from hit(
                "GA307",
                event,
                "parameters are changed between the micro-batches of an update"
                + (f", {times} times" if times > 1 else "")
                + f": its gradients belong to different weights"
                f" ({plural(context.updates([w for w, _, _ in bad]), 'update')})",
                (after_it, "the next micro-batch of the same update"),
                (window.line, "the step that uses them all"),
            )
    yield from _stepped_before_backward(context)


def _put_back(context: Context, window: Window, moved: Event, after: Event) -> bool:
    """Whether parameters were moved for one backward only, as by a sharpness-aware step."""
    last = context.story.micros(window)[-1]
    params = set(moved.get("params", ()))
    return place_of(context.story.micros(window)[0]) != place_of(after) and any(
        event.get("target") == "param"
        and event.n > last.n
        and place_of(event) != place_of(moved)
        and set(event.get("params", ())) & params
        for event in window.of("write")
    )


def _tried(context: Context, found: list[tuple[Window, Event, Event]]) -> list[Hit]:
    window, moved, after = found[0]
    context.faulty.add(window.optimizer)
    return hit(
        "GA104",
        after,
        "this backward, at parameters that were moved for it alone, adds its gradient to the one "
        "that they were moved by, which still stands: the step uses the sum of both "
        f"({plural(context.updates([w for w, _, _ in found]), 'update')})",
        (context.story.micros(window)[0], "the gradient that they were moved by"),
        (moved, "moved here"),
        (window.line, "the step that uses both"),
        mend="Clear the gradients between the two: `zero_grad()` after the parameters were moved.",
    )


def _stepped_before_backward(context: Context) -> Iterator[Hit]:
    """A backward that brought nothing, its forward being from before a step."""
    events = context.trace.events
    for event in events:
        if event.kind != "backward" or event.get("arrived") or event.get("inputs"):
            continue
        if event.get("leaf") or event.get("nested") or not event.get("requires_grad"):
            continue
        before = [e for e in events if e.n < event.n]
        forwards = [e.n for e in before if e.kind == "forward" and not e.get("nograd")]
        steps = [e for e in before if e.kind == "step" and e.get("changed")]
        if steps and forwards and forwards[-1] < steps[-1].n:
            yield from hit(
                "GA307",
                event,
                "this loss was computed with parameters that a step has changed since: its "
                "backward brought no gradient",
                (steps[-1], "the step between this loss's forward and its backward"),
            )
            return


def written_in_a_hook(context: Context) -> Iterator[Hit]:
    """GA308: a hook scales the parameter instead of its gradient."""
    written = {
        p for e in context.trace.events if e.kind == "backward" for p in e.get("written", ())
    }
    for event in context.trace.events:
        if event.kind != "hook" or event.get("how") != "register_post_accumulate_grad_hook":
            continue
        changed = written & set(event.get("params", ()))
        if not changed:
            continue
        function = hook_function(place_of(event))
        line = None if function is None else scales_its_argument(function)
        place = place_of(event)
        if line is None or place is None:
            continue
        names = [p.name for p in context.trace.params if p.index in changed and p.name]
        yield from hit(
            "GA308",
            Place(place.path, line, place.function),
            "the hook is given the parameter and changes it while backward runs; its gradient "
            "stays as it is" + (f": `{names[0]}`" if names else ""),
            (event, "registered here"),
        )
        return


def saved_in_mid_window(context: Context) -> Iterator[Hit]:
    """GA315."""
    events = context.trace.events
    loads = [e for e in events if e.kind == "load"]
    for event in events:
        if event.kind != "save" or not any(load.n > event.n for load in loads):
            continue
        for line, windows in context.lines():
            if windows[0].optimizer != event.get("optimizer") or usual(windows) < 2:
                continue
            last = max((w.order for w in windows if w.order < event.n), default=-1)
            after = [w for w in windows if w.order > event.n]
            pending = [
                e
                for e in events
                if e.kind == "backward"
                and last < e.n < event.n
                and set(e.get("arrived", ())) & windows[0].params
            ]
            if pending and len(pending) < usual(windows) and last >= 0 and not after:
                yield from hit(
                    "GA315",
                    event,
                    f"the state is saved with {len(pending)} of {usual(windows)} micro-batches "
                    "pending: their gradients are in no `state_dict()`, so the first update after "
                    "a resume lacks them",
                    (pending[-1], "computed before the state was saved, and lost"),
                    (line, "the step of a full window"),
                )
                context.settled.add(line)
                return


def unfrozen_later(context: Context) -> Iterator[Hit]:
    """GA309."""
    trace = context.trace
    made = [e.n for e in trace.events if e.kind == "optimizer"]
    stepped = {o.index for o in trace.optimizers if o.steps}
    changed = {p.index for p in trace.params if p.changes}
    for event in trace.events:
        on = event.get("requires_grad", True)
        if event.kind != "require" or not on or not made or event.n < made[0]:
            continue
        idle = [
            p
            for p in trace.params
            if p.index in event.get("params", ())
            and not stepped & set(p.owners)
            and p.arrivals
            and p.index not in changed
        ]
        if idle and any(o.steps for o in trace.optimizers):
            context.explained.update(p.index for p in idle)
            context.faulty.update(stepped)
            names = ", ".join(f"`{p.name or p.shape}`" for p in idle[:3])
            yield from hit(
                "GA309",
                event,
                f"{names} get gradients ({plural(idle[0].arrivals, 'time')}) and never change: the "
                "optimizer was made before they required any",
            )
            return


RULES = (
    unfrozen_later,
    steps_on_nothing,
    tail_dropped,
    rebuilt,
    changed_in_mid_window,
    written_in_a_hook,
)
