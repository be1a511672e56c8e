"""An update costs no pass over the gradients, and no wait, beyond a right hand-written loop."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from counting import Counts, count, model

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}
SIZES = {"equal": [4, 4, 4, 4], "unequal": [3, 7, 2, 9]}


def squares(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().sum()


def hand_written(
    optimizer_name: str, batches: list[Tensor], clip: float | None, scaler: Any
) -> Counts:
    """The right loop that knows the window's total count ahead."""
    net = model()
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    total = sum(map(len, batches))

    def run() -> None:
        for x in batches:
            scaler.scale(squares(net, x) / total).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return count(net.parameters(), run)


def ours(
    optimizer_name: str,
    batches: list[Tensor],
    clip: float | None,
    scaler: Any,
    counted: Callable[[Tensor], Any] = len,
) -> Counts:
    net = model()
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    acc = ga.Accumulator(net, optimizer, every=len(batches), clip_norm=clip, scaler=scaler)

    def run() -> None:
        for micro in acc.microbatches(iter(batches)):
            micro.backward(squares(net, micro.batch), counted(micro.batch))

    return count(net.parameters(), run)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clip"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_no_pass_and_no_wait_more_than_by_hand(
    sizes: str, optimizer: str, clip: float | None, scaled: bool
) -> None:
    batches = list(torch.randn(sum(SIZES[sizes]), 53).split(SIZES[sizes]))
    scalers = [torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0) for _ in range(2)]
    by_hand = hand_written(optimizer, batches, clip, scalers[0])
    found = ours(optimizer, batches, clip, scalers[1])
    assert (found.reads, found.writes) <= (by_hand.reads, by_hand.writes)
    assert found.reads <= by_hand.reads
    assert found.writes <= by_hand.writes
    assert found.waits <= by_hand.waits


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_a_tensor_count_is_never_waited_for(optimizer: str) -> None:
    batches = list(torch.randn(21, 53).split(SIZES["unequal"]))
    found = ours(optimizer, batches, None, None, lambda x: torch.ones(len(x)).sum())
    assert found.waits == 0


def test_reading_an_update_is_what_waits() -> None:
    net = model()
    acc = ga.Accumulator(net, torch.optim.SGD(net.parameters(), lr=1e-3), every=2, clip_norm=1.0)

    def run(read: bool) -> None:
        for micro in acc.microbatches(torch.randn(2, 4, 53)):
            micro.backward(squares(net, micro.batch), 4)
            if micro.update and read:
                float(micro.update.loss)
                float(micro.update.grad_norm)

    assert count(net.parameters(), lambda: run(False)).waits == 0
    assert count(net.parameters(), lambda: run(True)).waits == 2


def test_the_count_sees_a_pass_too_many() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def run(scale: bool) -> None:
        squares(net, torch.randn(4, 53)).backward()
        if scale:
            for parameter in net.parameters():
                parameter.grad.div_(4)
        optimizer.step()
        optimizer.zero_grad()

    plain = count(net.parameters(), lambda: run(False))
    extra = count(net.parameters(), lambda: run(True))
    assert (extra.reads - plain.reads, extra.writes - plain.writes) == (2, 2)


def test_memory_does_not_grow_with_the_microbatches() -> None:
    """Ten thousand micro-batches in one window hold what one hundred hold."""

    def tensors_at(number: int) -> int:
        net = nn.Linear(8, 1)
        acc = ga.Accumulator(net, torch.optim.SGD(net.parameters(), lr=1e-3), every=number + 1)
        loop = acc.microbatches(iter(lambda: torch.ones(2, 8), None))
        for _ in range(number):
            micro = next(loop)
            micro.backward(net(micro.batch).sum(), 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of loops that other tests left open
            gc.collect()
        alive = sum(1 for item in gc.get_objects() if type(item) is Tensor)
        acc.discard()
        loop.close()
        return alive

    assert tensors_at(10_000) <= tensors_at(100)
