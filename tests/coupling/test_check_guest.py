"""`check` is a guest: whatever it runs, and whatever is raised, all is as it was afterwards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Counter, Known, Noise, Running, labelled, mlp, summed

import gradaccum as ga


def photograph(model: nn.Module) -> dict[str, Any]:
    """Everything that belongs to a model, identities and contents, and every random state."""
    found: dict[str, Any] = {"random": (torch.get_rng_state().tolist(), random.getstate())}
    found["default dtype"] = torch.get_default_dtype()
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    for name, module in model.named_modules():
        found[f"{name}: mode"] = module.training
        for key, value in vars(module).items():
            where = f"{name}.{key}"
            if isinstance(value, dict):
                found[where] = [(k, id(v)) for k, v in value.items()]
            elif isinstance(value, list | set):
                found[where] = list(map(repr, value))
            elif not isinstance(value, Tensor):
                found[where] = repr(value)
            else:
                found[where] = (id(value), value.tolist())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        grad = tensor.grad
        found[f"{name}: tensor"] = (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.tolist())
        found[f"{name}: gradient"] = None if grad is None else (id(grad), grad.tolist())
        found[f"{name}: hooks"] = len(getattr(tensor, "_post_accumulate_grad_hooks", None) or {})
        found[f"{name}: requires grad"] = tensor.requires_grad
    return found


def full() -> nn.Module:
    """Something of everything that a forward may change."""
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5), Running(), Counter(), Noise())
    counter = model[4]
    assert isinstance(counter, Counter)
    counter(torch.ones(2, 2))
    model[0].bias.requires_grad_(False)
    model[0].register_forward_hook(lambda *_: None)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    model[2].eval()
    return model


def failing_at(call: int) -> Callable[..., Any]:
    calls = itertools.count(1)  # nothing that `check` would put back

    def loss(model: nn.Module, batch: Any) -> Any:
        result = summed(model, batch)
        random.random()
        if next(calls) == call:
            raise KeyboardInterrupt
        return result

    return loss


@pytest.mark.parametrize("causes", [True, False])
def test_a_model_of_everything_is_left_as_it_was(causes: bool) -> None:
    model = full() if causes else mlp(Counter())
    before = photograph(model)
    report = ga.check(model, summed, labelled())
    assert report.equal is not causes
    assert photograph(model) == before


@pytest.mark.parametrize("call", [1, 2, 3, 5, 8, 13, 21])
def test_it_is_left_so_whenever_something_interrupts(call: int) -> None:
    model = full()
    before = photograph(model)
    with pytest.raises(KeyboardInterrupt):
        ga.check(model, failing_at(call), labelled())
    assert photograph(model) == before


def test_that_photograph_sees_a_change() -> None:
    model = full()
    before = photograph(model)
    summed(model, labelled())
    changed = {key for key, value in photograph(model).items() if value != before[key]}
    assert {"1.num_batches_tracked: tensor", "3.scale: tensor", "4.calls", "4.seen"} <= changed
    assert {"4.last", "random"} <= changed


def test_what_the_loss_function_holds_is_left_as_it_was() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    scale = nn.Parameter(torch.tensor(2.0))
    bare = torch.tensor(1.5, requires_grad=True)
    criterion = nn.CrossEntropyLoss(weight=weights, reduction="sum")
    seen: list[int] = []
    bare.grad = torch.tensor(7.0)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        seen.append(1)
        return criterion(model(batch[0]) * scale * bare, batch[1]), len(batch[0])

    report = ga.check(mlp(), loss, labelled())
    # the gradient that stood there is another loss's leftover, and in this window's way
    assert [cause.kind for cause in report.causes] == ["stale"]
    assert seen == []
    assert (scale.grad, float(bare.grad)) == (None, 7.0)
    assert (scale.dtype, bare.dtype, criterion.weight.dtype) == (torch.float32,) * 3
    assert criterion.weight is weights


def test_parameters_beside_the_model_are_compared_too() -> None:
    temperature = torch.tensor(1.5, requires_grad=True)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        penalty = 3 * temperature  # added once for each micro-batch
        return summed(model, batch)[0] + penalty, len(batch[0])

    report = ga.check(mlp(), loss, labelled())
    assert [cause.kind for cause in report.causes] == ["constant"]
    assert temperature.grad is None


def test_a_buffer_of_two_modules_stays_one() -> None:
    class Moving(nn.Module):
        def __init__(self, scale: Tensor) -> None:
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.add_(1.0)
            return x

    class Using(Moving):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.clone()

    scale = torch.ones(())
    model = mlp(Moving(scale), Using(scale))
    report = ga.check(model, summed, labelled())
    assert [cause.kind for cause in report.causes] == ["side-effect"]
    assert float(scale) == 1.0
    assert model[1].scale is model[2].scale is scale


def test_a_closure_over_the_model_is_the_model() -> None:
    model = mlp(nn.BatchNorm1d(8))

    def loss(_: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    before = photograph(model)
    report = ga.check(model, loss, labelled())
    assert [cause.kind for cause in report.causes] == ["batchnorm"]
    assert photograph(model) == before


def test_an_error_of_the_users_own_comes_through_as_it_is() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ga.check(mlp(), loss, labelled())


def test_known_cases_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Known(mlp, summed, labelled).loss = None  # type: ignore[misc]
