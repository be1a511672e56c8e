"""What becomes of BatchNorm while a window is open: a policy that the user picks.

- `"pooled"`: the running estimates move once for each window, by the statistics of all its samples.
- `"frozen"`: inputs are normalised by the running estimates, which stay, as in eval mode.
- `"microbatch"`: as torch does it, one step of the running estimates for each micro-batch.

Nothing of the model is replaced: hooks stand on its normalisation layers while the samples of a
window go through, and are removed when it closes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.hooks import RemovableHandle

from gradaccum.errors import InputError, LoopError, SplitWarning, users_level

__all__ = ["BatchNormChoice", "Normalisation", "Pool"]

BatchNormChoice: TypeAlias = Literal["pooled", "frozen", "microbatch"]


@dataclass(slots=True)
class Pool:
    """Statistics of one layer over the samples so far, as a window needs them at its end."""

    count: int
    """Values for each channel; of an instance norm, samples."""

    mean: Tensor
    """Mean of each channel; shape `(channels,)`, float64 where the device has it."""

    spread: Tensor
    """Sum of squared distances from the mean; of an instance norm, the mean of its variances."""

    def with_other(self, other: Pool, *, instances: bool) -> Pool:
        """Of both together (Chan, Golub and LeVeque, 1979)."""
        total = self.count + other.count
        share = other.count / total
        delta = other.mean - self.mean
        if instances:
            spread = self.spread + (other.spread - self.spread) * share
        else:
            spread = self.spread + other.spread + delta.square() * (self.count * share)
        return Pool(total, self.mean + delta * share, spread)


@dataclass(slots=True)
class _Layer:
    """A normalisation layer in an open window."""

    name: str
    module: _NormBase
    pool: Pool | None = None
    fresh: list[Pool] = field(default_factory=list)
    """Of the micro-batch at hand, which may yet be undone."""

    before: Pool | None = None
    """What `pool` was before the micro-batch at hand was kept."""

    kept: list[tuple[dict[str, Any], float | None, bool] | None] = field(default_factory=list)
    """What the layer had before its forward: buffers, momentum, mode; a stack. `None` for a forward
    that was none of this policy's business."""

    counted: int | None = None
    """Version of `num_batches_tracked`, which shows a forward that no hook saw; `None` of a lazy
    layer before its first."""

    @property
    def instances(self) -> bool:
        return isinstance(self.module, _InstanceNorm)


class Normalisation:
    """Carries out the policy for one model, window by window.

    The core tells it when a micro-batch begins (`start`), was added (`keep`) or never was (`undo`),
    and when the window's update was made (`commit`) or it was dropped (`drop`).

    Args:
        model: whose layers are looked after.
        choice: the policy; `None` is as torch does it, and says so once.
    """

    def __init__(self, model: nn.Module, choice: BatchNormChoice | None) -> None:
        self.choice = choice
        self._model = model
        self._layers: list[_Layer] = []
        self._hooks: list[RemovableHandle] = []
        self._at_work = False
        self._kept = False
        self._warned = not any(isinstance(module, _BatchNorm) for module in model.modules())
        self._refuse()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do or say as a micro-batch starts."""
        return self._warned and self.choice is None

    def start(self, microbatches: int) -> None:
        """A micro-batch's forward is about to run, after `microbatches` others of its window."""
        if self.choice is None:
            if microbatches and not self._warned:
                self._warn()
            return
        if self.choice == "microbatch":
            return
        if not self._hooks:
            self._hook()
        for layer in self._layers:
            layer.fresh = []
            lazy = isinstance(layer.module, LazyModuleMixin)
            layer.counted = None if lazy else _version(layer.module)
        self._at_work, self._kept = True, False

    def keep(self) -> None:
        """The micro-batch's gradient is there; an error leaves the sums as they were."""
        self._at_work = False
        pools = []
        for layer in self._layers:
            if layer.counted is not None and _version(layer.module) != layer.counted:
                raise _unseen(layer.name)
            pool = layer.pool
            for one in layer.fresh:
                pool = one if pool is None else pool.with_other(one, instances=layer.instances)
            pools.append(pool)
        for layer, pool in zip(self._layers, pools, strict=True):
            layer.before, layer.pool, layer.fresh = layer.pool, pool, []
        self._kept = True

    def undo(self) -> None:
        """The micro-batch never was."""
        self._at_work = False
        for layer in self._layers:
            layer.fresh = []
            if self._kept:
                layer.pool = layer.before
        self._kept = False

    def commit(self) -> None:
        """The window's update was made: its statistics enter the running estimates."""
        for layer in self._layers:
            if layer.pool is not None:
                _advance(layer.module, layer.pool, instances=layer.instances)
        self.drop()

    def drop(self) -> None:
        """The window is gone."""
        self.leave()
        self._layers = []

    def leave(self) -> None:
        """Remove all hooks; the sums of an open window stay."""
        self._at_work = False
        for layer in self._layers:
            # torch runs no hook after an interrupt: what a layer has lent is still to be given back
            for buffers, momentum, training in filter(None, layer.kept[:1]):
                layer.module._buffers.update(buffers)
                layer.module.momentum, layer.module.training = momentum, training
            layer.kept = []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def as_dict(self) -> dict[str, Any]:
        """The open window's sums, as plain types and tensors."""
        return {
            layer.name: [layer.pool.count, layer.pool.mean.clone(), layer.pool.spread.clone()]
            for layer in self._layers
            if layer.pool is not None
        }

    def load(self, saved: dict[str, Any]) -> None:
        """The inverse of `as_dict`."""
        self.drop()
        if not saved:
            return
        self._layers = self._find()
        for layer in self._layers:
            if layer.name in saved:
                count, mean, spread = saved[layer.name]
                device = layer.module.running_mean.device  # type: ignore[union-attr]
                layer.pool = Pool(count, mean.to(device), spread.to(device))

    # --- hooks ---

    def _hook(self) -> None:
        known = {id(layer.module): layer for layer in self._layers}
        self._layers = [known.get(id(layer.module), layer) for layer in self._find()]
        self._refuse()
        for layer in self._layers:
            before, after = self._before(layer), self._after(layer)
            self._hooks.append(layer.module.register_forward_pre_hook(before))
            self._hooks.append(
                # before other hooks, so that each policy takes back what it lent last
                layer.module.register_forward_hook(
                    after, with_kwargs=True, always_call=True, prepend=True
                )
            )

    def _find(self) -> list[_Layer]:
        return [
            _Layer(name, module)
            for name, module in self._model.named_modules()
            if isinstance(module, _NormBase) and module.track_running_stats
        ]

    def _before(self, layer: _Layer) -> Callable[..., None]:
        module = layer.module

        def hook(*_: Any) -> None:
            if layer.counted is None:
                layer.counted = _version(module)
            if not self._applies(layer):
                layer.kept.append(None)
                return
            names = ("running_mean", "running_var", "num_batches_tracked")
            buffers = {name: module._buffers.get(name) for name in names}
            layer.kept.append((buffers, module.momentum, module.training))
            if self.choice == "frozen" and not layer.instances:
                module.training = False
                return
            # The layer writes its statistics into these: with a momentum of 1, as they are.
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else torch.zeros_like(buffer)
            module.momentum = 1.0

        return hook

    def _after(self, layer: _Layer) -> Callable[..., None]:
        module = layer.module

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            lent = layer.kept.pop() if layer.kept else None
            if lent is None:  # or an error came before the hook that notes
                return
            buffers, momentum, training = lent
            found = {name: module._buffers.get(name) for name in buffers}
            module._buffers.update(buffers)
            module.momentum, module.training = momentum, training
            pooling = self.choice == "pooled" or layer.instances
            # Activation checkpointing runs a forward again, which has been counted before.
            if pooling and output is not None and torch._C._current_graph_task_id() == -1:
                values = args[0] if args else kwargs["input"]
                layer.fresh.append(_statistics(layer, values.detach(), found))

        return hook

    def _applies(self, layer: _Layer) -> bool:
        module = layer.module
        return self._at_work and module.training and module._buffers["running_mean"] is not None

    # --- what cannot be ---

    def _refuse(self) -> None:
        if self.choice not in ("pooled", "frozen"):
            return
        norms = [m for m in self._model.named_modules() if isinstance(m[1], _BatchNorm)]
        # The names of hidden parts are the same under `torch.compile`; what runs them is not.
        inside = [name for name, _ in norms if _compiled_around(self._model, name)]
        if inside:
            raise InputError(
                "batchnorm-compiled",
                f'batchnorm="{self.choice}" cannot see inside a compiled part of the model.',
                got=f"{_listed(inside)} under torch.compile",
                expected='batchnorm="microbatch", or normalisation outside of what is compiled',
                do='compile the parts between the BatchNorm layers, or use batchnorm="microbatch"',
            )
        without = [n for n, m in norms if not m.track_running_stats and m.training]
        if self.choice == "frozen" and without:
            raise InputError(
                "batchnorm-frozen",
                'batchnorm="frozen" normalises by running estimates, and a layer keeps none.',
                got=f"{_listed(without)} with track_running_stats=False",
                expected="BatchNorm layers with running estimates",
                do='GroupNorm in their place, or batchnorm="microbatch"',
            )

    def _warn(self) -> None:
        names = [
            name
            for name, module in self._model.named_modules()
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        ]
        if not names:
            return
        self._warned = True
        warnings.warn(
            f"{_listed(names)}: BatchNorm in training mode normalises each micro-batch by its own "
            "statistics and moves its running estimates once for each, so the update depends on "
            'how the batch is split. Choose: batchnorm="pooled" moves the estimates once for each '
            'window, by the statistics of all of it; "frozen" normalises by the estimates, and is '
            'exact; "microbatch" is as now. More: docs/messages.md#split-batchnorm',
            SplitWarning,
            stacklevel=users_level(),
        )


def _statistics(layer: _Layer, values: Tensor, found: dict[str, Any]) -> Pool:
    """The statistics of one forward, read from what the layer wrote, or off its input."""
    mean, var = found["running_mean"], found["running_var"]
    wide = torch.float32 if mean.device.type == "mps" else torch.float64
    channels = mean.numel()
    if layer.instances:
        # an input without a batch dimension is one sample
        dims = {"InstanceNorm1d": 3, "InstanceNorm2d": 4, "InstanceNorm3d": 5}
        batched = dims.get(type(layer.module).__name__, values.dim()) == values.dim()
        return Pool(len(values) if batched else 1, mean.to(wide), var.to(wide))
    count = values.numel() // channels
    if mean.dtype in (torch.float16, torch.bfloat16):
        # what such a layer writes is rounded to three digits
        over = [dim for dim in range(values.dim()) if dim != 1]
        var, mean = torch.var_mean(values.float(), over, correction=min(1, count - 1))
    return Pool(count, mean.to(wide), var.to(wide) * (count - 1))


def _advance(module: _NormBase, pool: Pool, *, instances: bool) -> None:
    """One step of the running estimates, as torch takes it after one forward."""
    tracked = module.num_batches_tracked
    if tracked is not None and not instances:
        tracked.add_(1)
    momentum = module.momentum
    if momentum is None:
        if instances or tracked is None:
            return  # torch's own take a factor of 0 then
        share: float | Tensor = 1.0 / tracked.to(pool.mean.dtype)
    else:
        share = momentum
    mean, var = module.running_mean, module.running_var
    if mean is None or var is None:
        return
    spread = pool.spread if instances else pool.spread / max(pool.count - 1, 1)
    with torch.no_grad():
        for running, value in ((mean, pool.mean), (var, spread)):
            running.copy_(running.to(value.dtype) * (1 - share) + value * share)


def _compiled_around(model: nn.Module, name: str) -> bool:
    """Whether `torch.compile` runs a module or one that it is in."""
    at = model
    path = name.split(".") if name else []
    for step in [None, *path]:
        at = at if step is None else at.get_submodule(step)
        if hasattr(at, "_orig_mod") or at._compiled_call_impl is not None:
            return True
    return False


def _version(module: _NormBase) -> int:
    tracked = module.num_batches_tracked
    return -1 if tracked is None else tracked._version


def _unseen(name: str) -> LoopError:
    return LoopError(
        "batchnorm-compiled",
        f"`{name}` ran where the policy for BatchNorm does not see it: in compiled code, or in a "
        "function that calls it without its hooks.",
        got="running estimates that moved without the layer being called",
        expected="BatchNorm layers that are called as modules while a micro-batch is at hand",
        do='batchnorm="microbatch", or leave torch.compile out of what calls the layer',
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name or 'the model'}`" for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
