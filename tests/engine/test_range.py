"""fp16 under a scaler: running gradients have the size of a mean, not of a sum of 65,536 terms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga

TOKENS, UPDATES = 65_536, 6
SIZES: dict[str, list[int]] = {
    "equal": [2048] * 32,
    "ragged": [16 * (1 + 17 * i % 31) for i in range(32)],
    "first is tiny": [16, *[2113] * 31],
    "first is huge": [33_000, *[1050] * 30, 1036],
}


def batches_of(case: str) -> list[Tensor]:
    sizes = SIZES[case]
    short = TOKENS - sum(sizes)
    sizes = [*sizes[:-1], sizes[-1] + short]
    assert sum(sizes) == TOKENS
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(TOKENS, 16, generator=generator).split(sizes))


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return (model(x) - 10 * x).float().square().sum()


def skips_by_hand(batches: list[Tensor], divisor: float) -> int:
    """A loop that divides each loss by `divisor`."""
    model, optimizer, scaler = build()
    skipped = 0
    for _ in range(UPDATES):
        for x in batches:
            scaler.scale(loss_sum(model, x) / divisor).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += scaler.get_scale() < before
    return skipped


def skips_of_ours(batches: list[Tensor], count: Callable[[Tensor], int | Tensor]) -> int:
    model, optimizer, scaler = build()
    acc = ga.Accumulator(model, optimizer, every=len(batches), scaler=scaler)
    skipped = 0
    for _ in range(UPDATES):
        for micro in acc.microbatches(batches):
            micro.backward(loss_sum(model, micro.batch), count(micro.batch))
            skipped += bool(micro.update and micro.update.skipped)
    return skipped


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZES)
def test_no_more_updates_are_skipped_than_with_the_true_count(case: str) -> None:
    batches = batches_of(case)
    assert skips_of_ours(batches, len) <= skips_by_hand(batches, TOKENS)


@pytest.mark.slow
def test_the_scenario_overflows_without_a_denominator() -> None:
    batches = batches_of("equal")
    assert skips_by_hand(batches, 1) > skips_by_hand(batches, TOKENS)
