"""Wide sums under graphs that are compiled, kept, or meet in one parameter several times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga

MICROS = 16


class Tied(nn.Module):
    """One weight twice, and another one that is used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.both = nn.Parameter(torch.eye(4) + 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) @ self.both + x @ self.both.t()


class Halves(nn.Module):
    """A complex parameter of two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.view_as_complex(torch.randn(4, 3, 2).half()))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ torch.view_as_real(self.weight).float().flatten(1)


class Rows(nn.Module):
    """An embedding whose gradient lists rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x * 4).long() % 9).sum(1)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum()


@pytest.mark.parametrize("restore", [None, True])
@pytest.mark.parametrize("accumulate", [torch.float32, "compensated"], ids=str)
@pytest.mark.parametrize("kind", ["tied", "kept", "compiled", "complex", "sparse"])
def test_sums_are_those_of_the_same_micro_gradients(
    kind: str, accumulate: Any, restore: bool | None
) -> None:
    kinds: dict[str, type[nn.Module]] = {"complex": Halves, "sparse": Rows}
    model = kinds.get(kind, Tied)()
    if kind != "complex":
        model.bfloat16()
    if kind == "compiled":
        model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    acc = ga.Accumulator(
        model, optimizer, every=MICROS + 1, accumulate_dtype=accumulate, restore=restore
    )
    parameters = list(model.parameters())
    exact = [torch.zeros_like(p, dtype=torch.complex128) for p in parameters]
    sizes = [torch.zeros_like(p, dtype=torch.float64) for p in exact]
    micros = [torch.randn(2, 4).bfloat16() for _ in range(MICROS)]
    loop = acc.microbatches([*micros, torch.empty(0)])
    for x in micros:
        for i, grad in enumerate(torch.autograd.grad(loss_of(model, x), parameters)):
            if grad.is_sparse:  # a row is listed once for each use: their sum is not rounded
                rows, values = grad._indices()[0], grad._values().to(torch.complex128)
                exact[i].index_add_(0, rows, values)
                sizes[i].index_add_(0, rows, values.abs())
                continue
            exact[i] += grad.to(torch.complex128)
            sizes[i] += grad.to(torch.complex128).abs()
        loss = loss_of(model, x)
        next(loop).backward(loss, 1, retain_graph=kind == "kept")
        if kind == "kept":  # and the graph is there still
            torch.autograd.grad(loss, parameters)
    state = acc.state_dict()
    over = state["window"]["terms"][""]["provisional"]
    unit = 2**-16 if accumulate == "compensated" else 2**-24
    for grad, total, size in zip(state["gradients"], exact, sizes, strict=True):
        found = (grad.to_dense() if grad.is_sparse else grad).to(torch.complex128) * float(over)
        # additions for each micro-batch, 8 rows at most, each off by a unit of what is there so far
        most = MICROS * (8 if kind == "sparse" else 1)
        assert ((found - total).abs() <= most * unit * size).all()
    acc.discard()
    loop.close()
