"""What an accumulator cannot be built on, refused before anything runs, with the reason."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Integral
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gradaccum.engine.wide import Width
from gradaccum.errors import InputError, shown

WIDTHS: tuple[torch.dtype | str, ...] = (torch.float32, torch.float64, "compensated")

__all__ = [
    "read_budget",
    "read_every",
    "read_limit",
    "read_optimizers",
    "read_schedulers",
    "read_width",
    "refuse_ranks",
]


def refuse_ranks(model: object) -> None:
    """Refuse what is no module, and more than one process."""
    if not isinstance(model, nn.Module):
        raise InputError(
            "model",
            "The model is not a module.",
            got=shown(model),
            expected="a torch.nn.Module",
            do="gather several in torch.nn.ModuleList([...])",
        )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        raise InputError(
            "ranks",
            "This release accumulates in one process: counts would not be summed over ranks.",
            got=f"{torch.distributed.get_world_size()} ranks",
            expected="1 rank",
            do="train on one device, or scale each rank's loss by hand until ranks are supported",
        )


def read_optimizers(
    optimizer: Optimizer | Iterable[Optimizer], model: nn.Module
) -> tuple[Optimizer, ...]:
    """Return the optimizers of one loss; refuse those that accumulation cannot serve."""
    several = isinstance(optimizer, Iterable)
    optimizers = tuple(optimizer) if several else (optimizer,)
    wrong = [o for o in optimizers if not isinstance(o, Optimizer)]
    if wrong or not optimizers:
        raise InputError(
            "optimizer",
            "That is no optimizer of torch.",
            got=shown(wrong[0]) if wrong else "an empty sequence",
            expected="a torch.optim.Optimizer, or several that together serve one loss",
            do="acc = ga.Accumulator(model, torch.optim.AdamW(model.parameters()))",
        )
    wrapper = next((o for o in optimizers if not hasattr(o, "_optimizer_step_post_hooks")), None)
    if wrapper is not None:
        raise InputError(
            "optimizer",
            "That wraps an optimizer, and decides itself when a step is one.",
            got=f"a {type(wrapper).__module__}.{type(wrapper).__name__}",
            expected="the optimizer that steps",
            do="pass what it wraps: wrapper.optimizer",
        )
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    if len({id(p) for p in owned}) != len(owned):
        raise InputError(
            "optimizer",
            "A parameter belongs to two optimizers, so it would be stepped twice per update.",
            got=f"{len(owned)} parameters, {len({id(p) for p in owned})} of them distinct",
            expected="each parameter in one optimizer",
            do="leave it out of all but one",
        )
    ours = {id(p) for p in model.parameters()}
    for one in optimizers:
        _refuse_closure(one)
        held = [p for group in one.param_groups for p in group["params"]]
        if not any(id(p) in ours for p in held):
            raise InputError(
                "optimizer-without-model",
                f"The {type(one).__name__} holds none of the model's parameters, so no update "
                "could change the model.",
                got=f"{len(held)} parameters, 0 of them among the model's {len(ours)}",
                expected="an optimizer over model.parameters()",
                do="build the optimizer after the model is built, wrapped, moved or converted",
            )
    _refuse_steps_in_backward(owned)
    return optimizers


def read_schedulers(scheduler: object, optimizers: tuple[Optimizer, ...]) -> tuple[Any, ...]:
    """Return the schedulers that advance once per successful update."""
    if scheduler is None:
        return ()
    schedulers = tuple(scheduler) if isinstance(scheduler, list | tuple) else (scheduler,)
    for one in schedulers:
        if isinstance(one, ReduceLROnPlateau):
            raise InputError(
                "scheduler",
                "ReduceLROnPlateau needs a metric, which an update does not have.",
                got="ReduceLROnPlateau",
                expected="a scheduler whose step() takes no argument",
                do="call plateau.step(metric) yourself after each evaluation",
            )
        if not callable(getattr(one, "step", None)):
            raise InputError(
                "scheduler",
                "That is no scheduler.",
                got=shown(one),
                expected="an object with step(), or a list of them",
                do="scheduler=torch.optim.lr_scheduler.LinearLR(optimizer)",
            )
        if isinstance(one, LRScheduler) and one.optimizer not in optimizers:
            raise InputError(
                "scheduler",
                "The scheduler drives another optimizer than the accumulator's.",
                got=f"{type(one).__name__} over another {type(one.optimizer).__name__}",
                expected="a scheduler of one of the accumulator's optimizers",
                do="build the scheduler on the optimizer that you pass to Accumulator",
            )
    return schedulers


def read_every(every: int | Callable[[int], int], update: int) -> int:
    """The number of micro-batches in the window of update number `update`."""
    number = every(update) if callable(every) else every
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        source = f"every({update})" if callable(every) else "every"
        raise InputError(
            "every",
            "A window needs at least one micro-batch.",
            got=f"{source} = {number!r:.60}",
            expected="an int >= 1, or a function of the update index that returns one",
            do="ga.Accumulator(model, optimizer, every=8)",
        )
    return int(number)


def read_budget(budget: object) -> int:
    """The most samples in a micro-batch, where no lengths are known."""
    if isinstance(budget, bool) or not isinstance(budget, Integral) or budget < 1:
        raise InputError(
            "plan-argument",
            "The budget allows no micro-batch.",
            got=f"budget={budget!r:.60}",
            expected="a whole number of samples, at least 1",
            do="budget=8, or lengths= with a budget in padded elements",
        )
    return int(budget)


def read_limit(name: str, limit: float | None) -> float | None:
    """Check a clipping limit."""
    if limit is None:
        return None
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not number or math.isnan(limit) or limit <= 0:
        raise InputError(
            "clip",
            f"`{name}` must be greater than 0, or every update would be nothing.",
            got=f"{name}={limit!r:.60}",
            expected="a number > 0, or None for no clipping",
            do=f"{name}=1.0",
        )
    return float(limit)


def read_width(dtype: object, model: nn.Module, *, apart: bool) -> Width | None:
    """Check `accumulate_dtype`.

    Args:
        dtype: what the user gave.
        model: its devices must have the dtype.
        apart: whether sums are to be kept apart from `.grad` in any case.
    """
    if dtype is None:
        return Width(None, packed=False, apart=True) if apart else None
    if not isinstance(dtype, torch.dtype | str) or dtype not in WIDTHS:
        raise InputError(
            "accumulate-dtype",
            "Gradients cannot be accumulated in that.",
            got=f"accumulate_dtype={shown(dtype)}",
            expected='torch.float32, torch.float64, "compensated" (24 bits), or None for the '
            "parameters' own dtype",
            do="accumulate_dtype=torch.float32",
        )
    if dtype == torch.float64 and any(p.device.type == "mps" for p in model.parameters()):
        raise InputError(
            "accumulate-dtype",
            "This device has no float64.",
            got="accumulate_dtype=torch.float64 for parameters on mps",
            expected="a type that the device computes in",
            do="accumulate_dtype=torch.float32",
        )
    if isinstance(dtype, torch.dtype):
        return Width(dtype, packed=False, apart=apart)
    return Width(torch.float32, packed=True, apart=apart)


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs = closure is not None and closure.default is inspect.Parameter.empty
    if isinstance(optimizer, LBFGS) or needs:
        raise InputError(
            "optimizer-closure",
            f"{type(optimizer).__name__} evaluates the loss several times inside each step, and a "
            "window's micro-batches are gone by then.",
            got=type(optimizer).__name__,
            expected="an optimizer whose step() needs no closure",
            do="use AdamW or SGD; or give it a closure that loops over the whole batch itself",
        )


def _refuse_steps_in_backward(parameters: list[nn.Parameter]) -> None:
    for i, parameter in enumerate(parameters):
        inside = getattr(parameter, "_in_backward_optimizers", None)
        hooks = (parameter._post_accumulate_grad_hooks or {}).values()
        if inside or any(_reaches_optimizer(hook) for hook in hooks):
            raise InputError(
                "optimizer-in-backward",
                "An optimizer already steps inside backward, so no gradient is left to accumulate.",
                got=f"parameter {i} of {len(parameters)} has a hook that steps an optimizer",
                expected="parameters whose gradients stay until the window ends",
                do="remove the hooks (`_apply_optimizer_in_backward`, "
                "`register_post_accumulate_grad_hook`), or train without accumulation",
            )


def _reaches_optimizer(hook: Any) -> bool:
    """Whether a hook calls `step` and can see an optimizer: as argument, attribute or variable."""
    seen: list[object] = []
    while isinstance(hook, partial):
        seen += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    if not inspect.isroutine(hook):
        hook = getattr(hook, "__call__", hook)  # noqa: B004 - the method itself, to look inside
    owner = getattr(hook, "__self__", None)
    names = [slot for kind in type(owner).__mro__ for slot in getattr(kind, "__slots__", ())]
    seen += [*getattr(owner, "__dict__", {}).values(), *(getattr(owner, n, None) for n in names)]
    function = getattr(hook, "__func__", hook)
    if not isinstance(function, FunctionType) or "step" not in function.__code__.co_names:
        return False
    seen += [function.__globals__.get(name) for name in function.__code__.co_names]
    seen += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    seen += [_content(cell) for cell in function.__closure__ or ()]
    return any(isinstance(item, Optimizer) for value in seen for item in _inside(value))


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)
