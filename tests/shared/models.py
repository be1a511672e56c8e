"""Models of every kind whose arithmetic is exact.

Weights and data are small integers and every activation is exact (ReLU, products).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

SAMPLES, WIDTH, UPDATES = 8, 4, 3

Pair = tuple[Tensor, int]


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return SGD(model.parameters(), **{"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25, **options})


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def whole_numbers(model: nn.Module) -> nn.Module:
    """In float64 (complex stays complex), with small integers for weights."""
    model = model.double() if not any(p.is_complex() for p in model.parameters()) else model
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.copy_(integers(*parameter.shape, seed=seed))
    return model


def mlp() -> nn.Module:
    return whole_numbers(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 2)))


def squared(model: nn.Module, x: Tensor) -> Pair:
    error = model(x) - x[:, :1]
    error = torch.view_as_real(error) if error.is_complex() else error  # abs() would take a root
    return error.square().sum(), len(x)


def tokens(x: Tensor) -> Tensor:
    """Rows as indices into a vocabulary of 8."""
    return (x.long() + 5) % 8


# --- kinds of models --------------------------------------------------------------------------


class Tied(nn.Module):
    """The embedding is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(tokens(x)).sum(1))


class TiedSparsely(nn.Module):
    """A sparse embedding whose weight has a dense gradient too, but not in every micro-batch."""

    def __init__(self, dense_at: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, sparse=True)
        self.dense_at = dense_at

    def forward(self, x: Tensor) -> Tensor:
        out = self.embed(tokens(x)).sum(1)
        marked = x[:, 0] == self.dense_at
        if marked.any():
            out = out + marked[:, None] * self.embed.weight.sum(0)
        return out


class LoRA(nn.Module):
    """A frozen base of which one tensor is int8, as quantised models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 4).requires_grad_(False)
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Sometimes(nn.Module):
    """A second head that only the marked rows use, and a third that none does."""

    def __init__(self, mark: float) -> None:
        super().__init__()
        self.trunk, self.usual = nn.Linear(WIDTH, 4), nn.Linear(4, 2)
        self.rare, self.never = nn.Linear(4, 2), nn.Linear(4, 2)
        self.mark = mark

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        marked = x[:, 0] == self.mark
        out = self.usual(hidden)
        if not marked.any():
            return out
        return out + marked[:, None] * self.rare(hidden)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, 2, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.empty(2, dtype=torch.complex128))
        with torch.no_grad():
            self.weight.copy_(torch.complex(integers(WIDTH, 2, seed=1), integers(WIDTH, 2, seed=2)))
            self.bias.copy_(torch.complex(integers(2, seed=3), integers(2, seed=4)))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight + self.bias


class Checkpointed(nn.Module):
    """One block run twice, each time checkpointed: its gradient arrives in two pieces."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return hidden


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized() -> nn.Module:
    linear = whole_numbers(nn.Linear(WIDTH, WIDTH))
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


def hooked() -> nn.Module:
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 2)
    return model


def frozen() -> nn.Module:
    model = mlp()
    model.get_submodule("0").requires_grad_(False)
    return model


def convolution() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 1, 1), nn.Flatten())
    return whole_numbers(layers).to(memory_format=torch.channels_last)


class Scalar(nn.Module):
    """A temperature of shape `()` beside the usual."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.temperature


class Shared(nn.Module):
    """Two parameters that meet through views: autograd gives both the same memory for a gradient.

    See https://github.com/pytorch/pytorch/issues/34082: a second backward then adds twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.one.view(1, -1) + self.other.view(1, -1))


class Overlapping(nn.Module):
    """As `Shared`, but what two of them share is a part of the third's."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.ones(WIDTH))
        self.left, self.right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.all.view(2, 2)
        rows = whole + torch.cat([self.left.view(1, 2), self.right.view(1, 2)])
        return x + rows.view(1, WIDTH)


def embedding(**options: Any) -> Callable[[], nn.Module]:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(tokens(x)).sum(1)

    return lambda: whole_numbers(Bag())
