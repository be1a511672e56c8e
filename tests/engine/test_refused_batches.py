"""Batches that cannot be split, results of a `loss_fn` and options that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum import errors
from refusals import BATCHES, NO_COUNT, NO_GRAPH, NO_TENSOR, NOT_A_DENOMINATOR, Setup, refused


def steps(batch: Any, **options: Any) -> Callable[[Setup], object]:
    def loss_fn(module: nn.Module, micro: Any) -> tuple[Tensor, int]:
        x = micro["x"] if isinstance(micro, dict) else micro
        return module(x.double()).square().sum(), len(x)

    return lambda setup: setup.acc.step(batch, loss_fn, **options)


BAD_BATCHES: dict[str, tuple[Callable[[Setup], object], type[errors.GradaccumError], str]] = {
    "sizes that disagree": (
        steps({"x": torch.ones(4, 2), "y": torch.ones(3)}),
        errors.BatchError,
        "Tensors of the batch disagree about the number of samples.",
    ),
    "no samples": (steps(torch.ones(0, 2)), errors.BatchError, "The batch holds no samples."),
    "an empty dict": (steps({}), errors.BatchError, "The batch holds no samples."),
    "an empty list": (
        steps([], collate=torch.stack),
        errors.BatchError,
        "The batch holds no samples.",
    ),
    "a sample longer than the budget": (
        steps(torch.ones(2, 2), lengths=[2, 2], budget=1),
        errors.PlanError,
        "budget",
    ),
    "a length missing": (
        steps(torch.ones(2, 2), lengths=[2], budget=8),
        errors.BatchError,
        "There must be one length for each sample of the batch.",
    ),
    "a budget of 0": (steps(torch.ones(2, 2), budget=0), errors.GradaccumError, "budget"),
    "a budget of 1.5": (steps(torch.ones(2, 2), budget=1.5), errors.GradaccumError, "budget"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_batch_that_cannot_be_split_is_refused_before_anything_runs(name: str) -> None:
    action, kind, words = BAD_BATCHES[name]
    setup = Setup()
    setup.window()
    before = setup.photograph()
    with pytest.raises(kind) as caught:
        action(setup)
    assert words in str(caught.value)
    assert all((caught.value.got, caught.value.expected, caught.value.do)), str(caught.value)
    assert setup.photograph() == before
    setup.window()


NO_PAIR = "`loss_fn` did not return a loss and its count."

BAD_RESULTS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "a loss alone": (lambda x: x, "loss-without-count", NO_COUNT),
    "nothing": (lambda x: None, "loss-fn-result", NO_PAIR),
    "a tuple of one": (lambda x: (x,), "loss-fn-result", NO_PAIR),
    "a tuple of three": (lambda x: (x, 1, 2), "loss-fn-result", NO_PAIR),
    "a list": (lambda x: [x, 1], "loss-fn-result", NO_PAIR),
    "None for a count": (lambda x: (x, None), "loss-without-count", NO_COUNT),
    "count and loss swapped": (lambda x: (1, x), "loss-without-graph", NO_TENSOR),
    "a loss without graph": (lambda x: (x.detach(), 1), "loss-without-graph", NO_GRAPH),
    "a count below 0": (lambda x: (x, -1), "count", NOT_A_DENOMINATOR),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_loss_fn_that_returns_something_else_is_refused_and_leaves_nothing(name: str) -> None:
    result, slug, problem = BAD_RESULTS[name]
    setup = Setup()
    before = setup.photograph()
    calls = []

    def loss_fn(module: nn.Module, batch: Tensor) -> Any:
        calls.append(1)
        loss = module(batch.double()).square().sum()
        return result(loss) if len(calls) == 2 else (loss, len(batch))

    error = refused(
        lambda: setup.acc.step(torch.ones(3, 2), loss_fn), errors.InputError, slug, problem
    )
    assert "micro-batch 2 of 3" in error.problem
    assert setup.photograph() == before


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        ({"budget": 8}, "lengths-missing"),
        ({"collate": list}, "lengths-missing"),
        ({"lengths": len}, "budget-missing"),
    ],
)
def test_options_of_a_loop_that_do_not_fit_together_are_refused_at_the_call(
    options: dict[str, Any], slug: str
) -> None:
    setup = Setup()
    refused(
        lambda: setup.acc.microbatches(BATCHES, **options),
        errors.InputError,
        slug,
        "Regrouping a stream needs to know how l",
    )
