"""Wide sums under every optimizer of torch: it steps with float64's gradient, rounded once.

Small integers and counts that are powers of two leave nothing to round before that: float64 knows
the whole batch's gradient, and its clip, exactly enough; one rounding makes of it what plain torch
is then given to step with.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradaccum as ga

SAMPLES, WIDTH, CLASSES, UPDATES = 16, 8, 4, 2
SPLITS = {"one": [16], "ragged": [1, 7, 3, 5]}
CLIPS: dict[str, dict[str, float]] = {
    "no clip": {},
    "clip norm": {"clip_norm": 0.05},
    "clip value": {"clip_value": 0.011},
}
LEFT_OUT = {"Optimizer", "LBFGS", "SparseAdam"}
"""The base; what accumulation cannot serve; what takes sparse gradients (`test_wide_models.py`)."""


def kernels() -> dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]]:
    """Every optimizer of this torch, with each of the kernels that it has."""
    found: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {}
    for name, kind in sorted(vars(torch.optim).items()):
        if not inspect.isclass(kind) or not issubclass(kind, Optimizer) or name in LEFT_OUT:
            continue
        known = inspect.signature(kind).parameters
        choices: list[dict[str, Any]] = [{}]
        choices += [{"foreach": value} for value in (False, True) if "foreach" in known]
        choices += [{"fused": True}] if "fused" in known else []
        # float16 has no 1e-8, and nothing over nothing is not a number
        shared = (
            {"eps": 2**-10} if isinstance(getattr(known.get("eps"), "default", 0), float) else {}
        )
        for options in choices:
            label = " ".join([name, *options]) + (" off" if False in options.values() else "")
            given = {"lr": 2**-6, **shared, **options}
            found[label] = lambda p, kind=kind, given=given: kind(p, **given)
    return found


KERNELS = kernels()


class Linear(nn.Module):
    """Two matrices used once each, so that the gradient of either depends on the data alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.one = nn.Linear(WIDTH, CLASSES, bias=False, dtype=dtype)
        self.two = nn.Linear(WIDTH, CLASSES, bias=False, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))


def integers(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (SAMPLES, WIDTH), generator=generator).double()
    t = torch.randint(-1, 2, (SAMPLES, CLASSES), generator=generator).double()
    t[:, 0] = 1  # all samples count, but for the eight that are ignored
    t[[0, 3, 4, 5, 9, 10, 12, 15]] = 0
    return x, t


def mean_of_all(model: Linear, x: Tensor, t: Tensor) -> dict[str, tuple[Tensor, int]]:
    return {"": ((model.one(x) * t).sum() + (model.two(x) * t).sum(), len(x))}


def masked(model: Linear, x: Tensor, t: Tensor) -> dict[str, tuple[Tensor, int]]:
    return {"": (mean_of_all(model, x, t)[""][0], int(t.any(1).sum()))}


def two_terms(model: Linear, x: Tensor, t: Tensor) -> dict[str, tuple[Tensor, int]]:
    one, two = (model.one(x) * t).sum(), (model.two(x) * t).sum()
    return {"a": (one + two, int(t.any(1).sum())), "b": (two * 3, 2 * len(x))}


LOSSES = (mean_of_all, masked, two_terms)


def clipped(grads: list[Tensor], clip: dict[str, float]) -> list[Tensor]:
    if "clip_norm" in clip:
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        return [g * min(1.0, clip["clip_norm"] / (norm + 1e-6)) for g in grads]
    if "clip_value" in clip:
        return [g.clamp(-clip["clip_value"], clip["clip_value"]) for g in grads]
    return grads


def from_float64(kernel: str, dtype: torch.dtype, loss: Any, clip: dict[str, float]) -> Any:
    """Plain torch, stepped with the whole batch's gradient of float64, rounded once."""
    model, twin = Linear(dtype), Linear(torch.float64)
    optimizer = KERNELS[kernel](model.parameters())
    for update in range(UPDATES):
        terms = loss(twin, *integers(update))
        total = sum(value / count for value, count in terms.values())
        grads = clipped(list(torch.autograd.grad(total, list(twin.parameters()))), clip)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    return model, [optimizer]


def accumulated(
    kernel: str, dtype: torch.dtype, loss: Any, split: str, **options: Any
) -> tuple[nn.Module, list[Optimizer]]:
    model = Linear(dtype)
    optimizer = KERNELS[kernel](model.parameters())
    sizes = SPLITS[split]
    acc = ga.Accumulator(model, optimizer, every=len(sizes), **options)
    for update in range(UPDATES):
        x, t = (part.to(dtype).split(sizes) for part in integers(update))
        for micro in acc.microbatches(list(zip(x, t, strict=True))):
            terms = loss(model, *micro.batch)
            micro.backward(*terms[""]) if "" in terms else micro.backward(terms)
    assert acc.updates == UPDATES
    return model, [optimizer]


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("accumulate", [torch.float32, "compensated"], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_optimizer_steps_with_the_true_gradient_rounded_once(
    kernel: str,
    dtype: torch.dtype,
    accumulate: Any,
    scaled: bool,
    differences: Callable[..., list[str]],
) -> None:
    for loss, clip in product(LOSSES, CLIPS):
        truth = from_float64(kernel, dtype, loss, CLIPS[clip])
        for split in SPLITS:
            if clip == "clip norm" and split == "one" and not scaled:
                continue  # a window of one micro-batch is clipped as plain torch does it: below
            ours = accumulated(
                kernel,
                dtype,
                loss,
                split,
                scaler=torch.amp.GradScaler("cpu", init_scale=2.0**4) if scaled else None,
                accumulate_dtype=accumulate,
                **CLIPS[clip],
            )
            assert differences(ours, truth) == [], (loss.__name__, clip, split)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_window_of_one_micro_batch_is_what_plain_torch_makes_of_it(
    kernel: str, clip: str, differences: Callable[..., list[str]]
) -> None:
    model = Linear(torch.bfloat16)
    optimizer = KERNELS[kernel](model.parameters())
    for update in range(UPDATES):
        x, t = (part.bfloat16() for part in integers(update))
        total, count = masked(model, x, t)[""]
        (total / count).backward()
        if "clip_norm" in CLIPS[clip]:
            nn.utils.clip_grad_norm_(model.parameters(), CLIPS[clip]["clip_norm"])
        if "clip_value" in CLIPS[clip]:
            nn.utils.clip_grad_value_(model.parameters(), CLIPS[clip]["clip_value"])
        optimizer.step()
        optimizer.zero_grad()
    for accumulate in (torch.float32, "compensated"):
        options = {"accumulate_dtype": accumulate, **CLIPS[clip]}
        ours = accumulated(kernel, torch.bfloat16, masked, "one", **options)
        assert differences(ours, (model, [optimizer])) == []


def test_all_of_torchs_optimizers_are_met() -> None:
    met = {re.split(" ", kernel)[0] for kernel in KERNELS}
    assert met >= {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor", "NAdam", "RAdam"}
    assert met >= {"Rprop", "ASGD", "Adamax", "Adadelta"}
    assert ("Muon" in met) == hasattr(torch.optim, "Muon")
    assert {"AdamW fused", "AdamW foreach", "AdamW foreach off"} <= KERNELS.keys()
