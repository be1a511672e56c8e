"""`acc.step(memory=...)`: the same update, and no more memory than was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from gradaccum.engine.memory.resident import owned
from gradaccum.planner.live import storages
from gradaccum.planner.meter import meter_for
from memory_models import Case, cases, loss_fn, padded

CASES = cases()


def training(name: str) -> tuple[Case, torch.optim.Optimizer, Tensor, list[int] | None]:
    torch.manual_seed(0)
    case = CASES[name]()
    optimizer = torch.optim.AdamW(case.model.parameters())
    if not case.ragged:
        # so many that activations are more than what the optimizer's step takes
        return case, optimizer, case.batch(2048 if name == "mlp" else 64, 0), None
    lengths = torch.randint(4, 100, (64,)).tolist()
    return case, optimizer, padded(lengths), lengths


def per_sample(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """A loss that no padding changes."""
    if batch.ndim != 2 or batch.is_floating_point():
        return loss_fn(model, batch)
    mask = (batch != 0).unsqueeze(-1)
    return (model(batch) * mask).square().sum(), int(mask.sum())


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("name", CASES)
def test_the_peak_stays_within_the_memory_that_was_given(name: str, share: float) -> None:
    case, optimizer, batch, lengths = training(name)
    whole = ga.fit(case.model, per_sample, batch, optimizer=optimizer, lengths=lengths)
    width = 1 if lengths is None else max(lengths)
    least = max(whole.memory.bytes(2, width), whole.memory.floor)
    limit = int(least + share * (whole.memory.bytes(len(batch), width) - least))
    acc = ga.Accumulator(case.model, optimizer, batchnorm="microbatch")
    for _ in range(2):  # the second has the optimizer's state
        stays = sum(storages(owned(case.model, [optimizer]), "cpu").values())
        with meter_for("cpu").peak(marks=False) as peak:
            update = acc.step(batch, per_sample, lengths=lengths, memory=limit)
        assert update.microbatches > 1
        assert stays + peak.bytes <= 1.05 * limit


def test_the_update_is_that_of_the_whole_batch() -> None:
    def train(**options: Any) -> tuple[list[Tensor], ga.Update]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        batch = torch.randn(64, 64, dtype=torch.float64)
        update = ga.Accumulator(model, optimizer).step(batch, loss_fn, **options)
        return [p.detach() for p in model.parameters()], update

    truth, one = train()
    found, several = train(memory="480KB")
    assert (one.microbatches, one.count) == (1, 64)
    assert several.microbatches > 1
    for a, b in zip(truth, found, strict=True):
        # the sums of 64 samples in another order
        torch.testing.assert_close(a, b, rtol=64 * torch.finfo(torch.float64).eps, atol=1e-14)


def test_what_was_measured_serves_the_next_batches_too() -> None:
    case, optimizer, batch, _ = training("mlp")
    calls: list[int] = []

    def counted(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        calls.append(len(batch))
        return loss_fn(model, batch)

    acc = ga.Accumulator(case.model, optimizer)
    acc.step(batch, counted, memory="auto")
    assert calls[-1] == len(batch)
    calls.clear()
    acc.step(batch, counted, memory="auto")
    assert calls == [len(batch)]


@pytest.mark.parametrize(
    ("memory", "slug"),
    [("12 parsecs", "memory-size"), (0, "memory-size"), ("1KB", "memory-floor")],
)
def test_a_memory_that_cannot_be_meant_is_refused(memory: Any, slug: str) -> None:
    case, optimizer, batch, _ = training("mlp")
    before = [p.detach().clone() for p in case.model.parameters()]
    acc = ga.Accumulator(case.model, optimizer)
    with pytest.raises(ga.GradaccumError) as caught:
        acc.step(batch, loss_fn, memory=memory)
    assert caught.value.slug == slug
    assert all(map(torch.equal, before, case.model.parameters()))
    assert all(p.grad is None for p in case.model.parameters())
    assert acc.step(batch, loss_fn).index == 0
