"""What is never called equal, what is no cause, and what is refused before anything is compared."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import CLASSES, WIDTH, labelled, mlp, sequences, summed

import gradaccum as ga
from gradaccum import errors
from refusals import refused


def kinds(report: ga.Report) -> list[str]:
    return [cause.kind for cause in report.causes]


# --- not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, None])
def test_one_sample_that_is_not_finite(value: float, dtype: torch.dtype | None) -> None:
    x, y = labelled()
    x[5, 0] = value
    report = ga.check(mlp(), summed, (x, y), dtype=dtype)
    assert not report
    assert report.verdict.startswith("not finite: the whole batch's loss is ")
    assert kinds(report) == ["not-finite"]
    evidence = "\n".join(report.causes[0].evidence)
    assert "in the batch already: samples 5\n" in evidence + "\n"
    assert "samples 5 alone have it too" in evidence
    assert "in the model already" not in evidence
    with pytest.raises(errors.UnequalError, match="not finite"):
        report.assert_equal()
    assert ga.Report.from_json(report.to_json()).causes == report.causes


def test_statistics_that_this_forward_moved_are_not_the_cause() -> None:
    x, y = labelled()
    x[0] = float("nan")
    report = ga.check(mlp(nn.BatchNorm1d(8)), summed, (x, y))
    assert kinds(report) == ["not-finite"]
    assert not any("in the model already" in line for line in report.causes[0].evidence)


def test_a_finite_loss_with_a_gradient_that_is_not() -> None:
    model = mlp()

    def loss(model: nn.Module, batch: Any) -> Any:
        total, count = summed(model, batch)
        return total + (model[0].bias * 0).sqrt().sum(), count

    report = ga.check(model, loss, labelled())
    assert report.verdict.startswith("not finite")
    assert kinds(report) == ["not-finite"]
    assert report.causes[0].where == ("0.bias",)
    assert report.causes[0].title.startswith("The gradient")


def test_a_parameter_that_is_not_finite_is_named() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].bias[0] = float("nan")
    report = ga.check(model, summed, labelled())
    assert kinds(report) == ["not-finite"]
    assert report.causes[0].where == ("2.bias",)


def test_what_overflows_in_the_models_own_dtype_only() -> None:
    model = nn.Linear(WIDTH, 1, bias=False).half()
    x = torch.full((8, WIDTH), 200.0, dtype=torch.float16)

    def loss(model: nn.Module, x: Tensor) -> Any:
        return (model(x) * 0 + x[:, :1].square()).sum(), len(x)

    report = ga.check(model, loss, x)
    assert report.verdict.startswith("not finite: the whole batch's loss is inf in float16")
    assert ga.check(model.float(), loss, x.float()).equal


# --- no false cause ------------------------------------------------------------------------------


def test_a_gradient_of_the_input_is_none_of_the_parameters() -> None:
    x, y = labelled()
    x.requires_grad_()
    model = mlp()
    summed(model, (x, y))[0].backward()
    model.zero_grad()
    assert x.grad is not None
    before = x.grad.clone()
    assert ga.check(model, summed, (x, y)).equal
    assert torch.equal(x.grad, before)
    samples = [(a.detach().requires_grad_(), b) for a, b in zip(x, y, strict=True)]
    for a, _ in samples:
        a.grad = torch.ones_like(a)
    assert ga.check(model, summed, samples, collate=torch.utils.data.default_collate).equal


def test_a_random_factor_does_not_hide_or_feign_a_mean_of_means() -> None:
    def by_python(model: nn.Module, batch: Any) -> Any:
        total, count = summed(model, batch)
        return total * random.random(), count

    def several(model: nn.Module, batch: Any) -> Any:
        """Draws as many numbers as there are samples, so that no two forwards agree."""
        total, count = summed(model, batch)
        return total * [random.random() for _ in range(count)][-1], count

    for loss in (by_python, several):
        assert kinds(ga.check(mlp(), loss, labelled())) == ["random"]

    def means(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        each = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
        return each * random.random() * len(batch["x"]), len(batch["x"])

    assert kinds(ga.check(mlp(), means, sequences())) == ["random", "shares"]


@pytest.mark.parametrize("function", [torch.sqrt, torch.log, torch.square])
@pytest.mark.parametrize("mean", [False, True])
def test_a_function_of_the_batchs_sum_couples_samples(function: Any, mean: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        squares = model(batch[0]).square()
        return function(squares.mean() if mean else squares.sum()), len(batch[0])

    report = ga.check(mlp(), loss, labelled())
    assert kinds(report) == ["coupled"], str(report)
    assert "no module's output for the sample moves" in report.causes[0].evidence[-1]


def test_a_loss_that_is_not_finite_for_what_is_held_still_does_not_fail() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        y = model(batch[0])
        return (y.square() / torch.randn_like(y).abs()).sum(), len(y)

    assert kinds(ga.check(mlp(), loss, labelled())) == ["random"]


# --- refused -------------------------------------------------------------------------------------


def test_a_batch_in_which_nothing_is_counted() -> None:
    for loss in (
        lambda m, b: (summed(m, b)[0], 0),
        lambda m, b: {"a": (summed(m, b)[0], 0), "b": (summed(m, b)[0], torch.tensor(0))},
    ):
        refused(
            lambda loss=loss: ga.check(mlp(), loss, labelled()),
            errors.InputError,
            "window-without-count",
            "no loss term",
        )


def test_a_term_without_count_beside_one_that_has_some_is_none_to_refuse() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return {"a": summed(model, batch), "b": (0 * summed(model, batch)[0], 0)}

    assert ga.check(mlp(), loss, labelled()).equal


@pytest.mark.parametrize("model", [nn.Linear(WIDTH, CLASSES), nn.Identity()])
def test_a_loss_of_another_models_parameters(model: nn.Module) -> None:
    other = mlp()
    refused(
        lambda: ga.check(model, lambda m, b: summed(other, b), labelled()),
        errors.InputError,
        "loss-without-graph",
        "none of the model's parameters",
    )


def test_the_inside_of_a_reentrant_checkpoint_is_reached() -> None:
    model = mlp()

    def loss(model: nn.Module, batch: Any) -> Any:
        x = batch[0].clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
        return F.cross_entropy(y, batch[1], reduction="sum"), len(x)

    assert ga.check(model, loss, labelled()).equal


@pytest.mark.parametrize(
    ("change", "slug", "problem"),
    [
        ({"loss_fn": 5}, "loss-fn", "`loss_fn` is not a function"),
        ({"dtype": "float64"}, "check-dtype", "cannot be computed in that"),
        ({"dtype": torch.int64}, "check-dtype", "cannot be computed in that"),
        ({"dtype": torch.complex64}, "check-dtype", "cannot be computed in that"),
        ({"model": nn.LazyLinear(CLASSES)}, "model-lazy", "that has not run"),
        ({"model": nn.Linear(WIDTH, CLASSES, device="meta")}, "on-meta", "The model has"),
        ({"batch": torch.randn(4, 2, device="meta")}, "on-meta", "The batch has"),
        ({"batch": [torch.randn(2, device="meta")] * 4}, "on-meta", "The batch has"),
    ],
)
def test_bad_input_gets_a_message(change: dict[str, Any], slug: str, problem: str) -> None:
    given: dict[str, Any] = {"model": mlp(), "loss_fn": summed, "batch": labelled()} | change
    model, loss, batch = (given.pop(name) for name in ("model", "loss_fn", "batch"))
    refused(lambda: ga.check(model, loss, batch, **given), errors.InputError, slug, problem)
