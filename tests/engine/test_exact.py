"""The update of a window equals the update of the undivided batch, parameters and state alike.

Integer-valued tensors and power-of-two counts leave no rounding to hide behind, so there the
comparison is to the bit; on real numbers the bound is derived from how often the gradients' sums
are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga

SAMPLES, WIDTH, CLASSES, IGNORED = 16, 8, 4, -100
UPDATES = 3
EPS = torch.finfo(torch.float64).eps

SPLITS: dict[str, list[int]] = {
    "one": [16],
    "even": [4, 4, 4, 4],
    "ragged": [1, 7, 3, 5],
    "tail": [6, 6, 4],
    "single samples": [1] * 16,
}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, fused=True),
    "adamw for-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
CLIPS: dict[str, dict[str, float]] = {
    "no clip": {},
    "clip norm": {"clip_norm": 0.05},
    "clip value": {"clip_value": 0.01},
}


class Net(nn.Module):
    """Matrices only, so that Muon takes it whole."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.one = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.two = nn.Linear(WIDTH, CLASSES, bias=False, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    y[[0, 3, 4, 9]] = IGNORED
    return x, y


def squared(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, int]]:
    return {"": (model(x).square().sum(), x.shape[0] * CLASSES)}


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, int]]:
    loss = nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum")
    return {"": (loss, int((y != IGNORED).sum()))}


def two_terms(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, int]]:
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum")
    size = (logits.logsumexp(-1) ** 2).sum()
    return {"ce": (loss, int((y != IGNORED).sum())), "z": (size, len(x))}


LOSSES = {"sum": squared, "mean with ignored": cross_entropy, "two terms": two_terms}


def whole_batch_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    terms: dict[str, tuple[Tensor, int]],
    clip: dict[str, float],
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """What a plain loop does with the undivided batch."""
    loss = sum(loss / count for loss, count in terms.values())
    assert isinstance(loss, Tensor)
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    if "clip_norm" in clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip["clip_norm"])
    if "clip_value" in clip:
        nn.utils.clip_grad_value_(model.parameters(), clip["clip_value"])
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def add_terms(micro: ga.Microbatch[Any], terms: dict[str, tuple[Tensor, int]], mean: bool) -> None:
    """Hand a micro-batch's terms over, as sums or as means."""
    if mean:
        # a mean of nothing is NaN, as `reduction="mean"` makes it
        terms = {n: (s / c if c else s * math.nan, c) for n, (s, c) in terms.items()}
    reduction: Any = "mean" if mean else "sum"
    if "" in terms:
        micro.backward(*terms[""], reduction=reduction)
    else:
        micro.backward(terms, reduction=reduction)


def unsized(batches: list[Any]) -> Iterator[Any]:
    yield from batches


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and the optimizer's state, in one order."""
    tensors = [p.detach() for p in model.parameters()]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors.extend(state[name] for name in sorted(state) if isinstance(state[name], Tensor))
    return tensors


def assert_close(ours: list[Tensor], theirs: list[Tensor], gain: float) -> None:
    """Equal to rounding.

    A gradient is a sum over at most `SAMPLES * CLASSES` terms; splitting changes the order of the
    additions and rounds one factor more, so it is off by at most that many units in the last place
    of the largest partial sum (of order 1 here). `gain` is what an optimizer makes of it.
    """
    assert len(ours) == len(theirs)
    bound = gain * (SAMPLES * CLASSES + 2) * EPS * UPDATES
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def gain_of(optimizer: str) -> float:
    # Adam-like rules divide by the gradient's own size: an error d in a gradient g moves the step
    # by lr·d/|g|, and the smallest |g| met here is above 1e-6.
    return 2 if optimizer.startswith("sgd") else 1e5


@pytest.mark.parametrize("mean", [False, True], ids=["sums", "means"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("split", SPLITS)
def test_streamed_window_equals_the_whole_batch(
    split: str, loss: str, optimizer_name: str, clip: str, mean: bool
) -> None:
    whole, ours = Net(torch.float64), Net(torch.float64)
    reference = OPTIMIZERS[optimizer_name](whole.parameters())
    optimizer = OPTIMIZERS[optimizer_name](ours.parameters())
    sizes = SPLITS[split]
    acc = ga.Accumulator(ours, optimizer, every=len(sizes), **CLIPS[clip])
    for update in range(UPDATES):
        x, y = data(update)
        whole_batch_update(whole, reference, LOSSES[loss](whole, x, y), CLIPS[clip])
        batches: Any = list(zip(x.split(sizes), y.split(sizes), strict=True))
        for micro in acc.microbatches(unsized(batches) if update % 2 else batches):
            add_terms(micro, LOSSES[loss](ours, *micro.batch), mean)
    assert acc.updates == UPDATES
    assert_close(everything(ours, optimizer), everything(whole, reference), gain_of(optimizer_name))


# To the bit: every gradient is a sum of integers over a power of two, for every split and order.


class Linear(nn.Module):
    """Two matrices used once each, so that the loss is linear in both."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.one = nn.Linear(WIDTH, CLASSES, bias=False)
        self.two = nn.Linear(WIDTH, CLASSES, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))


def integers(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-5, 6, (SAMPLES, WIDTH), generator=generator).float()
    t = torch.randint(-5, 6, (SAMPLES, CLASSES), generator=generator).float()
    t[[0, 3, 4, 5, 9, 10, 12, 15]] = 0  # eight samples are ignored, eight count
    return x, t


def integer_sum(model: nn.Module, x: Tensor, t: Tensor) -> dict[str, tuple[Tensor, int]]:
    return {"": ((model.one(x) * t).sum() + (model.two(x) * t).sum(), len(x))}


def integer_masked(model: nn.Module, x: Tensor, t: Tensor) -> dict[str, tuple[Tensor, int]]:
    return {"": (integer_sum(model, x, t)[""][0], int(t.any(1).sum()))}


def integer_terms(model: nn.Module, x: Tensor, t: Tensor) -> dict[str, tuple[Tensor, int]]:
    one, two = (model.one(x) * t).sum(), (model.two(x) * t).sum()
    return {"a": (one + two, int(t.any(1).sum())), "b": (two * 3, 2 * len(x))}


INTEGER_LOSSES = {"sum": integer_sum, "ignored": integer_masked, "two terms": integer_terms}
ALL_OPTIMIZERS = dict(OPTIMIZERS)
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    ALL_OPTIMIZERS["muon"] = lambda p: torch.optim.Muon(p, lr=0.01)


def run_ours(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    split: str,
    loss: Callable[..., dict[str, tuple[Tensor, int]]],
    order: list[int],
    **options: Any,
) -> None:
    sizes = SPLITS[split]
    acc = ga.Accumulator(model, optimizer, every=len(sizes), **options)
    for update in range(UPDATES):
        x, t = integers(update)
        batches: Any = list(zip(x[order].split(sizes), t[order].split(sizes), strict=True))
        for micro in acc.microbatches(unsized(batches) if update % 2 else batches):
            add_terms(micro, loss(model, *micro.batch), mean=False)
    assert acc.updates == UPDATES


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer_name", ALL_OPTIMIZERS)
@pytest.mark.parametrize("loss", INTEGER_LOSSES)
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("split", SPLITS)
def test_streamed_window_equals_the_whole_batch_to_the_bit(
    split: str, shuffled: bool, loss: str, optimizer_name: str, clip: str, scaled: bool
) -> None:
    whole, ours = Linear(), Linear()
    reference = ALL_OPTIMIZERS[optimizer_name](whole.parameters())
    optimizer = ALL_OPTIMIZERS[optimizer_name](ours.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2 * scaled)] or [None]
    for update in range(UPDATES):
        terms = INTEGER_LOSSES[loss](whole, *integers(update))
        whole_batch_update(whole, reference, terms, CLIPS[clip], scalers[0])
    order = [5 * i % SAMPLES for i in range(SAMPLES)] if shuffled else list(range(SAMPLES))
    options = {**CLIPS[clip], "scaler": scalers[-1]}
    run_ours(ours, optimizer, split, INTEGER_LOSSES[loss], order, **options)
    for one, other in zip(everything(ours, optimizer), everything(whole, reference), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"lengths": True}, {"collate": True}, {"counts": True}])
@pytest.mark.parametrize("optimizer_name", ALL_OPTIMIZERS)
@pytest.mark.parametrize("loss", INTEGER_LOSSES)
def test_step_equals_the_whole_batch_to_the_bit(
    loss: str, optimizer_name: str, options: dict[str, bool]
) -> None:
    whole, ours = Linear(), Linear()
    reference = ALL_OPTIMIZERS[optimizer_name](whole.parameters())
    optimizer = ALL_OPTIMIZERS[optimizer_name](ours.parameters())
    acc = ga.Accumulator(ours, optimizer, every=5)
    for update in range(UPDATES):
        x, t = integers(update)
        terms = INTEGER_LOSSES[loss](whole, x, t)
        whole_batch_update(whole, reference, terms, {})
        arguments: dict[str, Any] = {}
        batch: Any = (x, t)
        if "lengths" in options:
            arguments = {"lengths": [i % 5 + 1 for i in range(SAMPLES)], "trim": None}
        if "collate" in options:
            batch = list(zip(x, t, strict=True))
            arguments = {"collate": torch.utils.data.default_collate, "budget": 3}
        if "counts" in options:
            arguments = {"counts": {name: count for name, (_, count) in terms.items()}}
        result = acc.step(batch, lambda m, b: _pair(INTEGER_LOSSES[loss](m, *b)), **arguments)
        expected = sum(loss_sum.item() / count for loss_sum, count in terms.values())
        # float32 rounds each of the additions inside the two sums that are compared
        rounding = torch.finfo(torch.float32).eps * 2 * SAMPLES * CLASSES
        size = sum(5 * 3 * WIDTH * SAMPLES * CLASSES * 4 / count for _, count in terms.values())
        assert abs(result.loss.item() - expected) <= rounding * size
    for one, other in zip(everything(ours, optimizer), everything(whole, reference), strict=True):
        assert torch.equal(one, other)


def _pair(terms: dict[str, tuple[Tensor, int]]) -> Any:
    return terms.get("", terms)


@pytest.mark.parametrize("name", ["mean of means", "tail over N", "last count only", "not divided"])
def test_the_comparison_sees_wrong_loops(name: str) -> None:
    """The loops that people write are caught by the same comparison, on the same data."""
    whole, wrong = Linear(), Linear()
    reference = torch.optim.SGD(whole.parameters(), lr=0.5)
    optimizer = torch.optim.SGD(wrong.parameters(), lr=0.5)
    x, t = integers(0)
    whole_batch_update(whole, reference, integer_masked(whole, x, t), {})
    sizes, n = [6, 6, 4], 4 if name == "tail over N" else 3
    for xs, ts in zip(x.split(sizes), t.split(sizes), strict=True):
        loss, count = integer_masked(wrong, xs, ts)[""]
        last = int(t[12:].any(1).sum())
        factor = {"last count only": 1 / last, "not divided": 1}.get(name, 1 / (count * n))
        (loss * factor).backward()
    optimizer.step()
    pairs = zip(whole.parameters(), wrong.parameters(), strict=True)
    assert not any(torch.equal(one, other) for one, other in pairs)
