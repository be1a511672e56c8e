"""An accumulator that cannot work is not built."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import gradaccum as ga
from gradaccum import errors
from refusals import BATCHES, Setup, build, model, refused


class NeedsClosure(Optimizer):
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Callable[[], float]) -> float:
        return closure()


def _lbfgs() -> None:
    module = model()
    build(module, LBFGS(module.parameters()))


def _closure() -> None:
    module = model()
    build(module, NeedsClosure(module.parameters()))


def _of_a_replaced_model() -> None:
    old = model()
    optimizer = SGD(old.parameters(), lr=0.5)
    build(copy.deepcopy(old), optimizer)


def _second_of_another_model() -> None:
    module = model()
    ours, other = SGD(module.parameters(), lr=0.5), SGD(model().parameters(), lr=0.5)
    build(module, [ours, other])


def _shared_parameter() -> None:
    module = model()
    build(module, [SGD(module.parameters(), lr=0.5), SGD([next(module.parameters())], lr=0.5)])


def _foreign_scheduler() -> None:
    build(scheduler=ExponentialLR(SGD(model().parameters(), lr=0.5), 0.5))


def _plateau() -> None:
    module = model()
    optimizer = SGD(module.parameters(), lr=0.5)
    build(module, optimizer, scheduler=[ReduceLROnPlateau(optimizer)])


NO_OPTIMIZER = "That is no optimizer of torch."
NO_PARAMETERS = "holds none of the model's parameters, so no update could change the model."
WINDOW = "A window needs at least one micro-batch."
CLOSURE = "evaluates the loss several times inside each step"

BAD_BUILDS: dict[str, tuple[Callable[[], object], str, str]] = {
    "a list of models": (
        lambda: ga.Accumulator([model()], SGD(model().parameters())),
        "model",
        "The model is not a module.",
    ),
    "parameters for a model": (
        lambda: ga.Accumulator(model().parameters(), SGD(model().parameters())),
        "model",
        "The model is not a module.",
    ),
    "optimizer and model swapped": (
        lambda: ga.Accumulator(SGD(model().parameters()), model()),
        "model",
        "The model is not a module.",
    ),
    "no optimizer": (lambda: ga.Accumulator(model(), None), "optimizer", NO_OPTIMIZER),
    "an empty list of optimizers": (lambda: build(optimizer=[]), "optimizer", NO_OPTIMIZER),
    "parameters for an optimizer": (
        lambda: build(optimizer=list(model().parameters())),
        "optimizer",
        NO_OPTIMIZER,
    ),
    "a class for an optimizer": (lambda: build(optimizer=SGD), "optimizer", NO_OPTIMIZER),
    "a scheduler for an optimizer": (
        lambda: build(optimizer=ExponentialLR(SGD(model().parameters()), 0.5)),
        "optimizer",
        NO_OPTIMIZER,
    ),
    "a parameter in two optimizers": (
        _shared_parameter,
        "optimizer",
        "A parameter belongs to two optimizers, so it would be stepped twice per update.",
    ),
    "LBFGS": (_lbfgs, "optimizer-closure", CLOSURE),
    "an optimizer that needs a closure": (_closure, "optimizer-closure", CLOSURE),
    "an optimizer of a model that was replaced": (
        _of_a_replaced_model,
        "optimizer-without-model",
        NO_PARAMETERS,
    ),
    "a second optimizer of another model": (
        _second_of_another_model,
        "optimizer-without-model",
        NO_PARAMETERS,
    ),
    **{
        f"every={every!r}": (partial(build, every=every), "every", WINDOW)
        for every in (0, -1, 1.5, 2.0, "4", True, None, math.nan, math.inf, [4])
    },
    **{
        f"{name}={limit!r}": (
            partial(build, **{name: limit}),
            "clip",
            f"`{name}` must be greater than 0",
        )
        for name in ("clip_norm", "clip_value")
        for limit in (0, 0.0, -1.0, math.nan, "1.0", True, [1.0], 1j, -math.inf)
    },
    "both clips": (
        lambda: build(clip_norm=1.0, clip_value=1.0),
        "clip",
        "Clip by norm or by value",
    ),
    "ReduceLROnPlateau": (
        _plateau,
        "scheduler",
        "ReduceLROnPlateau needs a metric, which an update does not have.",
    ),
    "a scheduler of another optimizer": (
        _foreign_scheduler,
        "scheduler",
        "The scheduler drives another optimizer than the accumulator's.",
    ),
    "a function for a scheduler": (
        lambda: build(scheduler=lambda step: 0.5),
        "scheduler",
        "That is no scheduler.",
    ),
    "a name for a scheduler": (
        lambda: build(scheduler="cosine"),
        "scheduler",
        "That is no scheduler.",
    ),
    "on_stale": (lambda: build(on_stale="ignore"), "choice", "`on_stale` has no such value."),
    "on_stale None": (lambda: build(on_stale=None), "choice", "`on_stale` has no such value."),
    "on_nonfinite": (
        lambda: build(on_nonfinite="stop"),
        "choice",
        "`on_nonfinite` has no such value.",
    ),
    "a scaler that is none": (lambda: build(scaler=True), "choice", "scaler"),
    "an on_update that cannot be called": (lambda: build(on_update=5), "choice", "on_update"),
}


@pytest.mark.parametrize("name", BAD_BUILDS)
def test_an_accumulator_that_cannot_work_is_not_built(name: str) -> None:
    action, slug, problem = BAD_BUILDS[name]
    error = refused(action, errors.InputError, slug, problem)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("number", [0, 2.5, None, "2", True])
@pytest.mark.parametrize("how", ["loop", "counts", "step"])
def test_a_function_for_every_that_returns_no_whole_number_is_refused(
    how: str, number: Any
) -> None:
    setup = Setup(every=lambda update: 1 if update == 0 else number)
    setup.acc.step(BATCHES[0], lambda m, b: (setup.loss(b), len(b)))
    before = setup.photograph()
    actions: dict[str, Callable[[], object]] = {
        "loop": lambda: next(setup.acc.microbatches(BATCHES)),
        "counts": lambda: next(setup.acc.microbatches(BATCHES, counts=len)),
        "step": lambda: setup.acc.step(BATCHES[0], lambda m, b: (setup.loss(b), len(b))),
    }
    error = refused(actions[how], errors.InputError, "every", WINDOW)
    assert f"every(1) = {number!r}" in error.got
    assert setup.photograph() == before
