"""Modes of torch's that hold one thing still, so that its share of a difference can be told."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradaccum.engine.policies.opened import RUNS_BACKWARD, opened
from gradaccum.engine.policies.sites import Names, Site

__all__ = ["Held", "Statistics", "Widen"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Widen(TorchFunctionMode):
    """Within it, what a model computes in a narrower type on purpose is computed in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.narrowest = torch.float64
        """The coarsest type in which something was computed all the same."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RUNS_BACKWARD:
            with self:
                return opened(func)(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("float", "half", "bfloat16") and args and isinstance(args[0], Tensor):
            return args[0].double() if args[0].is_floating_point() else func(*args).double()
        # What writes in place must be given the tensor itself.
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        if not (in_place or name in ("__set__", "__get__", "__setitem__") or "out" in kwargs):
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in _NARROW and result.requires_grad:
            eps = torch.finfo(result.dtype).eps
            if eps > torch.finfo(self.narrowest).eps:
                self.narrowest = result.dtype
        return result


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _NARROW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if type(value) in (list, tuple):
        return type(value)(map(_wide, value))
    return value


class Statistics(TorchFunctionMode):
    """Sees every BatchNorm in training mode; on request, all normalise by one set of statistics.

    Args:
        names: of the model's modules.
        known: statistics by place, that of the first forward.
        fixed: whether to normalise by these.
    """

    def __init__(
        self, names: Names, known: dict[Site, tuple[Tensor, Tensor]], *, fixed: bool
    ) -> None:
        super().__init__()
        self._names = names
        self._known = known
        self._fixed = fixed
        self.apart: dict[Site, float] = {}
        """By place, how far a forward's own mean was from the known one, in standard deviations."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RUNS_BACKWARD:
            with self:
                return opened(func)(*args, **kwargs)
        order = (
            _BATCH_NORM if func is F.batch_norm else _BUILTIN if func is torch.batch_norm else None
        )
        if order is None:
            return func(*args, **kwargs)
        given = order.bind(*args, **kwargs)
        given.apply_defaults()
        if not given.arguments["training"]:
            return func(*args, **kwargs)
        site = self._names.site("batch_norm")
        values = given.arguments["input"].detach()
        over = [dim for dim in range(values.dim()) if dim != 1]
        var, mean = torch.var_mean(values, over, correction=0)
        known_mean, known_var = self._known.setdefault(site, (mean, var))
        apart = ((mean - known_mean) / known_var.clamp(min=1e-300).sqrt()).abs().max().item()
        self.apart[site] = max(self.apart.get(site, 0.0), apart)
        if not self._fixed:
            return func(*args, **kwargs)
        given.arguments.update(running_mean=known_mean, running_var=known_var, training=False)
        return func(*given.args, **given.kwargs)


def _builtin(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: Any,
    momentum: Any,
    eps: Any,
    cudnn_enabled: Any,
) -> None:
    """The order of arguments of `torch.batch_norm`."""


_BATCH_NORM = inspect.signature(F.batch_norm)
_BUILTIN = inspect.signature(_builtin)


class Held:
    """A source of random numbers that are all the same: nothing is dropped, no noise is added."""

    active = True

    def __init__(self, names: Names) -> None:
        self._names = names
        self.sites: dict[Site, tuple[int, ...]] = {}

    def keep(
        self,
        kind: str,
        shape: tuple[int, ...],
        like: Tensor,
        probability: float,  # noqa: ARG002 - `Source` says what is handed over
    ) -> Tensor:
        """See `Source`."""
        self.sites[self._names.site(kind)] = shape
        return torch.ones(shape, dtype=torch.bool, device=like.device)

    def uniform(
        self, kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """See `Source`."""
        self.sites[self._names.site(kind)] = shape
        return torch.full(shape, 0.5, dtype=dtype, device=device)

    def normal(
        self, kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """See `Source`."""
        self.sites[self._names.site(kind)] = shape
        return torch.zeros(shape, dtype=dtype, device=device)
