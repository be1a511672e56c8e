"""How far a split batch is from the whole one under each policy for BatchNorm.

A residual CNN is trained a little on blobs of three kinds; then the gradient of a batch of 64, and
the running estimates after it, are compared between the whole batch and micro-batches of several
sizes, in float64. Distances are relative, the mean over five batches. Frozen is compared with the
whole batch under frozen statistics, since it is another objective.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import gradaccum as ga
from common import Table, arguments

BATCH, CLASSES, SIDE, BATCHES = 64, 3, 8, 5


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a way around them."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(wide, wide, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def network() -> nn.Module:
    torch.manual_seed(0)
    stem = [nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*stem, nn.ReLU(), *(Block(8) for _ in range(2)), *head).double()


def blobs(seed: int) -> tuple[Tensor, Tensor]:
    """Images with a bright spot whose width is the class, in colours and light of their own."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, CLASSES, (BATCH,), generator=g)
    at = torch.rand(BATCH, 2, 1, 1, generator=g) * SIDE
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    far = (x - at[:, 0]) ** 2 + (y - at[:, 1]) ** 2
    spot = torch.exp(-far / (1.0 + label[:, None, None]) ** 2)
    colour = torch.rand(BATCH, 3, 1, 1, generator=g)
    light = torch.randn(BATCH, 1, 1, 1, generator=g)
    noise = 0.3 * torch.randn(BATCH, 3, SIDE, SIDE, generator=g)
    return (spot[:, None] * colour + light + noise).double(), label


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def trained() -> nn.Module:
    model = network()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=0.05, momentum=0.9))
    for seed in range(60):
        acc.step(blobs(1000 + seed), loss_fn)
    return model


def after(start: nn.Module, batch: Any, size: int, choice: Any) -> tuple[Tensor, list[Tensor]]:
    """The gradient of one update, and the running estimates after it."""
    model = copy.deepcopy(start)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1.0), batchnorm=choice)
    acc.step(batch, loss_fn, budget=size)
    moved = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    return moved, [torch.cat([m.running_mean, m.running_var]) for m in norms]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def measure() -> Table:
    table = Table("Distance from the whole batch of 64, relative; mean of five batches")
    start = trained()
    for choice in ("pooled", "frozen", "microbatch"):
        like = "frozen" if choice == "frozen" else "microbatch"
        wholes = [after(start, blobs(seed), BATCH, like) for seed in range(BATCHES)]
        for size in (32, 16, 8, 4, 2):
            found: list[list[float]] = []
            for seed, whole in enumerate(wholes):
                split = after(start, blobs(seed), size, choice)
                layers = [distance(a, b) for a, b in zip(split[1], whole[1], strict=True)]
                found.append([distance(split[0], whole[0]), layers[0], max(layers)])
            gradient, first, worst = (sum(column) / BATCHES for column in zip(*found, strict=True))
            table.add(
                policy=choice,
                microbatch=size,
                gradient=shown(gradient),
                first_layers_estimates=shown(first),
                farthest_layers_estimates=shown(worst),
            )
    return table


def shown(value: float) -> str:
    return "0" if value == 0 or math.isnan(value) else f"{value:.1e}"


if __name__ == "__main__":
    options = arguments(__doc__)
    measure().show(options.out, "batchnorm")
