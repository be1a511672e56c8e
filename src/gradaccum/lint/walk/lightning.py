"""Lightning's manual optimisation: who calls `training_step`, and what it finds on `self`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.files.slicing import Slice
from gradaccum.lint.walk.classes import find_method
from gradaccum.lint.walk.loops import LENGTH, OUTER
from gradaccum.lint.walk.trace import Frame
from gradaccum.lint.walk.values import Class, Func, Num, Seq, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["configured", "fit", "manual"]

_STARTS = ("on_train_epoch_start", "on_train_batch_start")
_ENDS = ("on_train_batch_end", "on_train_epoch_end")


def manual(node: ast.AST, home: ast.ClassDef | None, found: Slice) -> bool:
    """Whether a root is a `training_step` that runs its own backward passes.

    Where a hook that is called at another time steps or clears as well, nobody knows the order.
    """
    if home is None or not isinstance(node, ast.FunctionDef) or node.name != "training_step":
        return False
    if "manual_backward" not in found.functions.get("training_step", frozenset()):
        return False
    return not any(
        found.functions.get(item.name, frozenset()) & {"step", "zero_grad", "manual_backward"}
        for item in home.body
        if isinstance(item, ast.FunctionDef)
        and (item.name.startswith(("on_", "optimizer_")) and item.name not in (*_STARTS, *_ENDS))
    )


def fit(walker: Walker, func: Func, home: Class, values: dict[str, Value]) -> None:
    """Call `training_step` as a trainer does: with an index that starts anew in each epoch."""
    owner = func.owner
    assert isinstance(owner, Thing)
    for wanted in ("optimizer", "scheduler"):
        configured(walker, owner, wanted)
    names = [arg.arg for arg in func.node.args.args][1:]
    count = int(walker.known.get("length", LENGTH))
    epochs = Frame(home.node, walker.tick())
    walker.loops.append(epochs)
    for epoch in range(OUTER):
        epochs.turn(epoch, epoch == OUTER - 1)
        _hook(walker, home, owner, _STARTS[0])
        frame = Frame(func.node, walker.tick())
        walker.loops.append(frame)
        for index in range(count):
            frame.turn(index, index == count - 1)
            if len(names) > 1:
                values[names[1]] = Num(index, frozenset(), True)
            _hook(walker, home, owner, _STARTS[1])
            walker.function(func, [], dict(values))
            _hook(walker, home, owner, _ENDS[0])
        walker.loops.pop()
        _hook(walker, home, owner, _ENDS[1])
    walker.loops.pop()


def _hook(walker: Walker, home: Class, owner: Thing, name: str) -> None:
    method = find_method(walker, home, name)
    if method is not None:
        method.owner = owner
        walker.function(method, [], {})


def configured(walker: Walker, owner: Thing, wanted: str) -> Value:
    """What `optimizers()` or `lr_schedulers()` returns: always the same objects."""
    kept = f"__{wanted}__"
    if kept not in owner.attrs:
        home = owner.attrs.get("__class__")
        method = (
            find_method(walker, home, "configure_optimizers") if isinstance(home, Class) else None
        )
        found: list[Value] = []
        if method is not None:
            method.owner = owner
            found = _collect(walker.function(method, [], {}), wanted)
        if not found:
            name = "optimizers" if wanted == "optimizer" else "lr_schedulers"
            found = [Thing(wanted, f"{owner.key}.{name}()")]
        owner.attrs[kept] = found[0] if len(found) == 1 else Seq(found)
    return owner.attrs[kept]


def _collect(value: Value, wanted: str, depth: int = 0) -> list[Value]:
    """The optimizers or schedulers in what `configure_optimizers` returned."""
    if depth > 3:
        return []
    if isinstance(value, Seq):
        return [one for item in value.items for one in _collect(item, wanted, depth + 1)]
    if not isinstance(value, Thing):
        return []
    if value.kind == wanted:
        return [value]
    if value.kind != "dict":
        return []  # a scheduler also holds its optimizer
    parts = [value.attrs.get(name) for name in ("optimizer", "lr_scheduler", "scheduler")]
    return [one for part in parts for one in _collect(part, wanted, depth + 1)]
