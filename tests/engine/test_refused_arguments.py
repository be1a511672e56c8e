"""Losses and counts that cannot be right are refused, and nothing had changed before."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradaccum as ga
from gradaccum import errors
from refusals import (
    BATCHES,
    NO_COUNT,
    NO_GRAPH,
    NO_TENSOR,
    NOT_A_DENOMINATOR,
    POSITIONS,
    Setup,
    refused,
)

Call = Callable[[ga.Microbatch[Tensor], Tensor], None]


def call(loss: Callable[[Tensor], Any] = lambda x: x, *args: Any, **kwargs: Any) -> Call:
    return lambda micro, x: micro.backward(loss(x), *args, **kwargs)


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x + 1


def with_count(count: Any) -> Call:
    return call(lambda x: x, count)


PAIR = "a term is a pair of a loss and its count under a name."
SEVERAL = "several terms carry each their own count."

BAD_CALLS: dict[str, tuple[Call, str, str]] = {
    "mean without count": (call(reduction="mean"), "loss-without-count", NO_COUNT),
    "sum without count": (call(), "loss-without-count", NO_COUNT),
    "count None": (with_count(None), "loss-without-count", NO_COUNT),
    "negative": (with_count(-1), "count", NOT_A_DENOMINATOR),
    "negative float": (with_count(-0.5), "count", NOT_A_DENOMINATOR),
    "NaN": (with_count(math.nan), "count", NOT_A_DENOMINATOR),
    "infinite": (with_count(math.inf), "count", NOT_A_DENOMINATOR),
    "larger than a float": (with_count(10**400), "count", NOT_A_DENOMINATOR),
    "bool": (with_count(True), "count", NOT_A_DENOMINATOR),
    "string": (with_count("8"), "count", NOT_A_DENOMINATOR),
    "complex": (with_count(1j), "count", NOT_A_DENOMINATOR),
    "list": (with_count([4]), "count", NOT_A_DENOMINATOR),
    "tensor of shape (1,)": (with_count(torch.ones(1)), "count", NOT_A_DENOMINATOR),
    "mask": (with_count(torch.ones(2, 3)), "count", NOT_A_DENOMINATOR),
    "bool tensor": (with_count(torch.tensor(True)), "count", NOT_A_DENOMINATOR),
    "complex tensor": (with_count(torch.tensor(1j)), "count", NOT_A_DENOMINATOR),
    "tensor NaN": (with_count(torch.tensor(math.nan)), "count", NOT_A_DENOMINATOR),
    "tensor below 0": (with_count(torch.tensor(-3)), "count", NOT_A_DENOMINATOR),
    "tensor that needs grad": (
        with_count(torch.tensor(2.0, requires_grad=True)),
        "count",
        NOT_A_DENOMINATOR,
    ),
    "array": (with_count(np.array([4])), "count", NOT_A_DENOMINATOR),
    "numpy bool": (with_count(np.True_), "count", NOT_A_DENOMINATOR),
    "numpy NaN": (with_count(np.float32("nan")), "count", NOT_A_DENOMINATOR),
    "no loss": (call(lambda x: None, 2), "loss-without-graph", NO_TENSOR),
    "float": (call(lambda x: x.item(), 2), "loss-without-graph", NO_TENSOR),
    "array loss": (call(lambda x: x.detach().numpy(), 2), "loss-without-graph", NO_TENSOR),
    "list of losses": (call(lambda x: [x, x], 2), "loss-without-graph", NO_TENSOR),
    "detached": (call(lambda x: x.detach(), 2), "loss-without-graph", NO_GRAPH),
    "under no_grad": (call(under_no_grad, 2), "loss-without-graph", NO_GRAPH),
    "integer": (call(lambda x: (x > 0).sum(), 2), "loss-without-graph", NO_GRAPH),
    "shape (1,)": (
        call(lambda x: x[None], 2),
        "loss-not-scalar",
        "the loss has shape (1,), but it must be a scalar.",
    ),
    "shape (2, 3)": (
        call(lambda x: x.expand(2, 3), 6),
        "loss-not-scalar",
        "the loss has shape (2, 3), but it must be a scalar.",
    ),
    "complex loss": (
        call(lambda x: torch.complex(x, x), 2),
        "loss-not-scalar",
        "the loss is complex, so it has no smallest value.",
    ),
    "reduction avg": (
        call(lambda x: x, 2, reduction="avg"),
        "reduction",
        "`reduction` must be 'sum' or 'mean'.",
    ),
    "reduction None": (
        call(lambda x: x, 2, reduction=None),
        "reduction",
        "`reduction` must be 'sum' or 'mean'.",
    ),
    "no terms": (call(lambda x: {}), "loss-terms", SEVERAL),
    "terms and a count": (call(lambda x: {"a": (x, 2)}, 2), "loss-terms", SEVERAL),
    "term without count": (call(lambda x: {"a": x}), "loss-terms", PAIR),
    "term of one": (call(lambda x: {"a": (x,)}), "loss-terms", PAIR),
    "term of three": (call(lambda x: {"a": (x, 2, "sum")}), "loss-terms", PAIR),
    "term with a number for a name": (call(lambda x: {1: (x, 2)}), "loss-terms", PAIR),
    "term with a bad count": (
        call(lambda x: {"a": (x, 2), "b": (x, -2)}),
        "count",
        NOT_A_DENOMINATOR,
    ),
    "term with count None": (
        call(lambda x: {"a": (x, 2), "b": (x, None)}),
        "count",
        NOT_A_DENOMINATOR,
    ),
    "detached term": (
        call(lambda x: {"a": (x, 2), "b": (x.detach(), 2)}),
        "loss-without-graph",
        NO_GRAPH,
    ),
    "term that is a float": (
        call(lambda x: {"a": (x, 2), "b": (x.item(), 2)}),
        "loss-without-graph",
        NO_GRAPH,
    ),
    "term of shape (1,)": (
        call(lambda x: {"a": (x[None], 2)}),
        "loss-not-scalar",
        "term 'a': the loss has shape (1,), but it must be a scalar.",
    ),
}


@POSITIONS
@pytest.mark.parametrize("on_stale", ["raise", "zero"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_argument_is_refused_and_the_right_one_is_taken_after_it(
    name: str, on_stale: Any, bad: int, truth: dict[str, Any]
) -> None:
    wrong, slug, problem = BAD_CALLS[name]
    setup = Setup(on_stale=on_stale)
    for i, micro in enumerate(setup.acc.microbatches(BATCHES)):
        if i == bad:
            before = setup.photograph()
            loss = setup.loss(micro.batch)
            error = refused(partial(wrong, micro, loss), errors.InputError, slug, problem)
            assert isinstance(error, ValueError)
            assert f"micro-batch {i + 1} of 3" in error.problem
            assert setup.photograph() == before
        setup.add(micro)
    assert setup.photograph() == truth


@pytest.mark.parametrize(
    "two",
    [
        2,
        2.0,
        np.int64(2),
        np.int32(2),
        np.float32(2),
        np.float64(2),
        Fraction(2),
        torch.tensor(2),
        torch.tensor(2, dtype=torch.int32),
        torch.tensor(2, dtype=torch.uint8),
        torch.tensor(2.0, dtype=torch.float16),
        torch.tensor([1, 1, 0], dtype=torch.int16).sum(dtype=torch.int16),
    ],
    ids=repr,
)
def test_every_kind_of_number_is_taken_for_a_count(two: Any, truth: dict[str, Any]) -> None:
    setup = Setup()
    for micro in setup.acc.microbatches(BATCHES):
        count = two if len(micro.batch) == 2 else 1
        micro.backward(setup.loss(micro.batch), count)
    assert micro.update is not None
    assert micro.update.count == 4
    assert type(micro.update.count) in (int, float)
    assert setup.photograph() == truth


@pytest.mark.parametrize("how", ["last", "flush", "only", "terms", "skip"])
@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_a_window_without_a_count_is_refused_and_kept(
    how: str, on_stale: Any, truth: dict[str, Any]
) -> None:
    setup = Setup(on_stale=on_stale, every=1 if how == "only" else 2)
    problem = "The window holds no loss term, so its mean is undefined."
    nothing = torch.zeros(1, 2)

    def give(micro: ga.Microbatch[Tensor]) -> None:
        loss = setup.loss(micro.batch) * 0
        if how == "terms":
            micro.backward({"a": (loss, 0), "b": (loss, torch.tensor(0))})
        else:
            micro.backward(loss, 0)

    batches = [nothing] if how == "only" else [nothing, nothing, nothing]
    loop = setup.acc.microbatches(batches)
    micro = next(loop)
    if how != "only":
        give(micro)
    if how in ("last", "terms", "skip"):
        micro = next(loop)
    before = setup.photograph()
    action: Callable[[], object] = lambda: give(micro)  # noqa: E731 - one of three actions
    if how == "flush":
        action = setup.acc.flush
    if how == "skip":
        action = micro.skip
    refused(action, errors.InputError, "window-without-count", problem)
    assert setup.photograph() == before

    setup.acc.discard()
    loop.close()
    assert all(p.grad is None for p in setup.model.parameters())
    after = Setup()
    after.model, after.optimizer, after.acc = setup.model, setup.optimizer, setup.acc
    for micro in setup.acc.microbatches([torch.cat(BATCHES)]):
        after.add(micro)
    assert after.photograph()["0.weight"] == truth["0.weight"]


def test_after_a_window_without_count_was_refused_its_last_micro_batch_may_bring_one(
    truth: dict[str, Any],
) -> None:
    setup = Setup(every=1)
    (batch,) = [torch.cat(BATCHES)]
    for micro in setup.acc.microbatches([batch]):
        with pytest.raises(errors.InputError):
            micro.backward({"mistyped": (setup.loss(batch), 0)})
        micro.backward({"ce": (setup.loss(batch), 4)})
    assert micro.update is not None
    assert micro.update.count == {"ce": 4}
    assert set(micro.update.terms) == {"ce"}
    assert setup.photograph()["0.weight"] == truth["0.weight"]


def test_a_refusal_with_on_stale_zero_lets_no_other_loss_into_the_held_gradients() -> None:
    setup = Setup(on_stale="zero", every=2)
    clean = Setup(on_stale="zero", every=2)
    for one in (setup, clean):
        for i, micro in enumerate(one.acc.microbatches([BATCHES[0][:1], BATCHES[0][1:]])):
            if i == 0:
                micro.backward(one.loss(micro.batch) * 0, 0)
                continue
            if one is setup:
                with pytest.raises(errors.InputError):
                    micro.backward(one.loss(micro.batch), 0)
                one.loss(torch.full((1, 2), 9.0)).backward()  # another loss passes through
            micro.backward(one.loss(micro.batch), 2)
    assert setup.photograph() == clean.photograph()


# --- counts known ahead -----------------------------------------------------------------------


@pytest.mark.parametrize("declared", [1, 3, 1000])
def test_counts_known_ahead_that_do_not_add_up_are_refused_before_the_update(declared: int) -> None:
    setup = Setup()
    loop = setup.acc.microbatches(BATCHES, counts=lambda batch: declared)
    for _ in range(2):
        setup.add(next(loop))
    micro = next(loop)
    before = setup.photograph()
    error = refused(
        lambda: setup.add(micro),
        errors.InputError,
        "declared-count",
        "The counts that came with the losses do not add up to the count known ahead.",
    )
    assert setup.photograph() == before
    assert f"{3 * declared} declared" in error.got
    setup.acc.discard()
    loop.close()


@pytest.mark.parametrize("count", [-1, math.nan, None, "4", [1], torch.ones(2)], ids=repr)
def test_a_bad_count_known_ahead_is_refused_before_the_first_micro_batch(count: Any) -> None:
    setup = Setup()
    before = setup.photograph()
    refused(
        lambda: next(setup.acc.microbatches(BATCHES, counts=lambda batch: count)),
        errors.InputError,
        "count",
        NOT_A_DENOMINATOR,
    )
    assert setup.photograph() == before
    setup.window()


def test_a_term_that_was_declared_and_never_came_is_refused() -> None:
    setup = Setup(every=1)
    loop = setup.acc.microbatches([BATCHES[0]], counts=lambda batch: {"a": 2, "b": 2})
    micro = next(loop)
    loss = setup.loss(micro.batch)
    before = setup.photograph()
    error = refused(
        lambda: micro.backward({"a": (loss, 2)}),
        errors.InputError,
        "declared-count",
        "The counts that came with the losses do not add up to the count known ahead.",
    )
    assert "of 'b'" in error.got
    assert setup.photograph() == before
