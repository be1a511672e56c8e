"""GA1xx: who clears the gradients, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.patterns import asks
from gradaccum.doctor.checks.source import (
    above_of,
    calls,
    forwarded,
    gate,
    in_loop_of,
    loop_of,
    overwrites,
    reads_gradient,
    same_loop,
)
from gradaccum.doctor.checks.story import END, Window, place_of, usual
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]


def never_zeroed(context: Context) -> Iterator[Hit]:
    """GA101."""
    for line, windows in context.lines():
        if windows[0].optimizer is None or line in context.settled:
            continue
        again = [window for window in windows if window.stale and window.fresh]
        if not again or any(context.handled(window) for window in windows):
            continue
        if len(again) < len(windows) - 1:
            again = _after_the_first(windows)
            if not again:
                continue
        first = again[0]
        stale = {p for g in first.used if set(g.backwards) & set(first.stale) for p in g.params}
        if stale <= context.replaced:
            continue
        old = [context.story.backwards[b] for b in first.stale if b in context.story.backwards]
        number = windows[0].optimizer
        kept = _names(context, first)
        yield from hit(
            "GA101",
            line,
            f"from its second update on, {_which(context, number)} steps on gradients that an "
            f"earlier update had already used and nobody cleared{kept}: "
            f"{plural(context.updates(again), 'update')}",
            (old[-1] if old else None, "this backward's gradient was used before, and again here"),
        )
        context.faulty.add(number)


def never_zeroed_by_hand(context: Context) -> Iterator[Hit]:
    """GA101: an update by hand of gradients that nothing clears."""
    zeroed = {p.index for p in context.trace.params if p.zeroed}
    for line, windows in context.lines():
        if windows[0].optimizer is not None or len(windows) < 3 or not reads_gradient(line):
            continue
        again = [window for window in windows if window.stale and window.fresh]
        params = frozenset().union(*(window.params for window in windows))
        if len(again) < len(windows) - 1 or any(context.handled(window) for window in windows):
            continue
        if params & zeroed:
            continue
        first = again[0]
        old = [context.story.backwards[b] for b in first.stale if b in context.story.backwards]
        yield from hit(
            "GA101",
            line,
            "from its second time on, this update by hand uses gradients that an earlier one has "
            "already used and nobody cleared: "
            f"{plural(context.updates(again), 'update')}",
            (old[-1] if old else None, "this backward's gradient was used before, and again here"),
            mend="After the update, call `p.grad.zero_()`, or set `p.grad = None`.",
        )


def stepped_each_time(context: Context) -> Iterator[Hit]:
    """GA316: gradients are added up for a window, and every one of its micro-batches steps."""
    for line, windows in context.lines():
        if windows[0].optimizer is None or any(context.handled(window) for window in windows):
            continue
        grown = [w for w in windows if w.stale and len(w.fresh) == 1 and w.whole]
        zeros = [
            e
            for e in context.trace.events
            if e.kind == "zero" and any(windows[0].params & set(g["params"]) for g in e.get("lost"))
        ]
        micros = [e for w in windows for e in context.story.micros(w)]
        if not grown or 2 * len(grown) < len(windows) or not zeros or not micros:
            continue
        places = {place_of(event) for event in zeros}
        condition = gate(place_of(zeros[0]), place_of(micros[-1]))
        if len(places) != 1 or condition is None or gate(line, place_of(micros[-1])) == condition:
            continue
        most = max(len(w.fresh) + len(w.stale) for w in windows)
        yield from hit(
            "GA316",
            line,
            f"gradients are cleared once for {most} micro-batches, but this step runs after each "
            f"of them: the first micro-batch of a window is used {most} times "
            f"({plural(context.updates(windows), 'update')})",
            (micros[-1], "each micro-batch is followed by a step"),
            (zeros[0], "cleared only here"),
        )
        context.faulty.add(windows[0].optimizer)
        context.settled.add(line)


def _after_the_first(windows: list[Window]) -> list[Window]:
    """Runs of updates in which nothing is cleared, though something once was."""
    again = [window for window in windows if window.stale and window.fresh]
    return again if len(again) * 2 >= len(windows) and len(again) >= 2 else []


def _which(context: Context, number: int | None) -> str:
    optimizers = context.trace.optimizers
    if len(optimizers) < 2 or number is None:
        return "the optimizer"
    one = next((o for o in optimizers if o.index == number), None)
    place = None if one is None else one.user or one.at
    return f"optimizer {number}" + ("" if place is None else f" (made at line {place.line})")


def _names(context: Context, window: Window) -> str:
    """Which parameters, where it is not all of the optimizer's."""
    stale = set(window.stale)
    bad = {p for group in window.used if stale & set(group.backwards) for p in group.params}
    names = [p.name for p in context.trace.params if p.index in bad and p.name]
    if not names or bad == window.params:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return " (" + ", ".join(names[:3]) + more + ")"


def nothing_accumulates(context: Context) -> Iterator[Hit]:
    """GA102, and GA302 where only what an epoch left over is wiped."""
    for line, windows in context.lines():
        bad = [window for window in windows if _wipes(context, window)]
        if not bad or not bad[0].fresh:
            continue
        event, lost = _wipes(context, bad[0])[0]
        last = context.story.backwards[lost[-1]]
        wiped = sum(len(numbers) for _, numbers in _wipes(context, bad[0]))
        if (
            len(bad) * 3 >= len(windows) * 2
            and in_loop_of(place_of(event), place_of(last)) is not False
        ):
            of = wiped + len(bad[0].fresh)
            called = forwarded(place_of(event), place_of(last))
            yield from hit(
                "GA102",
                called or event,
                f"{wiped} of {of} micro-batches of an update are wiped here before the step that "
                f"should have used them ({plural(context.updates(bad), 'update')})",
                (event if called else None, "cleared here, for that call"),
                (last, "this backward's gradient is thrown away"),
                (line, "the step comes only afterwards"),
            )
            context.faulty.add(windows[0].optimizer)
            context.settled.add(line)
        elif usual(windows) >= 2 and wiped + len(bad[0].fresh) == usual(windows):
            yield from _broken_off(context, bad[0], event, lost, line)
            context.settled.add(line)
        elif usual(windows) >= 2 and all(
            len(numbers) < usual(windows) for _, numbers in bad[0].wasted
        ):
            yield from hit(
                "GA302",
                context.gate(bad[0]) or line,
                f"{plural(len(lost), 'micro-batch').replace('batchs', 'batches')} of the "
                f"last, short window {'is' if len(lost) == 1 else 'are'} computed and then thrown "
                "away",
                (event, "their gradients are cleared here"),
                (line, "the step of a full window"),
            )
            context.settled.add(line)


def _broken_off(
    context: Context, window: Window, event: Event, lost: tuple[int, ...], line: Place
) -> list[Hit]:
    """A clearing in the midst of a window that goes on after it."""
    last = context.story.backwards[lost[-1]]
    place = place_of(event)
    loop = loop_of(place_of(last))
    called = calls(place.path, place.function) if place is not None else ()
    within = in_loop_of(place, place_of(last)) or any(loop in above_of(call) for call in called)
    count = len(lost) + len(window.fresh)
    return hit(
        "GA103" if loop is not None and within else "GA302",
        event,
        f"{len(lost)} of {count} micro-batches of an update are wiped here, in the midst of its "
        "window, which goes on afterwards",
        (last, "this backward's gradient is thrown away"),
        (line, "the step comes only afterwards"),
        mend="Clear only right after a step, or step before this.",
    )


def _wipes(context: Context, window: Window) -> list[tuple[Event, tuple[int, ...]]]:
    """Clearings in a window that threw away micro-batches of the same line as the ones it used."""
    if context.handled(window) is not None or not window.fresh or not window.whole:
        return []
    places = {place_of(event) for event in context.story.micros(window)}
    found = []
    for event, numbers in window.wasted:
        lost = [context.story.backwards.get(number) for number in numbers]
        same = [one for one in lost if one is not None and place_of(one) in places]
        finite = [one for one in same if _finite(one)]
        if finite and len(finite) == len(numbers) and not _used_by_hand(window, finite, event):
            found.append((event, numbers))
    return found


def _finite(event: Event) -> bool:
    values = [event.get("norm"), event.get("loss")]
    return all(math.isfinite(one) for one in values if isinstance(one, float))


def _used_by_hand(window: Window, lost: list[Event], cleared: Event) -> bool:
    """Whether parameters were written between a backward and its clearing, as by SAM."""
    return any(
        event.get("target") == "param" and lost[0].n < event.n <= cleared.n
        for event in window.of("write")
    )


def overwritten(context: Context) -> Iterator[Hit]:
    """GA102: `.grad` is set to each micro-batch's gradient instead of being added to."""
    for line, windows in context.lines():
        for window in windows:
            made = [e for e in window.of("grad") if not e.get("create")]
            sets = [
                e
                for e in window.of("write")
                if e.get("target") == "grad" and e.get("how") == "grad=" and overwrites(place_of(e))
            ]
            if len(made) < 2 or not sets or len({place_of(e) for e in made}) != 1:
                continue
            if same_loop(place_of(sets[0]), line) or not _within(
                place_of(sets[0]), place_of(made[0])
            ):
                continue
            if not all(any(a.n < e.n < b.n for e in sets) for a, b in pairwise(made)):
                continue  # what is set once, at the end, may have been added up elsewhere
            yield from hit(
                "GA102",
                sets[0],
                f"`.grad` is replaced, not added to: of {len(made)} micro-batches the update uses "
                f"the last ({plural(context.updates(windows), 'update')})",
                (made[0], "the gradient of one micro-batch"),
                (line, "one update for all of them"),
            )
            return


def _within(inner: object, outer: object) -> bool:
    return getattr(inner, "path", 0) == getattr(outer, "path", 1)


def cleared_too_early(context: Context) -> Iterator[Hit]:
    """GA103."""
    for line, windows in context.lines():
        bad = []
        for window in windows:
            lost = [event for event, _ in window.wasted]
            backwards = window.of("backward")
            late = [e for e in lost if backwards and e.n > backwards[-1].n]
            step = window.step
            if not window.used and late and step is not None and not _has_other(window, step):
                bad.append((window, late[-1], backwards[-1]))
        if bad and 2 * len(bad) >= len(windows):
            _, event, backward = bad[0]
            yield from hit(
                "GA103",
                event,
                f"the gradients are cleared after backward and before the step, which finds none "
                f"({plural(context.updates([w for w, _, _ in bad]), 'update')})",
                (backward, "these gradients are thrown away"),
                (line, "this step has nothing to use"),
            )
            context.faulty.add(windows[0].optimizer)


def _has_other(window: Window, step: Event) -> bool:
    """Whether the step has gradients that did not come from a backward."""
    written = {p for e in window.of("write") if e.get("target") == "grad" for p in e.get("params")}
    return bool(written - set(step.get("idle", ())))


def stale_at_first(context: Context) -> Iterator[Hit]:
    """GA104: a gradient from before the loop, or from before the closure."""
    for line, windows in context.lines():
        if windows[0].optimizer is None:
            continue
        for window in windows:
            outside = [e for e in context.story.micros(window) if e.get("step") is None]
            if window.step is not None and window.step.get("closure") and outside:
                closure = [e for e in context.story.micros(window) if e.get("step") is not None]
                lines = {(e.at, e.user) for e in closure}
                if closure and (outside[-1].at, outside[-1].user) not in lines:
                    yield from hit(
                        "GA104",
                        outside[-1],
                        "this backward runs before `step(closure)`, which runs its own: the "
                        "closure's first gradient is added to this one",
                        (closure[0], "the closure's own backward"),
                    )
                    return
        first = windows[0]
        if not first.whole or len(windows) < 2:
            continue
        ordinary = {
            place_of(event) for window in windows[1:] for event in context.story.micros(window)
        }
        micros = context.story.micros(first)
        strange = [event for event in micros if place_of(event) not in ordinary]
        if (
            strange
            and len(strange) < len(micros)
            and micros[: len(strange)] == strange
            and ordinary
        ):
            yield from hit(
                "GA104",
                strange[-1],
                f"the gradient of this backward still stands when the loop begins, and is added to "
                f"the first update, which so uses {len(micros)} backwards",
                (line, f"the first of {plural(context.updates(windows), 'update')}"),
            )


def another_loss(context: Context) -> Iterator[Hit]:
    """GA104: another optimizer's loss has left its gradient, as a GAN's generator does."""
    story = context.story
    for line, windows in context.lines():
        mine = windows[0].optimizer
        if mine is None or mine in context.faulty:
            continue
        bad: list[tuple[Window, Event, Event]] = []
        for window in windows:
            micros = story.micros(window)
            own = [e for e in micros if story.used.get(e.get("b"), set()) == {mine}]
            for event in micros:
                others = story.used.get(event.get("b"), set()) - {mine, None}
                if not own or not others or place_of(event) in {place_of(e) for e in own}:
                    continue
                stepped = [
                    e
                    for e in window.of("step")
                    if e.get("optimizer") in others and event.n < e.n < own[-1].n
                ]
                if stepped:
                    bad.append((window, event, own[-1]))
        if bad and 2 * len({id(window) for window, _, _ in bad}) >= len(windows):
            window, event, own_event = bad[0]
            yield from hit(
                "GA104",
                line,
                f"this update also uses the gradient that another optimizer's loss left behind "
                f"({plural(context.updates(windows), 'update')})",
                (event, "that loss's backward, used before by its own optimizer"),
                (own_event, "this optimizer's own loss"),
            )


def poisoned(context: Context) -> Iterator[Hit]:
    """GA104: gradients that are not numbers, and are never cleared."""
    for window in context.story.open:
        if window.order != END:
            continue
        micros = context.story.micros(window)
        bad = [
            e
            for e in micros
            if isinstance(e.get("norm"), float) and not math.isfinite(e.get("norm"))
        ]
        if len(bad) < 2 or bad != micros[-len(bad) :]:
            continue
        later = [e.get("loss") for e in bad[1:]]
        if not any(isinstance(loss, float) and math.isfinite(loss) for loss in later):
            continue
        zeros = [e for e in context.trace.events if e.kind == "zero"]
        yield from hit(
            "GA104",
            zeros[-1] if zeros else bad[0],
            f"from one backward on the gradients are not finite and are never cleared: the "
            f"{len(bad) - 1} later ones are added to them, although their losses are finite",
            (bad[0], "the first gradient that is not finite"),
        )
        return


def grows_unowned(context: Context) -> Iterator[Hit]:
    """GA105."""
    trace = context.trace
    stepped = [o for o in trace.optimizers if o.steps]
    hands = [window for window in context.story.windows if window.optimizer is None]
    if not stepped and not hands:
        return
    changed = {p.index for p in trace.params if p.changes}
    clips = [e for e in trace.events if e.kind == "clip"]
    clipped = {p for e in clips for p in (*e.get("params", ()), *e.get("touched", ()))}
    # A layer that nobody trains and nothing measures costs time and no more.
    grown = [
        p
        for p in trace.params
        if not {o.index for o in stepped} & set(p.owners)
        and (not p.is_parameter or p.index in clipped)
        and p.index not in changed
        and p.arrivals >= 2
        and p.held == p.arrivals
        and not p.zeroed
        and p.index not in context.explained
    ]
    if not grown or not any(p.zeroed for p in trace.params):
        return
    zeros = [e for e in trace.events if e.kind == "zero" and e.get("via") != "step"]
    params = {p.index for p in grown}
    arrived = [
        e for e in trace.events if e.kind == "backward" and params & set(e.get("arrived", ()))
    ]
    clips = [e for e in clips if params & {*e.get("params", ()), *e.get("touched", ())}]
    names = ", ".join(f"`{p.name or p.shape}`" for p in grown[:3])
    names += f" and {len(grown) - 3} more" if len(grown) > 3 else ""
    # A clearing that misses what a clip measures is where both are mended. What merely grows is
    # told where it asked for a gradient.
    asked = None if clips or not arrived else asks(place_of(arrived[-1]), grown[0].name)
    where = zeros[0] if zeros and clips else asked or arrived[-1]
    yield from hit(
        "GA105",
        where,
        f"{names} asked for a gradient that no optimizer owns and nothing clears: "
        f"{plural(grown[0].arrivals, 'backward')} had been added up in it at the end",
        (clips[0] if clips else None, "the clip measures them too"),
        (arrived[-1] if arrived else None, "each backward adds to them"),
        (zeros[0] if zeros and not clips else None, "this clearing does not reach them"),
    )
    context.explained |= params


def never_used(context: Context) -> Iterator[Hit]:
    """GA101: gradients that are neither cleared nor used by anything."""
    trace = context.trace
    if trace.optimizers or not trace.complete or trace.error or context.story.windows:
        return
    others = ("write", "ddp_forward", "clip", "grad")
    if any(p.changes or p.zeroed for p in trace.params) or any(map(trace.totals.get, others)):
        return
    for window in context.story.open:
        micros = context.story.micros(window)
        params = [p for p in trace.params if p.index in window.params and p.is_parameter]
        if window.order != END or len(micros) < 3 or not params:
            continue
        terms = context.series(window)
        whole = terms and all(abs(w) == 1.0 for one in terms for w in one.weights)
        if whole and len({place_of(e) for e in micros}) == 1:
            yield from hit(
                "GA101",
                micros[0],
                f"{plural(len(window.fresh), 'backward')} have added their gradients to "
                f"{plural(len(params), 'parameter')}: nothing clears them and no step uses them",
                severity="warning",
            )
            return


RULES = (
    never_used,
    cleared_too_early,
    nothing_accumulates,
    overwritten,
    stepped_each_time,
    never_zeroed,
    never_zeroed_by_hand,
    stale_at_first,
    another_loss,
    poisoned,
    grows_unowned,
)
