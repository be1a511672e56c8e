"""Sums that are wider than their parameters: any model, in any loop, equals plain torch to the bit.

The models are those of `test_models.py` in float32, with sums in float64: small integers leave
nothing to round, so plain torch in float32 knows the update of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from cases import CASES, Case, owned, whole_batches
from models import UPDATES
from ways import WAYS


def narrow(model: nn.Module) -> nn.Module:
    """The model with half the bits."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_complex():
                parameter.data = parameter.data.to(torch.complex64)
    return model.float()


def narrow_case(case: Case) -> Case:
    return Case(
        lambda: narrow(case.model()),
        lambda model, x: case.loss(model, x.float()),
        case.optimizers,
        case.clips,
        case.exact_loss,
    )


def clip_in_float64(parameters: list[Tensor], limit: float) -> None:
    """What `clip_grad_norm_` does, without its roundings to float32."""
    grads = [p.grad for p in parameters if p.grad is not None]
    grads = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    for grad in grads:
        grad.copy_(grad.double() * min(1.0, limit / (norm + 1e-6)))


def plain_torch(case: Case, snap: Callable[[Any], None], clip: float | None) -> Any:
    model = case.model()
    optimizers = case.optimizers(model)
    for batch in whole_batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, count = case.loss(model, batch)
        (total / count).backward()
        if clip is not None:
            clip_in_float64(owned(optimizers), clip)
        for optimizer in optimizers:
            optimizer.step()
        snap(owned(optimizers))
    return model, optimizers


@pytest.mark.parametrize("way_name", WAYS)
@pytest.mark.parametrize("case_name", CASES)
def test_every_model_in_every_loop_equals_its_whole_batch(
    case_name: str,
    way_name: str,
    differences: Callable[..., list[str]],
    snap: Callable[[Any], None],
) -> None:
    case = narrow_case(CASES[case_name])
    run, options = WAYS[way_name]
    if "clip_norm" in options and not case.clips:
        options = {**options, "clip_norm": math.inf}  # torch itself cannot clip sparse gradients
    clip = options.get("clip_norm")
    reference = plain_torch(case, snap, None if clip in (None, math.inf) else clip)
    model = case.model()
    optimizers = case.optimizers(model)
    acc = ga.Accumulator(
        model,
        optimizers,
        on_update=lambda update: snap(owned(optimizers)),
        accumulate_dtype=torch.float64,
        **options,
    )
    updates = list(run(acc, model, case))

    assert differences((model, optimizers), reference) == []
    assert [update.index for update in updates] == list(range(UPDATES))
    assert all(parameter.grad is None for parameter in owned(optimizers))
