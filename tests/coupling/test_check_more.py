"""Causes that need more than a model and a loss; batches of every kind; help with mistakes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import CLASSES, OWN, STEPS, WIDTH, Running, generator, labelled, mlp, sequences, summed

import gradaccum as ga
from gradaccum import errors
from refusals import refused


def kinds(report: ga.Report) -> list[str]:
    return [cause.kind for cause in report.causes]


# --- causes ------------------------------------------------------------------------------------


def test_a_gradient_that_stands_there() -> None:
    model = mlp()
    summed(model, labelled())[0].backward()
    report = ga.check(model, summed, labelled())
    assert kinds(report) == ["stale"]
    assert report.causes[0].where == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert report.causes[0].fault == "GA104"
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    assert ga.check(model, summed, labelled()).equal  # zeros are what `zero_grad` may leave


def test_a_loss_that_runs_a_backward_of_its_own() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        summed(model, batch)[0].backward()
        return summed(model, batch)

    report = ga.check(mlp(), loss, labelled())
    assert kinds(report) == ["stale"]
    assert "runs a backward of its own" in report.causes[0].title


calls = itertools.count(1)


def test_state_that_is_kept_in_a_global() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        total, count = summed(model, batch)
        return total * (1 + 1 / next(calls)), count

    report = ga.check(mlp(), loss, labelled())
    assert kinds(report)[0] == "nondeterministic"
    assert "something outside of the model" in report.causes[0].evidence[-1]


def test_state_that_the_loss_function_closes_over() -> None:
    average = 1.0

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal average
        total, count = summed(model, batch)
        average = 0.9 * average + 0.1 * float(total.detach())
        return total / average, count

    report = ga.check(mlp(), loss, labelled())
    assert "side-effect" in kinds(report)
    assert "loss_fn.average" in report.causes[kinds(report).index("side-effect")].where
    assert average == 1.0


def test_of_several_states_the_one_that_matters_is_named() -> None:
    model = mlp(OWN["a counter"].model()[1], Running())
    report = ga.check(model, summed, labelled())
    assert kinds(report) == ["side-effect"]
    assert report.causes[0].where == ("2.scale",)
    assert any("`1.calls`" in note for note in report.notes)


def test_a_layer_that_needs_several_samples() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        if len(batch[0]) < 4:
            raise ValueError("at least four samples")
        return summed(model, batch)

    report = ga.check(mlp(), loss, labelled())
    assert kinds(report) == ["error"]
    assert any("at least four samples" in line for line in report.causes[0].evidence)


def test_a_mean_over_nothing_in_a_micro_batch() -> None:
    x, y = labelled()
    y[:6] = -100
    report = ga.check(
        mlp(), lambda m, b: (F.cross_entropy(m(b[0]), b[1]), len(b[0])), (x, y), reduction="mean"
    )
    assert "error" in kinds(report)
    assert any("not finite in micro-batch 1 of 2" in line for line in report.causes[-1].evidence)
    assert "coupled" not in kinds(report)


def test_a_mean_over_nothing_that_counts_nothing_is_left_out() -> None:
    x, y = labelled()
    y[:6] = -100
    report = ga.check(
        mlp(),
        lambda m, b: (F.cross_entropy(m(b[0]), b[1]), (b[1] != -100).sum()),
        (x, y),
        reduction="mean",
    )
    assert report.equal, str(report)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_held_still_in_backward_too(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return self.head(checkpoint(self.block, x, use_reentrant=reentrant))

    assert kinds(ga.check(Checkpointed(), summed, labelled())) == ["batchnorm", "dropout"]


def test_random_numbers_of_numpy_and_python() -> None:
    np = pytest.importorskip("numpy")

    def by_numpy(model: nn.Module, batch: Any) -> Any:
        return summed(model, (batch[0] * float(np.random.rand()), batch[1]))

    def by_python(model: nn.Module, batch: Any) -> Any:
        return summed(model, (batch[0] * random.random(), batch[1]))

    for loss in (by_numpy, by_python):
        before = random.getstate(), np.random.get_state()[1].tolist()
        assert kinds(ga.check(mlp(), loss, labelled())) == ["random"]
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before


# --- help with what was handed over -------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduction", "says"),
    [("mean", "it behaves as a mean over the samples"), ("sum", "as a sum over the samples")],
)
def test_a_loss_without_a_count_is_told_what_it_is(reduction: str, says: str) -> None:
    report = ga.check(
        mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction=reduction), labelled()
    )
    assert not report.equal
    assert "without the count" in report.causes[0].title
    assert says in report.causes[0].evidence[0]
    assert report.causes[0].mend == "return (loss_sum, count)"


def test_a_token_mean_without_a_count_is_a_mean_over_something_else() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    report = ga.check(mlp(), loss, sequences())
    assert "over something else than the samples" in report.causes[0].evidence[0]


def test_terms_are_judged_one_by_one() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        mean = F.cross_entropy(model(batch[0]), batch[1])
        return {"right": summed(model, batch), "wrong": (mean, len(batch[0]))}

    report = ga.check(mlp(), loss, labelled())
    assert kinds(report) == ["factor"]
    assert report.causes[0].where == ("wrong",)


# --- batches -----------------------------------------------------------------------------------


def test_samples_in_a_list_with_a_collate() -> None:
    x, y = labelled()
    samples = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    report = ga.check(
        mlp(),
        lambda m, b: (F.cross_entropy(m(b["x"]), b["y"], reduction="sum"), len(b["x"])),
        samples,
        collate=torch.utils.data.default_collate,
    )
    assert report.equal
    assert report.samples == len(samples)


@pytest.mark.parametrize("padded", [False, True])
def test_padding_is_cut_as_the_accumulator_cuts_it(padded: bool) -> None:
    """A loss that counts its padding is another one in a narrower micro-batch."""
    lengths = torch.tensor([5, 1, 2, 1, 3, 2, 1, 4])
    x = torch.randn(8, STEPS, WIDTH, generator=generator())
    own = torch.arange(STEPS) < lengths[:, None]
    batch = {"x": x * own[..., None], "own": own}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        each = model(batch["x"]).square().sum(2)
        each = each if padded else each * batch["own"]
        return each.sum(), batch["own"].sum()

    report = ga.check(mlp(), loss, batch, lengths=lengths)
    assert report.equal is not padded


def test_float64_from_the_start() -> None:
    batch = labelled()[0].double(), labelled()[1]
    report = ga.check(mlp(nn.BatchNorm1d(8)).double(), summed, batch)
    assert kinds(report) == ["batchnorm"]


class Float32Only(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, "a kernel for float32"
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Float32Only.apply(x)


@pytest.mark.parametrize("name", [None, "batchnorm", "dropout", "factor", "shares", "constant"])
def test_what_cannot_be_float64_is_judged_in_its_own_type(name: str | None) -> None:
    middle = {"batchnorm": [nn.BatchNorm1d(8)], "dropout": [nn.Dropout(0.5)]}.get(name or "", [])
    known = {
        "factor": OWN["cross entropy, a mean said to be a sum"],
        "shares": OWN["class weights, samples counted"],
        "constant": OWN["a penalty on the weights"],
    }.get(name or "", OWN["cross entropy, summed"])
    report = ga.check(mlp(Kernel(), *middle), known.loss, labelled(), **known.options)
    assert report.dtype == "float32"
    assert kinds(report) == ([name] if name else []), str(report)
    assert any("not in float64: AssertionError" in note for note in report.notes)


def test_bfloat16_parameters_are_judged_in_float64() -> None:
    x, y = labelled()
    report = ga.check(mlp().bfloat16(), summed, (x.bfloat16(), y))
    assert report.equal
    assert report.dtype == "float64"


def test_autocast_within_the_loss_is_judged_in_float64_too() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return summed(model, batch)

    assert ga.check(mlp(), loss, labelled()).equal


def test_complex_parameters() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x.to(self.weight.dtype) @ self.weight).flatten(1)

    report = ga.check(Complex(), lambda m, b: (m(b[0]).square().sum(), len(b[0])), labelled())
    assert report.equal
    assert report.bound < 1e-12


def test_sparse_gradients_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(x).sum(1)

    ids = torch.randint(0, 8, (12, 5))
    assert ga.check(Tied(), lambda m, x: (m(x).square().sum(), len(x)), ids).equal


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_compiled_is_run_eagerly(whole: bool) -> None:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5))
    compiled = torch.compile(model, backend="aot_eager")

    def loss(model: nn.Module, batch: Any) -> Any:
        return summed(model if whole else compiled, batch)

    report = ga.check(compiled if whole else model, loss, labelled())
    assert kinds(report) == ["batchnorm", "dropout"]
    assert report.causes[0].where == ("1",)


# --- what it costs, and what is refused ---------------------------------------------------------


def test_where_all_is_well_it_costs_few_passes_over_the_batch() -> None:
    """Its own type, float64, twice more for determinism, and three splits."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            ROWS.append(len(x))
            return self.layer(x)

    ROWS.clear()
    report = ga.check(Model(), lambda m, x: (m(x).square().sum(), len(x)), labelled()[0])
    assert report.equal
    assert sum(ROWS) <= 7 * len(labelled()[0])


ROWS: list[int] = []


def test_one_sample_is_refused() -> None:
    x, y = labelled()
    refused(
        lambda: ga.check(mlp(), summed, (x[:1], y[:1])),
        errors.BatchError,
        "check-samples",
        "A batch of one sample cannot be split",
    )


@pytest.mark.parametrize("size", [2, 3])
def test_two_and_three_samples_are_enough(size: int) -> None:
    x, y = labelled()
    batch = x[:size], y[:size]
    assert ga.check(mlp(), summed, batch).equal
    assert kinds(ga.check(mlp(), OWN["contrastive"].loss, batch)) == ["coupled"]


@pytest.mark.parametrize("name", ["class weights, samples counted", "contrastive"])
def test_a_model_of_few_parameters_is_not_enough_to_tell(name: str) -> None:
    model = nn.Linear(1, CLASSES)
    x, y = labelled()
    report = ga.check(model, OWN[name].loss, (x[:, :1], y), **OWN[name].options)
    assert kinds(report) == ["unexplained"]
    assert "too few elements to tell" in report.causes[0].evidence[0]


def test_what_is_no_model_no_reduction_and_no_loss_is_refused() -> None:
    refused(
        lambda: ga.check(summed, summed, labelled()),  # type: ignore[arg-type]
        errors.InputError,
        "model",
        "The model is not a module.",
    )
    refused(
        lambda: ga.check(mlp(), summed, labelled(), reduction="none"),  # type: ignore[arg-type]
        errors.InputError,
        "reduction",
        "must be 'sum' or 'mean'",
    )
    refused(
        lambda: ga.check(mlp(), lambda m, b: (m(b[0]), 1), labelled()),
        errors.InputError,
        "loss-not-scalar",
        "it must be a scalar",
    )


def test_the_assertion_has_the_report_for_its_message() -> None:
    with pytest.raises(AssertionError) as caught:
        ga.assert_splittable(mlp(nn.BatchNorm1d(8)), summed, labelled())
    assert isinstance(caught.value, errors.UnequalError)
    text = str(caught.value)
    assert "not equal: BatchNorm" in text
    assert "1" in text
    assert "Do this" in text
    assert ga.assert_splittable(mlp(), summed, labelled()).equal


@pytest.mark.parametrize("samples", [24, 48])
def test_a_coupling_too_weak_for_one_sample_to_show_is_seen_in_groups(samples: int) -> None:
    """As of the penalty on the load of experts, in a model that runs in float32 only."""
    model = nn.Linear(6, 5)
    x, y = torch.randn(samples, 6), torch.randint(5, (samples,))

    def loss_fn(weight: float) -> Any:
        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
            logits = model(batch[0])
            load = logits.softmax(1).mean(0)
            penalty = weight * (load * load.roll(1)).sum()
            return F.cross_entropy(logits, batch[1]) + penalty, len(logits)

        return loss

    report = ga.check(model, loss_fn(0.01), (x, y), reduction="mean", dtype=None)
    assert [cause.kind for cause in report.causes] == ["coupled"]
    assert any("micro-batches of neighbours" in line for line in report.causes[0].evidence)
    assert ga.check(model, loss_fn(0.0), (x, y), reduction="mean", dtype=None).equal
