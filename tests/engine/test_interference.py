"""Whoever else touches gradients or parameters in mid-window is noticed before the update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import gradaccum as ga
from gradaccum import errors
from refusals import BATCHES, Setup, another_backward, refused


def in_place(setup: Setup) -> None:
    with torch.no_grad():
        setup.model.get_parameter("2.weight").mul_(0.5)


def clip(setup: Setup) -> None:
    nn.utils.clip_grad_norm_(setup.model.parameters(), 1e-3)


def one_grad_to_none(setup: Setup) -> None:
    setup.model.get_parameter("2.bias").grad = None


def one_grad_replaced(setup: Setup) -> None:
    parameter = setup.model.get_parameter("2.bias")
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def group_added(setup: Setup) -> None:
    setup.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


GRADIENTS = "Gradients changed in the middle of a window"
PARAMETERS = "Parameters changed in the middle of a window"

INTRUDERS: dict[str, tuple[Callable[[Setup], object], str, str]] = {
    "zero_grad to None": (lambda s: s.optimizer.zero_grad(), "gradients-changed", GRADIENTS),
    "zero_grad to zeros": (
        lambda s: s.optimizer.zero_grad(set_to_none=False),
        "gradients-changed",
        GRADIENTS,
    ),
    "model.zero_grad": (lambda s: s.model.zero_grad(), "gradients-changed", GRADIENTS),
    "another backward": (another_backward, "gradients-changed", GRADIENTS),
    "a clip": (clip, "gradients-changed", GRADIENTS),
    "one gradient to None": (one_grad_to_none, "gradients-changed", GRADIENTS),
    "one gradient replaced": (one_grad_replaced, "gradients-changed", GRADIENTS),
    "optimizer.step": (lambda s: s.optimizer.step(), "parameters-changed", PARAMETERS),
    "a change in place": (in_place, "parameters-changed", PARAMETERS),
    "load_state_dict": (
        lambda s: s.model.load_state_dict(s.model.state_dict()),
        "parameters-changed",
        PARAMETERS,
    ),
    "a parameter group": (group_added, "parameters-changed", PARAMETERS),
}


@pytest.mark.parametrize(
    ("name", "at"),
    [
        (name, at)
        for name in INTRUDERS
        for at in ("next micro-batch", "last micro-batch", "flush")
        # what the optimizers hold is counted once per window, when they are about to step
        if (name, at) != ("a parameter group", "next micro-batch")
    ],
)
def test_an_intruder_in_mid_window_is_noticed_before_the_update(name: str, at: str) -> None:
    intrude, slug, problem = INTRUDERS[name]
    setup = Setup()
    loop = setup.acc.microbatches(BATCHES)
    setup.add(next(loop))
    if at == "last micro-batch":
        setup.add(next(loop))
    intrude(setup)
    before = setup.photograph()
    if at == "flush":
        action: Callable[[], object] = setup.acc.flush
    else:
        micro = next(loop)
        action = lambda: setup.add(micro)  # noqa: E731 - one of two actions
    error = refused(action, errors.InterferenceError, slug, problem)
    assert isinstance(error, RuntimeError)
    assert setup.photograph() == before

    setup.acc.discard()
    loop.close()
    assert (setup.acc.pending, setup.acc.updates) == (0, 0)
    assert all(p.grad is None for p in setup.model.parameters())
    setup.window()
    assert setup.acc.updates == 1


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_a_step_in_mid_window_is_noticed_for_every_kernel(
    kind: Callable[..., Optimizer], how: dict[str, bool], on_stale: Any
) -> None:
    setup = Setup(partial(kind, lr=0.5, **how), on_stale=on_stale)
    loop = setup.acc.microbatches(BATCHES)
    setup.add(next(loop))
    if on_stale == "zero":
        another_backward(setup)  # there must be something to step with
    setup.optimizer.step()
    micro = next(loop)
    refused(lambda: setup.add(micro), errors.InterferenceError, "parameters-changed", PARAMETERS)
    setup.acc.discard()
    loop.close()


@pytest.mark.parametrize("when", ["before the first micro-batch", "after an update"])
def test_a_zero_grad_or_a_step_between_windows_is_harmless(when: str) -> None:
    setup, clean = Setup(every=2), Setup(every=2)
    batches = [*BATCHES[:2], *BATCHES[:2]]
    for micro in clean.acc.microbatches(batches):
        clean.add(micro)
    for micro in setup.acc.microbatches(batches):
        if when == "before the first micro-batch" and micro.index == 0:
            setup.optimizer.zero_grad()
        setup.add(micro)
        if micro.update and when == "after an update":
            setup.optimizer.step()  # no gradients, so nothing moves
            setup.optimizer.zero_grad(set_to_none=False)
    assert setup.photograph() == clean.photograph()


def test_a_gradient_that_appears_in_mid_window_is_noticed() -> None:
    setup = Setup()
    lonely = nn.Linear(1, 1, dtype=torch.float64)
    both = nn.ModuleList([setup.model, lonely])
    acc = ga.Accumulator(both, SGD(both.parameters(), lr=0.5), every=3)
    loop = acc.microbatches(BATCHES)
    setup.add(next(loop))
    lonely.weight.grad = torch.ones(1, 1, dtype=torch.float64)
    micro = next(loop)
    error = refused(
        lambda: setup.add(micro), errors.InterferenceError, "gradients-changed", GRADIENTS
    )
    assert "`1.weight` appeared" in error.got
    acc.discard()
    loop.close()


@pytest.mark.parametrize("how", ["update", "load_state_dict"])
@pytest.mark.parametrize("at", ["micro-batch", "flush"])
def test_a_scale_that_changes_in_mid_window_is_noticed(how: str, at: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    setup = Setup(scaler=scaler)
    loop = setup.acc.microbatches(BATCHES)
    setup.add(next(loop))
    if how == "update":
        scaler.update(new_scale=4.0)
    else:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    before = setup.photograph()
    micro = next(loop)
    refused(
        setup.acc.flush if at == "flush" else lambda: setup.add(micro),
        errors.InterferenceError,
        "scaler-updated",
        "The scaler's scale changed in the middle of a window",
    )
    assert setup.photograph() == before
    setup.acc.discard()
    loop.close()
    setup.window()
    assert setup.acc.updates == 1
