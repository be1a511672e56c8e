"""A model that tells which weight each sample had in the updates a loop made.

It is one row of weights and sample `i` is the `i`-th unit vector, so that with SGD at a learning
rate of 1 the `i`-th weight moves by exactly the weight that sample `i` had. A mean over a window of
`n` samples is `1/n` for each of them and 0 for all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradaccum as ga

EPS = torch.finfo(torch.float64).eps
SAMPLES = 8


class Probe(nn.Module):
    """A weight for each sample, none of them moved yet."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layer = nn.Linear(SAMPLES, 1, bias=False, dtype=dtype)
        nn.init.zeros_(self.layer.weight)
        self.sgd = SGD(self.parameters(), lr=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype))

    def weights(self) -> list[float]:
        return (0.0 - self.layer.weight[0]).tolist()


def rows(*samples: int) -> Tensor:
    return torch.eye(SAMPLES, dtype=torch.float64)[list(samples)]


def singles(first: int = 0, last: int = SAMPLES) -> list[Tensor]:
    return [rows(i) for i in range(first, last)]


def add(micro: ga.Microbatch[Tensor], probe: Probe) -> None:
    micro.backward(probe(micro.batch).sum(), len(micro.batch))


def run(acc: ga.Accumulator, probe: Probe, batches: Iterable[Tensor]) -> list[ga.Update]:
    updates = []
    for micro in acc.microbatches(batches):
        add(micro, probe)
        if micro.update:
            updates.append(micro.update)
    return updates


def leave(acc: ga.Accumulator, probe: Probe, batches: Iterable[Tensor], after: int) -> None:
    """Break out of a loop once `after` micro-batches have been added."""
    for i, micro in enumerate(acc.microbatches(batches)):
        add(micro, probe)
        if i + 1 == after:
            break


def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).sum(), len(batch)


def exactly(*weights: float) -> Any:
    """Weights in order, 0 for the samples not named.

    A weight is rounded at most three times: the seed, the last factor and their product, by half
    an eps each.
    """
    padded = [*weights, *[0.0] * (SAMPLES - len(weights))]
    return pytest.approx(padded, rel=2 * EPS, abs=0)


class Exploding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise MemoryError("out of it")
