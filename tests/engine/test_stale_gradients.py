"""Gradients that were there before a window are refused, or dropped where that was asked."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import gradaccum as ga
from gradaccum import errors
from refusals import BATCHES, Setup, another_backward, refused

STALE = "A gradient stands in the parameters though no micro-batch has been added"


@pytest.mark.parametrize("updates", [0, 1])
def test_a_stale_gradient_is_refused_and_left_as_it_was(updates: int) -> None:
    setup = Setup()
    for _ in range(updates):
        setup.window()
    another_backward(setup)
    before = setup.photograph()
    loop = setup.acc.microbatches(BATCHES)
    micro = next(loop)
    error = refused(lambda: setup.add(micro), errors.StaleGradientError, "stale-gradient", STALE)
    assert setup.photograph() == before
    assert "4 of 4 parameters" in error.got
    assert "`0.weight`" in error.got
    assert ("since update 0" if updates else "before the first window") in error.got
    assert "`loss.backward()` of your own" in error.got
    assert 'on_stale="zero"' in error.do
    setup.optimizer.zero_grad()
    setup.add(micro)  # the same micro-batch, once what was stale is gone
    setup.acc.discard()
    loop.close()


def test_a_stale_gradient_in_some_parameters_points_to_another_loss() -> None:
    setup = Setup()
    setup.model.get_submodule("2")(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    with pytest.raises(errors.StaleGradientError) as caught:
        setup.window()
    assert "2 of 4 parameters" in caught.value.got
    assert "another loss" in caught.value.got


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_gradient_of_zeros_is_not_stale(value: float, truth: dict[str, Any]) -> None:
    setup = Setup()
    for parameter in setup.model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    setup.window()
    assert setup.photograph() == truth


@pytest.mark.parametrize("value", [math.nan, math.inf, 5e-324])
def test_a_gradient_of_nan_or_of_the_least_number_is_stale(value: float) -> None:
    setup = Setup()
    bias = setup.model.get_parameter("2.bias")
    bias.grad = torch.full_like(bias, value)
    with pytest.raises(errors.StaleGradientError, match=re.escape(STALE)):
        setup.window()


def test_a_stale_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    acc = ga.Accumulator(embedding, SGD(embedding.parameters(), lr=0.5), every=1)
    embedding(torch.tensor([1])).sum().backward()
    loop = acc.microbatches([torch.tensor([2])])
    micro = next(loop)
    with pytest.raises(errors.StaleGradientError, match=re.escape(STALE)):
        micro.backward(embedding(micro.batch).sum(), 1)


def test_a_stale_gradient_is_dropped_where_that_was_asked(truth: dict[str, Any]) -> None:
    setup = Setup(on_stale="zero")
    another_backward(setup)
    setup.window()
    assert setup.photograph() == truth


def test_step_with_a_stale_gradient_leaves_it_where_it_was() -> None:
    setup = Setup()
    another_backward(setup)
    before = setup.photograph()
    with pytest.raises(errors.StaleGradientError, match=re.escape(STALE)):
        setup.acc.step(BATCHES[0], lambda m, b: (setup.loss(b), len(b)))
    assert setup.photograph() == before
