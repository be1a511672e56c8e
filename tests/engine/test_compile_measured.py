"""`torch.compile` where operators are looked at, and where sums are wider than parameters."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradaccum as ga

inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(17, 6, generator=generator).to(dtype)
    return x, torch.randint(0, 3, (17,), generator=generator)


def loss_fn(model: nn.Module, both: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = both
    return F.cross_entropy(model(x).float(), y, reduction="sum"), len(y)


def stepped(model: nn.Module, loss: Callable[..., Any], data: Any, **how: Any) -> Tensor:
    """What a step of SGD with a rate of 1 took off the parameters."""
    before = [p.detach().clone() for p in model.parameters()]
    memory = how.pop("memory", None)
    acc = ga.Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), every=4, **how)
    acc.step(data, loss, memory=memory)
    pairs = zip(before, model.parameters(), strict=True)
    return torch.cat([(b.double() - p.detach().double()).flatten() for b, p in pairs])


def whole(x: Tensor, y: Tensor) -> Tensor:
    """The same of the whole batch at once, in float64."""
    model = build().double()
    F.cross_entropy(model(x.double()), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory", "a bad sample"])
@pytest.mark.parametrize("what", ["model", "loss"])
def test_a_full_graph_is_not_taken_for_broken_while_it_is_measured(name: str, what: str) -> None:
    """Operators are looked at one by one then, which dynamo would call a broken graph."""
    calls = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        return lambda *args: calls.append(1) or graph(*args)

    model: Any = build()
    loss: Any = loss_fn
    if what == "model":
        model = torch.compile(model, fullgraph=True, backend=backend)
    else:
        loss = torch.compile(loss_fn, fullgraph=True, backend=backend)
    x, y = batch()
    good = torch.arange(17) != 7
    if name == "memory":
        assert ga.fit(model, loss, (x, y), memory="1MiB").fits
        assert 2 <= len(calls) <= 4  # timed as it will be trained: two sizes, quick ones twice
        calls.clear()
        found, true = stepped(model, loss, (x, y), memory="1MiB"), whole(x, y)
        micro_batches = 1
    else:
        bad = torch.where(good[:, None], x, torch.nan)
        how = {"on_nonfinite": "drop", "isolate": "sample"}
        found, true = stepped(model, loss, (bad, y), **how), whole(x[good], y[good])
        micro_batches = 5  # and one that was dropped, and came again without its sample
    assert len(calls) == micro_batches  # measured as it was written, and trained as compiled
    # sums of 17 float32 terms, and the rounding of the parameter that was stepped
    torch.testing.assert_close(found, true, rtol=0, atol=4e-7)


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("width", [torch.float32, "compensated", torch.float64])
@pytest.mark.parametrize("way", [{}, {"restore": True}, {"on_nonfinite": "drop"}])
def test_wide_sums_of_a_model_compiled_by_inductor(width: Any, way: dict[str, Any]) -> None:
    """Each gradient is the compiled graph's own: the wide sum is that of what it brought."""
    brought: list[list[Tensor]] = []

    def noted(model: nn.Module) -> nn.Module:
        brought[:] = [[] for _ in model.parameters()]
        for store, parameter in zip(brought, model.parameters(), strict=True):
            parameter.register_hook(lambda grad, store=store: store.append(grad.double().clone()))
        return model

    model: Any = torch.compile(noted(build(torch.bfloat16)))
    data = batch(torch.bfloat16)
    found = stepped(model, loss_fn, data, accumulate_dtype=width, **way)
    true = [torch.stack(store).sum(0) for store in brought]
    assert all(len(store) == 4 for store in brought)
    # windows of 17 samples in 4: what was brought was over a provisional count
    scale = float(torch.cat([t.flatten() for t in true]) @ found) / float(found @ found)
    before = [p.detach() for p in build(torch.bfloat16).parameters()]
    for parameter, start, gradient in zip(model.parameters(), before, true, strict=True):
        # rounded once to bfloat16, and subtracted from a bfloat16: half a last place of each
        exact = start.double() - gradient / scale
        off = (parameter.detach().double() - exact).abs()
        bound = 2.0**-8 * (gradient.abs() / scale + exact.abs()) + 1e-12
        assert bool((off <= 1.02 * bound).all()), float((off / bound).max())
