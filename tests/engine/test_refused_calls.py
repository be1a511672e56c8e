"""Calls in an order that cannot be right are refused, and nothing had changed before."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import gradaccum as ga
from gradaccum import errors
from refusals import BATCHES, POSITIONS, Setup, refused


def test_a_photograph_sees_a_change_of_one_bit() -> None:
    setup = Setup()
    before = setup.photograph()
    assert setup.photograph() == before
    with torch.no_grad():
        weight = setup.model.get_parameter("0.weight")
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(2.0, dtype=torch.float64))
    assert setup.photograph() != before


def test_backward_twice_is_refused(truth: dict[str, Any]) -> None:
    setup = Setup()
    for micro in setup.acc.microbatches(BATCHES):
        loss = setup.loss(micro.batch)
        micro.backward(loss, len(micro.batch), retain_graph=True)
        before = setup.photograph()
        for again in (partial(micro.backward, loss, 1), micro.skip):
            refused(
                again,
                errors.LoopError,
                "backward-twice",
                "backward was called twice, so its samples would count twice.",
            )
            assert setup.photograph() == before
    assert setup.photograph() == truth


def test_backward_after_skip_is_refused() -> None:
    setup = Setup()
    for micro in setup.acc.microbatches(BATCHES):
        micro.skip()
        with pytest.raises(errors.LoopError) as caught:
            setup.add(micro)
        assert caught.value.slug == "backward-twice"
    assert setup.acc.updates == 0


@POSITIONS
def test_a_micro_batch_without_a_backward_is_refused(bad: int) -> None:
    setup = Setup()

    def forget() -> None:
        for i, micro in enumerate(setup.acc.microbatches(BATCHES)):
            if i != bad:
                setup.add(micro)

    with pytest.warns(ga.OpenWindowWarning) if bad else nullcontext():
        error = refused(
            forget,
            errors.LoopError,
            "backward-never",
            f"micro-batch {bad + 1} of 3 was left without a backward.",
        )
    assert isinstance(error, RuntimeError)
    assert "micro.skip()" in error.do
    assert setup.acc.pending == bad
    assert setup.acc.updates == 0
    setup.acc.discard()
    setup.window()
    assert setup.acc.updates == 1


@pytest.mark.parametrize("when", ["the next came", "the loop ended", "discarded", "flushed"])
def test_a_micro_batch_whose_time_is_over_is_refused(when: str) -> None:
    setup = Setup()
    loop = setup.acc.microbatches(BATCHES)
    setup.add(next(loop))
    micro = next(loop)
    if when == "the next came":
        # the loop raises, because this micro-batch had no backward
        with pytest.warns(ga.OpenWindowWarning), pytest.raises(errors.LoopError):
            next(loop)
    elif when == "the loop ended":
        with pytest.warns(ga.OpenWindowWarning):
            loop.close()
    elif when == "discarded":
        setup.acc.discard()
    else:
        setup.acc.flush()
    before = setup.photograph()
    late = [lambda: setup.add(micro)]
    if when in ("discarded", "flushed"):
        micro.skip()  # it is left out already
    else:
        late.append(micro.skip)
    for action in late:
        refused(
            action,
            errors.LoopError,
            "loop-over",
            "its loop has gone on or ended, or its window was flushed or discarded.",
        )
        assert setup.photograph() == before
    setup.acc.discard()
    loop.close()


def test_a_loss_that_reaches_no_parameter_of_the_optimizer_is_refused() -> None:
    setup, other = Setup(), torch.nn.Linear(2, 1)
    before = setup.photograph()
    error = refused(
        lambda: setup.acc.step(torch.ones(4, 2), lambda _, x: (other(x).sum(), len(x))),
        errors.InputError,
        "loss-without-graph",
        "No gradient arrived at any parameter that the optimizer owns",
    )
    assert "given to Accumulator" in error.do
    assert setup.photograph() == before


@pytest.mark.parametrize("loss_fn", [None, 3, "loss"])
def test_a_loss_fn_that_cannot_be_called_is_refused(loss_fn: Any) -> None:
    setup = Setup()
    refused(
        lambda: setup.acc.step(torch.ones(4, 2), loss_fn),
        errors.InputError,
        "loss-fn-result",
        "`loss_fn` cannot be called.",
    )


def test_isolate_without_drop_is_refused() -> None:
    refused(
        lambda: Setup(isolate="sample"),
        errors.InputError,
        "choice",
        "`isolate` says what is dropped, and nothing is.",
    )
