"""bf16, fp16 and float32: exact where the integers fit, within a derived bound elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradaccum as ga
from cases import Case, owned, whole
from models import SAMPLES, WIDTH, Pair, sgd, whole_numbers
from ways import WAYS


@pytest.mark.parametrize("way_name", ["even", "largest first", "means", "clipped", "two terms"])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_autocast_to_bf16_equals_the_whole_batch_on_integers_that_fit(
    parameters: torch.dtype,
    way_name: str,
    differences: Callable[..., list[str]],
    snap: Callable[[Any], None],
) -> None:
    def loss(model: nn.Module, x: Tensor) -> Pair:
        # gradients are sums of at most 8 products of size up to 6 * 6; below 256, bf16 is exact
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x.clamp(-2, 2).to(parameters))
        return (out * x[:, :2].clamp(-2, 2).to(out.dtype)).sum(), len(x)

    case = Case(
        lambda: whole_numbers(nn.Linear(WIDTH, 2)).to(parameters),
        loss,
        lambda m: [sgd(m, momentum=0, weight_decay=0)],
    )
    run, options = WAYS[way_name]
    reference, reference_optimizers, losses = whole(case, snap, options.get("clip_norm"))
    model = case.model()
    optimizers = case.optimizers(model)
    acc = ga.Accumulator(
        model, optimizers, on_update=lambda update: snap(owned(optimizers)), **options
    )
    updates = list(run(acc, model, case))
    assert {p.dtype for p in owned(optimizers)} == {parameters}
    assert differences((model, optimizers), (reference, reference_optimizers)) == []
    assert [float(update.loss) for update in updates] == losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_real_gradients_are_off_by_no_more_than_their_additions_round(dtype: torch.dtype) -> None:
    """The gradient is Σx/N whatever the weights, so float64 knows it.

    Each of the SAMPLES products and each of the additions of rows and of micro-batches rounds
    once, the seed and the last factor once each; every rounding is at most eps/2 of a partial sum,
    which is at most Σ|x|/N.
    """
    x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64).to(dtype)
    model = nn.Linear(WIDTH, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1.0), every=3)
    for micro in acc.microbatches(x.split([3, 4, 1])):
        micro.backward(model(micro.batch).sum(), len(micro.batch))

    exact = -x.double().sum(0) / SAMPLES
    roundings = SAMPLES + SAMPLES + 3 + 2
    bound = roundings * torch.finfo(dtype).eps / 2 * x.double().abs().sum(0) / SAMPLES
    assert ((model.weight.detach().double()[0] - exact).abs() <= bound).all()
    mean_of_means = -sum(part.double().mean(0) for part in x.split([3, 4, 1])) / 3
    assert not ((mean_of_means - exact).abs() <= bound).all()
