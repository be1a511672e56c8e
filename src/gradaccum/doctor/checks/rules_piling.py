"""What piles up or goes on unseen: hooks set again, frozen weights that move, old schedules."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.patterns import hook_function, written_past
from gradaccum.doctor.checks.story import Window, place_of
from gradaccum.doctor.trace.model import Event, Param

__all__ = ["FIRST", "RULES"]

_CHECKS = {
    "val", "valid", "validate", "validation", "eval", "evaluate", "evaluation", "test", "testing",
}  # fmt: skip


def hooks_pile_up(context: Context) -> Iterator[Hit]:
    """GA202: a hook that scales a gradient is set again in each pass, beside those before."""
    seen: dict[tuple[int, object, object], list[Event]] = {}
    for event in context.trace.events:
        if event.kind == "hook":
            for index in event.get("params", ()):
                key = index, event.get("path"), event.get("line")
                seen.setdefault(key, []).append(event)
    for events in seen.values():
        counts = [e.get("count") or 0 for e in events]
        grows = len(events) >= 3 and counts == list(range(counts[0], counts[0] + len(counts)))
        passes = [e for e in context.trace.events if e.kind == "backward" and events[0].n < e.n]
        between = len(passes) >= 2 and events[-1].n > passes[-2].n
        function = hook_function(place_of(events[0])) if grows and between else None
        if function is None or not _scales(function):
            continue
        yield from hit(
            "GA202",
            events[0],
            "this hook on a parameter's gradient is set again with each pass, and the earlier ones "
            f"stay: the gradient is scaled {counts[-1]} times by the last of "
            f"{plural(len(passes), 'backward')} in what was looked at",
            (passes[-1], "all of them run in this backward"),
            severity="error",
            mend="Set the hook once, before the loop, or `remove()` it after the pass.",
        )
        return


def _scales(function: ast.AST) -> bool:
    return any(
        isinstance(one, ast.BinOp | ast.AugAssign) and isinstance(one.op, ast.Mult | ast.Div)
        for one in ast.walk(function)
    )


def frozen_and_moved(context: Context) -> Iterator[Hit]:
    """GA104: parameters that were frozen keep their gradient, and steps go on moving them."""
    events = context.trace.events
    for event in events:
        if event.kind != "require" or event.get("requires_grad"):
            continue
        params = set(event.get("params", ()))
        again = [
            e.n
            for e in events
            if e.kind == "require" and e.n > event.n and params & set(e.get("params", ()))
        ]
        end = min(again, default=1 << 62)
        steps = [
            e for e in context.steps if event.n < e.n < end and params & set(e.get("changed", ()))
        ]
        passes = [e for e in events if e.kind == "backward" and event.n < e.n < end]
        came = any(params & set(e.get("arrived", ())) for e in passes)
        if len(steps) < 3 or len(passes) < 3 or came or place_of(event) is None:
            continue
        if not any(e.kind == "backward" and e.n < event.n for e in events):
            continue
        moved = params & set(steps[-1].get("changed", ()))
        still = [p for p in context.trace.params if p.index in moved]
        names = ", ".join(f"`{p.name or p.shape}`" for p in still)
        yield from hit(
            "GA104",
            event,
            f"{names} cease to ask for gradients here, but keep the one they have, and so the "
            f"optimizer goes on moving them, by momentum or decay: {plural(len(steps), 'step')} "
            "in what was looked at",
            (steps[0], "this step still moves them"),
            mend="Set `p.grad = None` as well, or clear with `zero_grad(set_to_none=True)`.",
        )
        return


def _names(context: Context, params: set[int]) -> str:
    told = [f"`{p.name or p.shape}`" for p in context.trace.params if p.index in params]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def schedule_of_another(context: Context) -> Iterator[Hit]:
    """GA304: the optimizer was made anew after the scheduler, which goes on moving the old one."""
    trace = context.trace
    optimizers = {o.index: o for o in trace.optimizers}
    for made in (e for e in trace.events if e.kind == "scheduler"):
        old = optimizers.get(made.get("optimizer", -1))
        number = made.get("scheduler")
        if old is None:
            continue
        moves = [e for e in trace.events if e.kind == "schedule" and e.get("scheduler") == number]
        for new in trace.optimizers:
            born = [
                e
                for e in trace.events
                if e.kind == "optimizer" and e.get("optimizer") == new.index and e.n > made.n
            ]
            if not born or not new.steps or not set(new.params) & set(old.params):
                continue
            late = [e for e in moves if e.n > born[0].n]
            stepped = {e.get("optimizer") for e in context.steps if e.n > born[0].n}
            if len(late) < 2 or old.index in stepped or new.index not in stepped:
                continue
            if any(e.kind == "scheduler" and e.get("optimizer") == new.index for e in trace.events):
                continue
            yield from hit(
                "GA304",
                born[0],
                f"{new.kind} is made after the scheduler, which goes on moving the rate of the "
                f"{old.kind} that was made first and never steps again: the rate of this one stays "
                f"({plural(len(late), 'step')} of the scheduler in what was looked at)",
                (made, "the scheduler was given the first one"),
                (late[0], "it steps here"),
                mend="Make the scheduler after the optimizer that is used, or keep the first one.",
            )
            return


def loaded_and_made_anew(context: Context) -> Iterator[Hit]:
    """GA304: a state is loaded into an optimizer that another takes the place of."""
    trace = context.trace
    optimizers = {o.index: o for o in trace.optimizers}
    for event in trace.events:
        old = optimizers.get(event.get("optimizer", -1)) if event.kind == "load" else None
        if old is None or any(
            e.get("optimizer") == old.index and e.n > event.n for e in context.steps
        ):
            continue
        for made in trace.events:
            new = optimizers.get(made.get("optimizer", -1)) if made.kind == "optimizer" else None
            if new is None or made.n < event.n or set(new.params) != set(old.params):
                continue
            if not new.steps or any(
                e.kind == "load" and e.get("optimizer") == new.index for e in trace.events
            ):
                continue
            yield from hit(
                "GA304",
                made,
                f"{new.kind} is made over the same parameters after a state was loaded into "
                "another, which never steps again: this one begins without a state "
                f"({plural(new.steps, 'step')})",
                (event, "the state was loaded here"),
                mend="Load the state into the optimizer that steps, after it was made.",
            )
            return


def validated_into_the_update(context: Context) -> Iterator[Hit]:
    """GA104: a validation runs a backward, and the next update holds its gradient."""
    for line, windows in context.lines():
        bad: list[tuple[Window, list[Event]]] = []
        for window in windows:
            micros = context.story.micros(window)
            base = set(micros[-1].get("eval", ())) if micros else set()
            checks = [e for e in micros if _checks(e) or set(e.get("eval", ())) - base]
            own = [e for e in micros if e not in checks]
            if checks and own and window.whole and checks[-1].n < own[0].n:
                bad.append((window, checks))
        if not bad or len(bad) == len(windows) or _in_check(line.function):
            continue
        window, checks = bad[0]
        yield from hit(
            "GA104",
            checks[0],
            f"{plural(len(checks), 'backward')} of a validation leave their gradient, which the "
            f"next update of the training uses ({plural(len(bad), 'update')} of {len(windows)} in "
            "what was looked at)",
            (line, "this step uses it"),
            mend="Validate under `torch.no_grad()` without a backward, or clear the gradients.",
        )
        return


def _in_check(function: str) -> bool:
    return not _CHECKS.isdisjoint(function.lower().split("_"))


def _checks(event: Event) -> bool:
    place = place_of(event)
    return place is not None and _in_check(place.function)


def gradients_of_new_copies(context: Context) -> Iterator[Hit]:
    """GA309: each step of an optimizer finds no gradient, for they came to copies, soon gone."""
    yield from _gradients_of_copies(context, soon_gone=True)


def gradients_of_copies(context: Context) -> Iterator[Hit]:
    """GA309: the same where the copies stay: the optimizer was given others."""
    yield from _gradients_of_copies(context, soon_gone=False)


def _gradients_of_copies(context: Context, soon_gone: bool) -> Iterator[Hit]:
    trace = context.trace
    params = {p.index: p for p in trace.params}
    for optimizer in trace.optimizers:
        own = set(optimizer.params)
        steps = [e for e in context.steps if e.get("optimizer") == optimizer.index]
        if (
            optimizer.index in context.faulty
            or len(steps) < 2
            or any(not own <= set(e.get("idle", ())) for e in steps)
        ):
            continue
        if any(e.get("changed") or e.get("closure") for e in steps):
            continue
        shapes = sorted(params[i].shape for i in own if i in params)
        came = [e for e in trace.events if e.kind == "backward" and e.get("arrived")]
        copies = [
            e
            for e in came
            if all(_free(context, params[i]) for i in e.get("arrived", ()))
            and _copies(sorted(params[i].shape for i in e.get("arrived", ())), shapes)
        ]
        asked = [e for e in trace.events if e.kind == "grad"]
        once = all(params[i].arrivals == 1 for e in copies for i in e.get("arrived", ()))
        if len(copies) < 2 or len(copies) < len(came) or once is not soon_gone:
            continue
        where = next((w for e in asked[:1] if (w := written_past(place_of(e))) is not None), None)
        given = None if asked else optimizer.user or optimizer.at
        yield from hit(
            "GA309",
            where or given or copies[0],
            f"the parameters that {optimizer.kind} owns never get a gradient: the losses are those "
            "of copies"
            + (", which are moved through `.data`, past the graph" if where is not None else "")
            + f" ({plural(len(steps), 'step')} that change nothing in what was looked at)",
            (copies[0], "this backward reaches the copies"),
            (steps[0], "this step finds no gradient"),
            mend="Compute what is adapted as a function of the parameters, with "
            "`create_graph=True` and `torch.func.functional_call`, or hand the copies' gradients "
            "over before the step.",
        )
        context.faulty.add(optimizer.index)
        context.explained.update(i for e in copies for i in e.get("arrived", ()))


def _free(context: Context, param: Param) -> bool:
    """Whether no optimizer owns a parameter, and no finding explains why."""
    return param.is_parameter and not param.owners and param.index not in context.explained


def _copies(came: list[tuple[int, ...]], own: list[tuple[int, ...]]) -> bool:
    """Whether shapes are those of one or several copies."""
    times = len(came) // len(own) if own else 0
    return times > 0 and came == sorted(own * times)


FIRST = (gradients_of_new_copies,)
RULES = (
    gradients_of_copies,
    hooks_pile_up,
    frozen_and_moved,
    schedule_of_another,
    loaded_and_made_anew,
    validated_into_the_update,
)
