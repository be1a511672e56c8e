"""What an accumulation layer costs per micro-batch, on a model so small that little else does.

An MLP 16-16-1 on batches of 4, in windows of 8, SGD: the hand-written loop, Accelerate, Lightning
Fabric and gradaccum, each with its own copy of the model, interleaved in short rounds in one
process, so that whatever else the machine does falls on all alike.

    python benchmarks/overhead.py [--out DIR]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch import nn

import gradaccum as ga
from common import Table, arguments, interleaved

EVERY, WINDOWS, ROUNDS = 8, 25, 120


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same small model and optimizer for everyone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def hand_written(batches: list[torch.Tensor]) -> Callable[[], None]:
    """The loop of the tutorials, done right for equal micro-batches."""
    model, optimizer = build()

    def run() -> None:
        for i, x in enumerate(batches):
            loss = model(x).square().mean() / EVERY
            loss.backward()
            if (i + 1) % EVERY == 0:
                optimizer.step()
                optimizer.zero_grad()

    return run


def ours(batches: list[torch.Tensor]) -> Callable[[], None]:
    """The same through `acc.microbatches`."""
    model, optimizer = build()
    acc = ga.Accumulator(model, optimizer, every=EVERY)

    def run() -> None:
        for micro in acc.microbatches(batches):
            micro.backward(model(micro.batch).square().sum(), micro.batch.shape[0])

    return run


def accelerate(batches: list[torch.Tensor]) -> Callable[[], None]:
    """The same through `accelerator.accumulate`."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=EVERY)
    model, optimizer = accelerator.prepare(*build())

    def run() -> None:
        for x in batches:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return run


def fabric(batches: list[torch.Tensor]) -> Callable[[], None]:
    """The same through `fabric.no_backward_sync`."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*build())

    def run() -> None:
        for i, x in enumerate(batches):
            accumulating = (i + 1) % EVERY != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = model(x).square().mean() / EVERY
                fabric.backward(loss)
            if not accumulating:
                optimizer.step()
                optimizer.zero_grad()

    return run


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__)
    torch.set_num_threads(1)  # nothing here is large enough to share
    batches = list(torch.randn(EVERY * WINDOWS, 4, 16))
    loops = {
        "hand-written": hand_written(batches),
        "gradaccum": ours(batches),
        "Fabric": fabric(batches),
        "Accelerate": accelerate(batches),
    }
    seconds = interleaved(loops, rounds=options.rounds or ROUNDS, clock=time.perf_counter)
    each = {name: [1e6 * s / len(batches) for s in times] for name, times in seconds.items()}
    table = Table("Microseconds per micro-batch, MLP 16-16-1, batches of 4, windows of 8")
    table.add_timings(each, base="hand-written", unit="us")
    table.show(options.out, "overhead")


if __name__ == "__main__":
    main()
