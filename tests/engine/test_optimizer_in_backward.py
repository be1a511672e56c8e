"""Optimizers that step inside backward leave no gradient to accumulate, and are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradaccum import errors
from refusals import BATCHES, build, model, refused

IN_BACKWARD = "An optimizer already steps inside backward, so no gradient is left to accumulate."


def tutorial(module: nn.Module) -> None:
    """The hook of torch's tutorial on fusing the step into the backward."""
    optimizers = {p: SGD([p], lr=0.5) for p in module.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def from_torch(module: nn.Module) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.5})


def _free_hook(parameter: Tensor, optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _each(hook: Callable[[Optimizer], Callable[[Tensor], None]]) -> Callable[[nn.Module], None]:
    def install(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(hook(SGD([parameter], lr=0.5)))

    return install


class Stepper:
    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    def method(self, parameter: Tensor) -> None:
        self.inner.step()
        self.inner.zero_grad()

    __call__ = method


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    def method(self, parameter: Tensor) -> None:
        self.inner.step()
        self.inner.zero_grad()


def defaulted(optimizer: Optimizer) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor, inner: Optimizer = optimizer) -> None:
        inner.step()
        inner.zero_grad()

    return hook


HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "the tutorial's dict": tutorial,
    "_apply_optimizer_in_backward": from_torch,
    "a partial": _each(lambda o: partial(_free_hook, optimizer=o)),
    "a partial of a partial": _each(lambda o: partial(partial(_free_hook, optimizer=o))),
    "a bound method": _each(lambda o: Stepper(o).method),
    "a bound method with slots": _each(lambda o: Slotted(o).method),
    "an object that can be called": _each(Stepper),
    "a default argument": _each(defaulted),
    "a lambda": _each(lambda o: lambda p: o.step()),
}


@pytest.mark.parametrize("name", HOOKS)
def test_an_optimizer_that_steps_inside_backward_is_refused_before_anything_runs(
    name: str,
) -> None:
    module = model()
    HOOKS[name](module)
    refused(lambda: build(module), errors.InputError, "optimizer-in-backward", IN_BACKWARD)


class Opaque:
    """Hides its optimizer where no inspection finds it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.find = iter([optimizer] * 99).__next__

    def __call__(self, parameter: Tensor) -> None:
        self.find().step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_hook_that_hides_its_optimizer_is_caught_by_what_it_did(fused: bool) -> None:
    module = model()
    optimizer = SGD(module.parameters(), lr=0.5, fused=fused)
    module.get_parameter("0.weight").register_post_accumulate_grad_hook(Opaque(optimizer))
    acc = build(module, optimizer, every=2)
    loop = acc.microbatches(BATCHES)
    micro = next(loop)
    refused(
        lambda: micro.backward(module(micro.batch).sum(), 2),
        errors.InterferenceError,
        "optimizer-in-backward",
        "inside backward: an optimizer steps there, so there is nothing left to accumulate.",
    )
    acc.discard()
    assert acc.updates == 0


def _reads_the_rate(optimizer: Optimizer) -> Callable[[Tensor], None]:
    return lambda parameter: print(optimizer.param_groups[0]["lr"], end="")  # noqa: T201


def _undefined(optimizer: Optimizer) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.ndim > 9:
            assert later

    if optimizer is None:
        later = 1
    return hook


@pytest.mark.parametrize("hook", [_reads_the_rate, _undefined])
def test_a_hook_that_steps_nothing_is_no_reason_to_refuse(
    hook: Callable[[Optimizer], Callable[[Tensor], None]],
) -> None:
    module = model()
    optimizer = SGD(module.parameters(), lr=0.5)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook(optimizer))
    acc = build(module, optimizer, every=2)
    acc.step(BATCHES[0], lambda m, b: (m(b).sum(), len(b)))
    assert acc.updates == 1
