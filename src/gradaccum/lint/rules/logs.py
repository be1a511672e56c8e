"""GA205: whether the loss that is shown is the one that is optimised."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.lint.facts import Facts, View, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.rules.plans import walked_over
from gradaccum.lint.walk.evaluate import key_of
from gradaccum.lint.walk.means import LOOP
from gradaccum.lint.walk.sizes import KNOWN
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Num, Seq, Thing, Value

__all__ = ["GLOBAL", "RULES"]


def log_by_updates(facts: Facts) -> Iterator[Hit]:
    """GA205: the sum of all micro-batches' losses, divided by the number of updates."""
    for index, event in _averages(facts):
        if tensor_of(event).divisors or "weighed" in event.flags:
            continue
        count, by = _counts(event)
        steps = _steps(facts, index, count)
        if steps is not None and by == steps and 0 < steps < count:
            yield hit("GA205", event, "a loss is summed for each micro-batch, and the sum is "
                      "divided by the number of updates: "
                      "the logged loss grows with the length of the window")  # fmt: skip
            return


def log_of_shares(facts: Facts, view: View) -> Iterator[Hit]:
    """GA205: a loss that was divided for the window is shown; a mean of such says it best."""
    yield from list(_mean_of_shares(facts, view)) or _share(facts, view)


def _mean_of_shares(facts: Facts, view: View) -> Iterator[Hit]:
    """Losses that were divided for the window, summed, and divided by how many they are."""
    usual = view.usual()
    if usual < 2 or len(facts.views) != 1:
        return
    for index, event in _averages(facts):
        loss = tensor_of(event)
        if "weighed" in event.flags or "undone" in loss.flags or len(loss.divisors) != 1:
            continue
        if loss.divisors[0].value != usual:
            continue
        count, by = _counts(event)
        steps = _steps(facts, index, count)
        if steps is not None and by == count and steps < count:
            yield hit("GA205", event, "the losses are divided for the window before they are "
                      "summed, and the sum is divided by the number of micro-batches: "
                      "the log shows the N-th part of the loss")  # fmt: skip
            return


def _averages(facts: Facts) -> Iterator[tuple[int, Event]]:
    undone = facts.trace.undone
    for index, event in enumerate(facts.trace.events):
        if event.kind == "average" and event.thing is not None and id(event.node) not in undone:
            yield index, event


def _counts(event: Event) -> tuple[int, float]:
    """How many losses a sum holds, and what divides it."""
    assert event.thing is not None
    terms, by = event.thing.args
    assert isinstance(terms, Num)
    assert isinstance(by, Num)
    return int(terms.value), by.value


def _steps(facts: Facts, index: int, count: int) -> int | None:
    """The updates among the last `count` passes ahead of an event."""
    events = facts.trace.events[:index]
    passes = [at for at, other in enumerate(events) if other.kind == "backward"]
    if not 1 < count <= len(passes):
        return None
    return sum(1 for other in events[passes[-count] :] if other.kind == "step")


def log_over_samples(facts: Facts) -> Iterator[Hit]:
    """GA205: means of batches over the number of samples, or sums over the number of batches."""
    for _, event in _averages(facts):
        loss = tensor_of(event)
        if "mean" not in loss.flags or "sum" in loss.flags or loss.divisors or loss.partial:
            continue
        assert event.thing is not None
        entry, by = event.thing.attrs.get(LOOP), event.thing.args[1]
        if not isinstance(entry, Num) or not isinstance(by, Num):
            continue
        for loader in walked_over(facts, int(entry.value)):
            if not isinstance(loader, Thing) or not _holds_several(loader):
                continue
            if "weighed" in event.flags and by.tags and by.tags <= _lengths_of(loader):
                yield hit("GA205", event, "each loss is multiplied by the size of its batch, but "
                          "the sum is divided by the number of batches: the logged loss is too "
                          "large by the size of a batch")  # fmt: skip
                return
            data = loader.attrs.get("dataset")
            known = _lengths_of(data) if data is not None else set()
            if "weighed" not in event.flags and by.tags and by.tags <= known:
                yield hit("GA205", event, "means over batches are summed, and the sum is divided "
                          "by the number of samples: the logged loss is too small by the size of "
                          "a batch")  # fmt: skip
                return


def _holds_several(loader: Thing) -> bool:
    """Whether a loader is known to make batches of more than one."""
    size = loader.kwargs.get("batch_size")
    return (
        loader.kind == "loader"
        and size is not None
        and not (isinstance(size, Num) and size.value <= 1)
    )


def _lengths_of(value: Value) -> set[str]:
    key = value.key if isinstance(value, Seq) and value.key else key_of(value)
    return {f"len({key})", f"{KNOWN}{key})"}


_LOGS = frozenset(
    {"add_scalar", "add_scalars", "debug", "info", "log", "log_dict", "log_metric", "log_scalar",
     "print", "set_description", "set_postfix", "set_postfix_str", "write"}
)  # fmt: skip
"""Calls that show what they are given."""
_PLAIN = frozenset({"cpu", "data", "detach", "double", "float", "item", "mean", "numpy"})
"""What leaves a loss as it is."""


def _share(facts: Facts, view: View) -> Iterator[Hit]:
    """A loss that was divided for the window is shown as it is."""
    usual = view.usual()
    if usual < 2 or facts.opaque or len(facts.views) != 1:
        return
    seen: set[int] = set()
    for window in view.windows:
        for mark in window.fresh:
            if id(mark.node) in seen or not mark.loops or len(window.fresh) != usual:
                continue
            seen.add(id(mark.node))
            loss = tensor_of(mark)
            if "accelerate" in mark.flags or not any(d.value == usual for d in loss.divisors):
                continue
            found = _shown(mark)
            if found is not None:
                made = Event("shown", found, mark.path, mark.loops)
                yield hit("GA205", made, "the loss was divided for the window before it is shown: "
                          "the log shows the N-th part of it", (mark, "backward"))  # fmt: skip
                return


def _shown(mark: Event) -> ast.expr | None:
    """Where the name that a backward runs from is shown, in its loop, after it was divided."""
    call = mark.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    named = call.args[0] if call.args else call.func.value
    if isinstance(named, ast.Call) and len(named.args) == 1:
        named = named.args[0]  # scaler.scale(loss)
    body = getattr(mark.loops[-1].node, "body", [])
    nodes = [part for child in body for part in ast.walk(child)]
    if not isinstance(named, ast.Name) or call not in nodes:
        return None
    bound = [part for part in nodes if isinstance(part, _BINDING) and _binds(part, named.id)]
    last = max(bound, key=lambda part: part.lineno, default=None)
    if last is None or last.lineno >= call.lineno or not _divides(last, named.id):
        return None
    bad = {id(part) for node in nodes if isinstance(node, ast.If) and _is_alarm(node.test)
           for child in node.body for part in ast.walk(child)}  # fmt: skip
    for part in nodes:
        if isinstance(part, ast.Call) and part.lineno > last.lineno and _logs(part):
            if id(part) in bad:
                continue
            values = [*part.args, *[word.value for word in part.keywords]]
            if any(_plain(value, named.id) for value in values):
                return part
    return None


def _is_alarm(test: ast.expr) -> bool:
    """Whether a condition asks if a loss is finite: what it shows is no log."""
    return any(word in ast.unparse(test) for word in ("isfinite", "isnan", "isinf"))


_BINDING = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)


def _binds(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.For, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(
        isinstance(part, ast.Name) and part.id == name
        for target in targets
        for part in ast.walk(target)
    )


def _divides(node: ast.AST, name: str) -> bool:
    """Whether a statement divides a name, or makes it as a quotient."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Div)
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return False
    return isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Div)


def _logs(node: ast.Call) -> bool:
    func = node.func
    return (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")) in _LOGS


def _plain(node: ast.expr, name: str) -> bool:
    """Whether a value that is shown is a loss as it is, perhaps among others."""
    if isinstance(node, ast.Name):
        return node.id == name
    if isinstance(node, ast.Attribute):
        return node.attr in _PLAIN and _plain(node.value, name)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "format":
                return any(_plain(part, name) for part in node.args)
            return node.func.attr in _PLAIN and _plain(node.func.value, name)
        plain = getattr(node.func, "id", "") in ("float", "round", "str")
        return plain and bool(node.args) and _plain(node.args[0], name)
    if isinstance(node, ast.Dict):
        return any(_plain(part, name) for part in node.values)
    if isinstance(node, ast.JoinedStr):
        return any(_plain(part, name) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _plain(node.value, name)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        return isinstance(node.left, ast.Constant) and any(_plain(part, name) for part in values)
    return False


RULES = (log_of_shares,)
GLOBAL = (log_by_updates, log_over_samples)
