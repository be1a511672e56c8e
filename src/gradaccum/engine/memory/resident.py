"""What stays in memory from one micro-batch to the next: the model, gradients, optimizer state.

An optimizer makes its state in its first step, and a step with nothing in it is not harmless:
weight decay, momentum and the count of steps go on with a learning rate of zero. So the state is
foretold by a copy of the optimizer that steps on the `meta` device, where tensors have a size and
no memory, and nothing of the real one is touched.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gradaccum.planner.live import LiveBytes, storages

__all__ = ["OptimizerMemory", "foretell", "owned", "state_tensors"]

_ASSUMED = 2
"""Numbers for each one of a parameter, where an optimizer cannot be asked: as Adam's."""


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Bytes of one or several optimizers."""

    state: int
    """Once they have stepped."""

    step: int
    """Beyond that, while one of them steps."""

    assumed: bool = False
    """Whether an optimizer could not be asked, and was taken for one like Adam."""


def foretell(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> OptimizerMemory:
    """What the state of some optimizers will take, and their step at its peak.

    Args:
        optimizers: as they are now; they may have stepped already.
        parameters: those that get gradients, and that live on the device in question.

    Examples:
        >>> layer = torch.nn.Linear(10, 10, bias=False)
        >>> foretell([torch.optim.SGD(layer.parameters(), momentum=0.9)], layer.parameters()).state
        400
    """
    wanted = {id(parameter) for parameter in parameters}
    state, step, assumed = 0, 0, False
    for optimizer in optimizers:
        owned = [p for g in optimizer.param_groups for p in g["params"] if id(p) in wanted]
        if not owned:
            continue
        one = _ask(optimizer, wanted, {p.device.type for p in owned})
        if one is None:
            size = sum(p.numel() * p.element_size() for p in owned)
            one = OptimizerMemory(_ASSUMED * size, size, assumed=True)
        # Optimizers step one after the other; their states stay.
        state, step = state + one.state, max(step, one.step)
        assumed = assumed or one.assumed
    return OptimizerMemory(state, step, assumed)


def state_tensors(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The tensors in the states that optimizers have now."""
    found = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def owned(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """What is there already: parameters, buffers, and the optimizers' states as they are now."""
    return [*model.parameters(), *model.buffers(), *state_tensors(optimizers)]


def _ask(optimizer: Optimizer, wanted: set[int], kinds: set[str]) -> OptimizerMemory | None:
    shadow = _shadow(optimizer, wanted, kinds)
    step = cast(Any, type(optimizer).step)
    live, failed = LiveBytes("meta"), False
    if _made_with_it(optimizer):
        _give_state(shadow, optimizer, wanted)
    for _ in range(2):  # the second step has its state, and shows what stepping takes beside it
        live = LiveBytes("meta")
        try:
            with live:
                step(shadow)
        except Exception:  # noqa: BLE001 - any optimizer may read a value, and there is none here
            failed = True
    # Some make their state on the CPU, whatever the parameter's device is.
    made = state_tensors([shadow])
    state = sum(size for kind in ("meta", "cpu") for size in storages(made, kind).values())
    if failed and not state:
        return None
    if failed:
        live.peak = max(live.peak, _largest(shadow))
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return OptimizerMemory(state, 0 if fused else live.peak)


def _shadow(optimizer: Optimizer, wanted: set[int], kinds: set[str]) -> Optimizer:
    """The same optimizer without memory, hooks or state, and with gradients for all it steps."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    groups = []
    for group in optimizer.param_groups:
        mine: dict[str, Any] = {k: copy.copy(v) for k, v in group.items() if k != "params"}
        mine["params"] = [_weightless(p) for p in group["params"] if id(p) in wanted]
        if "fused" in mine:
            mine["fused"] = False
        if "foreach" in mine:
            mine["foreach"] = _takes_lists(group, kinds)
        if "capturable" in mine:
            mine["capturable"] = False
        groups.append(mine)
    hooks = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    shadow.__dict__.update(hooks, param_groups=groups, state=defaultdict(dict))
    shadow.__dict__.pop("step", None)  # a scheduler's or a profiler's, bound to the real one
    return shadow


def _made_with_it(optimizer: Optimizer) -> bool:
    """Whether an optimizer makes its state with itself, and its step does not: old Adagrads."""
    return isinstance(optimizer, torch.optim.Adagrad) and bool(optimizer.state)


def _give_state(shadow: Optimizer, optimizer: Optimizer, wanted: set[int]) -> None:
    theirs = [p for group in shadow.param_groups for p in group["params"]]
    ours = [p for group in optimizer.param_groups for p in group["params"] if id(p) in wanted]
    for mine, parameter in zip(theirs, ours, strict=True):
        shadow.state[mine] = {
            name: value
            if not isinstance(value, Tensor)
            else torch.empty_like(value, device="meta")
            if value.shape == parameter.shape
            else value.clone()
            for name, value in optimizer.state.get(parameter, {}).items()
        }


def _weightless(parameter: Tensor) -> nn.Parameter:
    empty = torch.empty_like(parameter, device="meta", requires_grad=False)
    made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        made.grad = torch.empty_like(empty)
    return made


def _takes_lists(group: dict[str, Any], kinds: Sequence[str] | set[str]) -> bool:
    """Whether a step works on all parameters at once, whose results are then alive at once."""
    if group["foreach"] is not None or group.get("fused"):
        return bool(group["foreach"])
    return "cpu" not in kinds and not group.get("differentiable", False)


def _largest(optimizer: Optimizer) -> int:
    sizes = [p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"]]
    return _ASSUMED * max(sizes, default=0)
