"""Losses and gradients that are no finite numbers, where `on_nonfinite` asks for a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gradaccum import errors
from refusals import BATCHES, Setup, refused


@pytest.mark.parametrize("bad", [0, 1, 3], ids=["first", "within", "last"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["loss", "term", "mean"])
def test_a_loss_that_is_not_finite_is_refused_where_that_was_asked_and_can_be_skipped(
    form: str, value: float, bad: int, truth: dict[str, Any]
) -> None:
    setup = Setup(on_nonfinite="raise", every=4)
    batches = [*BATCHES]
    batches.insert(bad, torch.ones(1, 2))
    for i, micro in enumerate(setup.acc.microbatches(batches)):
        if i != bad:
            setup.add(micro)
            continue
        before = setup.photograph()
        loss = setup.loss(micro.batch) * value
        problem = "The loss is not finite."
        action: Callable[[], object] = partial(micro.backward, loss, 1)
        if form == "mean":
            action = partial(micro.backward, loss, 1, reduction="mean")
        if form == "term":
            problem = "The loss of term 'b' is not finite."
            action = partial(micro.backward, {"a": (setup.loss(micro.batch), 1), "b": (loss, 1)})
        error = refused(action, errors.NonFiniteError, "non-finite", problem)
        assert isinstance(error, ArithmeticError)
        assert f"micro-batch {i + 1} of 4" in error.got
        assert setup.photograph() == before
        micro.skip()
    assert setup.photograph() == truth


def test_a_gradient_that_is_not_finite_is_refused_and_nothing_of_it_is_kept(
    truth: dict[str, Any],
) -> None:
    setup = Setup(on_nonfinite="raise", every=4)
    for micro in setup.acc.microbatches([*BATCHES, torch.ones(1, 2)]):
        if micro.index < 3:
            setup.add(micro)
            continue
        # sqrt has an infinite slope at 0, and the loss itself is 0
        loss = (setup.model.get_parameter("2.bias") - 1).sqrt().sum()
        before = setup.photograph()
        error = refused(
            partial(micro.backward, loss, 1),
            errors.NonFiniteError,
            "non-finite",
            "The gradient of `2.bias` is not finite.",
        )
        assert "micro-batch 4 of 4" in error.got
        assert setup.photograph() == before
        micro.skip()
    assert setup.photograph() == truth


def test_without_being_asked_nobody_looks() -> None:
    setup = Setup()
    for micro in setup.acc.microbatches([BATCHES[0]]):
        micro.backward(setup.loss(micro.batch) * math.nan, 2)
    assert micro.update is not None
    assert math.isnan(setup.model.get_parameter("2.bias").item())
