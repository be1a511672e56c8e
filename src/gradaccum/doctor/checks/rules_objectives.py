"""GA1xx, GA301, GA405: gradients of one objective that another's step uses, or none yet."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, hit, plural
from gradaccum.doctor.checks.named import attacks, rewards
from gradaccum.doctor.checks.patterns import receiver
from gradaccum.doctor.checks.source import loop_of, statement
from gradaccum.doctor.checks.story import Window, place_of
from gradaccum.doctor.trace.model import Event

__all__ = ["RULES"]


def attack_stays(context: Context) -> Iterator[Hit]:
    """GA104: the backward that made an adversarial input has left its gradient in the weights."""
    for line, windows in context.lines():
        bad: list[tuple[Window, Event, Event]] = []
        for window in windows:
            micros = context.story.micros(window)
            made = [e for e in micros if attacks(place_of(e), line)]
            own = [e for e in micros if e not in made]
            if made and own and window.whole and made[-1].n < own[-1].n:
                bad.append((window, made[0], own[-1]))
        if not bad or 2 * len(bad) < len(windows):
            continue
        window, event, own_event = bad[0]
        cleared = [e for e in window.of("zero") if e.n < event.n]
        yield from hit(
            "GA104",
            cleared[-1] if cleared else own_event,
            "a backward that only makes an input leaves its gradient in the weights, and it is "
            f"added to that of the loss ({plural(context.updates(windows), 'update')})",
            (event, "this backward makes the input, after the last clearing"),
            (own_event, "the loss that is trained on"),
            (line, "this step uses both"),
            mend="Clear the gradients after the input is made, or take its gradient alone by "
            "`torch.autograd.grad(loss, x)`.",
        )
        context.settled.add(line)


def critic_follows_the_actor(context: Context) -> Iterator[Hit]:
    """GA104: a policy's loss reaches the critic through the advantage, which is not detached."""
    for line, windows in context.lines():
        bad: list[tuple[Event, Event]] = []
        for window in windows:
            for event in context.story.micros(window):
                others = context.story.used.get(event.get("b"), set()) - {window.optimizer, None}
                own = [
                    e
                    for e in context.story.micros(window)
                    if context.story.used.get(e.get("b"), set()) == {window.optimizer}
                ]
                if others and own and place_of(own[0]) != place_of(event):
                    bad.append((event, own[-1]))
        if not bad or 2 * len(bad) < len(windows):
            continue
        event, own_event = bad[0]
        name = receiver(statement(place_of(event)), plain=True)
        reward = rewards(place_of(event), name) if name else None
        if reward is None:
            continue
        yield from hit(
            "GA104",
            reward,
            "the log-probability is multiplied by what keeps the graph of another model, so that "
            "the policy's loss trains that model, too: its step adds this gradient to that of its "
            f"own loss ({plural(context.updates(windows), 'update')})",
            (event, "this backward reaches both"),
            (own_event, "the other model's own loss"),
            (line, "its step uses both"),
            mend="Multiply by `advantage.detach()`.",
        )
        context.settled.add(line)


def shared_by_two(context: Context) -> Iterator[Hit]:
    """GA301: two optimizers own a parameter, and both step on one gradient."""
    owners = {p.index: p.owners for p in context.trace.params if len(p.owners) > 1}
    if not owners:
        return
    found: list[tuple[Window, Window, frozenset[int]]] = []
    last: dict[int, tuple[Window, tuple[int, ...]]] = {}
    for window in sorted(context.story.windows, key=lambda one: one.order):
        again: set[int] = set()
        before: Window | None = None
        for group in window.used:
            for index in group.params & owners.keys():
                earlier = last.get(index)
                if earlier and earlier[1] == group.backwards:
                    if earlier[0].optimizer != window.optimizer:
                        before = earlier[0]
                        again.add(index)
                last[index] = window, group.backwards
        if again and before is not None:
            found.append((before, window, frozenset(again)))
    if len(found) < 2 or 4 * len(found) < len(context.story.windows):
        return
    before, window, params = found[0]
    if window.optimizer is None or before.optimizer is None or context.handled(window) is not None:
        return
    names = ", ".join(f"`{p.name or p.shape}`" for p in context.trace.params if p.index in params)
    yield from hit(
        "GA301",
        window.line,
        f"two optimizers own {names}, and both step on one gradient: each backward is applied "
        f"twice ({plural(len(found), 'time')} in what was looked at)",
        (before.line, "the first step on it"),
        mend="Give each parameter to one optimizer.",
    )


def closure_never_clears(context: Context) -> Iterator[Hit]:
    """GA101: L-BFGS evaluates its closure many times a step, and nothing clears between."""
    kinds = {o.index: o.kind for o in context.trace.optimizers}
    for line, windows in context.lines():
        number = windows[0].optimizer
        if number is None or kinds.get(number) != "LBFGS":
            continue
        bad: list[Event] = []
        for window in windows:
            inner = [e for e in window.of("backward") if e.get("step") == number]
            closure = window.step is not None and window.step.get("closure")
            summed = closure and any(group.held >= 3 for group in window.used)
            outside = any(e.get("step") is None for e in context.story.micros(window))
            if inner and summed and not outside and loop_of(place_of(inner[0])) is None:
                bad.append(inner[0])
        if bad and 2 * len(bad) >= len(windows):
            first = bad[0]
            yield from hit(
                "GA101",
                line,
                "the closure that this step evaluates runs many times and never clears: each of "
                "its evaluations adds its gradient to those before "
                f"({plural(context.updates(windows), 'update')})",
                (first, "the backward of the closure"),
                mend="Call `optimizer.zero_grad()` first in the closure.",
            )
            context.faulty.add(number)


def clipped_before_backward(context: Context) -> Iterator[Hit]:
    """GA405: a clip ahead of the backward, when there is no gradient."""
    events = context.trace.events
    called = [e for e in events if e.kind == "clip" and e.get("given") is not None]
    for event in called:
        same = [e for e in called if place_of(e) == place_of(event)]
        params = set(event.get("params") or ())
        if len(same) < 2 or not params or any(e.get("given") != 0 for e in same):
            continue
        later = [e for e in events if event.n < e.n and e.kind in ("backward", "step", "clip")][:2]
        if [e.kind for e in later] != ["backward", "step"]:
            continue
        if params & set(later[0].get("arrived", ())):
            yield from hit(
                "GA405",
                event,
                f"the clip runs before the backward, when no parameter has a gradient: none of "
                f"{plural(len(same), 'call')} changes anything",
                (later[0], "the gradients are made only here"),
                (later[1], "and used as they are"),
                mend="Clip between the last backward of a window and its step.",
            )
            return


RULES = (
    attack_stays,
    critic_follows_the_actor,
    shared_by_two,
    closure_never_clears,
    clipped_before_backward,
)
