"""GA2xx: what the loss is divided by."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gradaccum.lint.facts import Facts, View, Window, common_loop, owned, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.arithmetic import INSIDE, OWN
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Divisor, Tensor, Thing

__all__ = ["GLOBAL", "RULES"]


_COMPUTED = re.compile(r"^\(|\(\)@\d+$")
"""A window that is worked out, from a nominal batch size for example, and not just set."""


def not_divided(facts: Facts, view: View) -> Iterator[Hit]:
    """GA201."""
    if facts.opaque or len(view.windows) < 1:
        return
    trace = facts.trace
    if trace.scaled_keys & trace.window_keys:
        return
    if any(_COMPUTED.search(key) for key in trace.window_keys) or _rate_divided(facts, view):
        return
    for window in view.windows:
        usual = view.usual(window.step)
        if usual < 2 or len(window.fresh) != usual or not _one_line(window):
            continue
        if not owned(view, facts, window):
            continue
        last = window.fresh[-1]
        loss = tensor_of(last)
        late = _divided_late(facts, last, usual)
        sometimes = any(
            other.node is last.node and _divisors(tensor_of(other)) for other in facts.backwards
        )
        if not (late or sometimes or _is_window(facts, view, window)):
            continue
        if _compensated(facts, view, window) or _divisors(loss):
            continue
        if loss.flags & {"sum", "hidden", "cat", "weighted", "leaf"} and not sometimes:
            continue
        if late is not None:
            yield hit(
                "GA201",
                late,
                "divided only after its backward has run: the gradients are those of the "
                "undivided loss",
                (last, "backward of the undivided loss"),
                (window.step, "one update for all micro-batches of the window"),
            )
            return
        if loss.partial:
            keys = {item.key for item in loss.partial} & trace.window_keys
            if keys:
                yield hit(
                    "GA201",
                    last,
                    "one term of this loss is divided by the window, another is not",
                    (window.step, "one update for all micro-batches of the window"),
                )
            continue
        yield hit(
            "GA201",
            last,
            "the loss is not divided, so the update is the sum over the window: N times the mean",
            (window.step, "one update for all micro-batches of the window"),
        )
        return


def _divisors(loss: Tensor) -> list[Divisor]:
    """What may be the window; a mean over a micro-batch's own tokens is not."""
    return [item for item in loss.divisors if item.key != OWN]


def _written(loss: Tensor) -> list[Divisor]:
    """What the loop itself divides by."""
    return [item for item in loss.divisors if item.key != INSIDE]


def _rate_divided(facts: Facts, view: View) -> bool:
    """Whether the learning rate was divided by a setting: by the batch, where losses are sums.

    Where it was worked out before, by the window itself: other quotients are no rate per batch.
    """
    worked_out = view.optimizer.kwargs.get("lr")
    if isinstance(worked_out, Thing) and any(
        f" Div {key})" in worked_out.key for key in facts.trace.window_keys
    ):
        return True
    made = view.optimizer.node
    rates = (
        [part.value for part in made.keywords if part.arg == "lr"]
        if isinstance(made, ast.Call)
        else []
    )
    return any(
        isinstance(rate, ast.BinOp)
        and isinstance(rate.op, ast.Div)
        and not isinstance(rate.right, ast.Constant)
        for rate in rates
    )


def _divided_late(facts: Facts, mark: Event, usual: int) -> Event | None:
    """A division by the window of a loss that was already differentiated."""
    for event in facts.trace.events:
        if event.kind != "divided_late" or event.tensor is None:
            continue
        same = event.tensor.forwards == tensor_of(mark).forwards
        if same and event.tensor.divisors[-1].value == usual:
            return event
    return None


def _one_line(window: Window) -> bool:
    """Whether there is one pass for each micro-batch, though each branch may spell it out."""
    if "closure" in window.step.flags:
        return False
    spots = {event.spot for event in window.fresh}
    around = {tuple([loop.node for loop in event.loops]) for event in window.fresh}
    turns = {event.loops for event in window.fresh}
    return len(spots) == 1 or (len(turns) == len(window.fresh) and len(around) == 1)


def _is_window(facts: Facts, view: View, window: Window) -> bool:
    """Whether the passes of one step are micro-batches, and not the parts of one objective."""
    first, last = window.fresh[0], window.fresh[-1]
    if first.loops[:-1] != last.loops[:-1] and not _gated(window):
        return False
    if _gated(window):
        return not facts.trace.decisions or _surely(facts, window.step)
    # A loop inside the step's own: micro-batches if each pass fetches its own data, and the
    # loop's variable only counts.
    loop = last.loops[-1].node if last.loops else None
    return isinstance(loop, (ast.For, ast.While)) and _fetches(loop, facts)


def _gated(window: Window) -> bool:
    step, last = window.step, window.fresh[-1]
    return bool(last.loops) and common_loop(step, last) == last.loops[-1]


def _surely(facts: Facts, step: Event) -> bool:
    return not any(facts.trace.decisions.get(key, (True, True))[1] for key in step.unsure)


def _fetches(loop: ast.For | ast.While, facts: Facts) -> bool:
    """Whether a pass takes its data from a call, not from a slice of what the loop walks over."""
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
        return False
    if getattr(loop.iter.func, "id", "") not in ("range", "trange"):
        return False
    counter = loop.target.id if isinstance(loop.target, ast.Name) else ""
    places = _running_places(loop, counter)
    fetched = False
    for statement in loop.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Subscript) and counter in _names(node.slice):
                return False
            if isinstance(node, ast.Subscript) and _names(node.slice) & places:
                fetched = True
            if isinstance(node, ast.Call) and not isinstance(node.func, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name == "next" or _takes_no_tensor(node, loop):
                    fetched = True
    return fetched


def _running_places(loop: ast.For, counter: str) -> set[str]:
    """Names of `N * window + counter`: where a micro-batch stands among those of all windows."""
    return {
        target.id
        for node in loop.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Add) and counter in _names(node.value)
        and any(isinstance(part, ast.Mult) for part in ast.walk(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }  # fmt: skip


def _takes_no_tensor(node: ast.Call, loop: ast.For) -> bool:
    """A call whose result is unpacked as data: made of nothing that the loop itself made."""
    made: set[str] = set()
    for statement in loop.body:
        for child in ast.walk(statement):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                made.add(child.id)
    used = _names(node)
    statement = next(
        (
            child
            for body in loop.body
            for child in ast.walk(body)
            if isinstance(child, ast.Assign)
            and (
                child.value is node
                or (isinstance(child.value, ast.Tuple) and node in child.value.elts)
            )
        ),
        None,
    )
    return statement is not None and not used & made


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _compensated(facts: Facts, view: View, window: Window) -> bool:
    kinds = {"grad_scale", "set_grad", "autograd_grad"}
    if any(event.kind in kinds for event in window.since):
        return True
    if any("weighted" in event.flags for event in window.fresh):
        return True  # not every loss is differentiated with the weight 1
    if any(event.kind == "grad_hook" and "returns" in event.flags for event in facts.trace.events):
        return True
    position = facts.trace.events.index(window.fresh[-1])
    for event in facts.trace.events[position:]:
        if event is window.step:
            return False
        if event.kind == "escape" and event.thing is not None:
            if event.thing.kind in ("model", "params", "optimizer"):
                return True
            if event.thing in view.optimizer.models:
                return True
    return False


def divided_twice(facts: Facts, view: View) -> Iterator[Hit]:
    """GA202."""
    for window in view.windows:
        for event in window.fresh:
            loss = tensor_of(event)
            keys = [item.key for item in loss.divisors]
            usual = float(view.usual(window.step))
            twice = {
                item.key
                for item in loss.divisors
                if keys.count(item.key) > 1
                and (_is_count(item.key, facts) or (usual > 1 and item.value == usual))
            }
            if twice:
                why = (
                    "here, and again inside the engine's backward"
                    if "accelerate" in event.flags
                    else "twice"
                )
                yield hit("GA202", event, f"the loss is divided by the window length {why}")


def gradients_divided_each(facts: Facts, view: View) -> Iterator[Hit]:
    """GA202: the sum so far is divided after every micro-batch."""
    events = facts.trace.events
    for window in view.windows:
        if len(window.fresh) < 2 or facts.opaque or not owned(view, facts, window):
            continue
        between = [event for event in window.since if event.kind == "grad_scale"
                   and "share" in event.flags and event.loops
                   and events.index(event) > events.index(window.fresh[0])
                   and events.index(event) < events.index(window.fresh[-1])]  # fmt: skip
        turns = {mark.loops[-1] for mark in window.fresh if mark.loops}
        within = [event for event in between if turns & set(event.loops) and not event.unsure]
        if within and window.fresh[0].loops[-1] in within[0].loops:
            yield hit("GA202", within[0], "the sum so far is divided after every micro-batch: the "
                      "first one is divided as often as there are micro-batches, the last one once",
                      (window.fresh[1], "the next backward adds to what was divided"),
                      (window.step, "the update"))  # fmt: skip
            return


def counted_and_divided(facts: Facts, view: View) -> Iterator[Hit]:
    """GA202: a sum over the tokens of the whole window, divided by its length besides."""
    for window in view.windows:
        usual = float(view.usual(window.step))
        if usual < 2 or len(window.fresh) != usual or "closure" in window.step.flags:
            continue
        for event in window.fresh:
            loss = tensor_of(event)
            whole = [item for item in loss.divisors if _counts_all(item, event)]
            again = [
                item
                for item in loss.divisors
                if item not in whole
                and item.fixed
                and (item.key in facts.trace.window_keys or (item.value or 0) > 1)
            ]
            if whole and again and "sum" in loss.flags:
                yield hit("GA202", event, "divided by the count of the whole window, and by the "
                          "window length as well: every update is N times too small",
                          (window.step, "the update"))  # fmt: skip
                return


_SUM = re.compile(r"\.sum\(\)@(\d+)$")


def _counts_all(item: Divisor, event: Event) -> bool:
    """Whether a divisor counts what all micro-batches of the window hold."""
    if item.fixed and "num_items_in_batch" in item.key:
        return True
    counted_at = _SUM.search(item.key)
    loop = event.loops[-1].node if event.loops else None
    return counted_at is not None and int(counted_at[1]) < getattr(loop, "lineno", 0)


def divided_for_engine(facts: Facts) -> Iterator[Hit]:
    """GA202: a division by the length that DeepSpeed's engine was told of, and divides by."""
    for event in facts.backwards:
        if not event.flags & {"engine", "accelerate"}:
            continue
        asked = f".{_STEPS}()" if "engine" in event.flags else "deepspeed"
        if any(
            _STEPS in item.key and asked in item.key.lower() for item in tensor_of(event).divisors
        ):
            yield hit("GA202", event, "the loss is divided by the window length here, and again "
                      "inside the engine's backward")  # fmt: skip
            return


_STEPS = "gradient_accumulation_steps"


def last_divided(facts: Facts, view: View) -> Iterator[Hit]:
    """GA201: only the micro-batch that ends a window is divided."""
    if facts.opaque:
        return
    found: list[tuple[Event, Window]] = []
    for window in view.windows:
        passes = window.fresh
        if len(passes) < 2 or not _one_line(window) or not _gated(window):
            continue
        counts = [len(tensor_of(event).divisors) for event in passes]
        if not owned(view, facts, window) or _compensated(facts, view, window):
            return
        if len(set(counts[:-1])) != 1 or counts[-1] <= counts[0]:
            continue
        if tensor_of(passes[-1]).partial or tensor_of(passes[0]).partial:
            return
        found.append((passes[0], window))
    if len(found) > 1:
        mark, window = found[0]
        yield hit(
            "GA201",
            mark,
            "only the last micro-batch of a window is divided: it weighs far less than the others",
            (window.fresh[-1], "divided"),
            (window.step, "one update for all micro-batches of the window"),
        )


def _is_count(key: str, facts: Facts) -> bool:
    return key in facts.trace.window_keys and key != "accelerate"


def mean_of_means(facts: Facts) -> Iterator[Hit]:
    """GA203."""
    for event in facts.backwards:
        loss = tensor_of(event)
        if "accelerate" in event.flags:
            continue
        if "ignores" in loss.flags and _written(loss) and event.loops:
            yield hit(
                "GA203",
                event,
                "a mean over the tokens that are not ignored, divided by the number of "
                "micro-batches: tokens of short micro-batches weigh more",
            )
            return
        if "class_weights" in loss.flags and _written(loss) and event.loops:
            yield hit(
                "GA203",
                event,
                "a mean over the class weights of one micro-batch, divided by the number of "
                "micro-batches: samples beside rare classes weigh less",
            )
            return


def lopsided(facts: Facts) -> Iterator[Hit]:
    """GA201: one term of the loss is divided for the window, another is not."""
    runs: dict[object, list[Event]] = {}
    for event in facts.trace.events:
        if event.kind in ("zero", "step"):
            runs.clear()
        elif event.kind == "backward" and event.loops:
            run = runs.setdefault(event.node, [])
            run.append(event)
            loss = tensor_of(event)
            if len(run) > 1 and "lopsided" in loss.flags and not loss.divisors:
                yield hit("GA201", event, "one term of this loss is divided for the whole window, "
                          "the other is added undivided in every micro-batch")  # fmt: skip
                return


RULES = (not_divided, divided_twice, gradients_divided_each, counted_and_divided, last_divided)
GLOBAL = (divided_for_engine, lopsided, mean_of_means)
