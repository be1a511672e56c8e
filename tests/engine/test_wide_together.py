"""Small gradients are added to their wide sums together: the same bits, by fewer operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradaccum as ga
from gradaccum.engine import wide
from gradaccum.engine.grads import outside

WIDE = [torch.float32, torch.float64, "compensated"]


class Net(nn.Module):
    """Layers smaller and larger than what is added together, one of them laid out in columns."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.large = nn.Linear(8, 9_001)  # 72,008 elements: in no whole number of pieces
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.to(dtype)
        with torch.no_grad():
            self.columns = nn.Parameter(torch.randn(7, 8).to(dtype).t())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.large(x @ self.columns @ self.columns.t()) * self.scale
        return x.float().square().mean(1).sum() + self.empty.float().sum()


def trained(dtype: torch.dtype, width: Any, **options: Any) -> list[Tensor]:
    net = Net(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    acc = ga.Accumulator(net, optimizer, every=5, accumulate_dtype=width, **options)
    generator = torch.Generator().manual_seed(1)
    for micro in acc.microbatches([torch.randn(3, 8, generator=generator) for _ in range(10)]):
        micro.backward(net(micro.batch.to(dtype)), 3)
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDE)
@pytest.mark.parametrize("room", [1 << 16, 1_000, 64])
def test_the_bits_do_not_depend_on_what_is_added_together(
    dtype: torch.dtype, width: Any, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = trained(dtype, width)
    with monkeypatch.context() as patch:
        patch.setattr(outside, "_SMALL", 1)
        patch.setattr(wide, "CHUNK", room)
        alone = trained(dtype, width)
    apart = trained(dtype, width, restore=True)
    assert all(bool(torch.isfinite(p).all()) for p in together)
    assert all(map(torch.equal, together, alone))
    assert all(map(torch.equal, together, apart))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # What a view is of is no operator that touches elements.
        self.count += not func._schema.name.startswith(  # type: ignore[attr-defined]
            ("aten::view", "aten::as_strided", "aten::slice", "aten::split", "aten::detach")
        )
        return func(*args, **(kwargs or {}))


def operators(layers: int, width: Any) -> int:
    """Those of the third micro-batch's backward."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    acc = ga.Accumulator(net, optimizer, every=4, accumulate_dtype=width)
    found = 0
    for micro in acc.microbatches([torch.ones(1, 8).bfloat16()] * 4):
        loss = net(micro.batch).float().sum()
        with Operators() as seen:
            micro.backward(loss, 1)
        found = seen.count if micro.index == 2 else found
    return found


@pytest.mark.parametrize("width", [torch.float32, "compensated"])
def test_an_addition_for_each_small_parameter_costs_no_operators(width: Any) -> None:
    """Autograd's own addition to `.grad` is one for each; all ours are as many for 4 as for 64."""
    few, many = (operators(n, width) - operators(n, None) for n in (2, 32))
    assert many + 2 * (32 - 2) <= few


def test_a_gradient_that_comes_in_pieces_is_added_once() -> None:
    """A re-entrant checkpoint runs a backward inside the backward, and both reach one weight."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 4).bfloat16()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        inner = checkpoint(model, x.requires_grad_(), use_reentrant=True)
        return model(inner).float().square().sum()

    true = [torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)]
    data = [torch.randn(3, 4).bfloat16() for _ in range(4)]
    for x in data:
        plain = build()
        loss(plain, x.clone()).backward()
        for total, parameter in zip(true, plain.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad.double()
    model = build()
    acc = ga.Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        every=5,
        accumulate_dtype=torch.float32,
    )
    loop = acc.microbatches([*data, data[0]])
    for micro, _ in zip(loop, range(4), strict=False):
        micro.backward(loss(model, micro.batch.clone()) * 16, 16)
    sums = acc.state_dict()["gradients"]
    with pytest.warns(ga.OpenWindowWarning):
        loop.close()
    for found, wanted in zip(sums, true, strict=True):
        one, other = found.double().flatten(), wanted.flatten()
        scale = (other @ one) / (one @ one)  # the provisional denominator
        # three additions in float32
        torch.testing.assert_close(one * scale, other, rtol=0, atol=1e-6 * float(other.abs().max()))
