"""How often an update reads and writes tensors of the size of gradients, and waits for a device.

Counted at dispatch level over one window of eight micro-batches: the hand-written loop that is
right (it knows the window's total count ahead), Hugging Face Accelerate, Lightning Fabric and
gradaccum, which does not know it. Fewer is better; accumulation itself needs three per parameter
and micro-batch. With unequal counts Accelerate and Fabric make another update than the whole batch.

    python benchmarks/passes.py [--out DIR]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning_fabric import Fabric
from torch import Tensor, nn

import gradaccum as ga
from common import Table, arguments
from counting import count, model

EVERY = 8
Setup = tuple[nn.Module, torch.optim.Optimizer]
Make = Callable[[], Setup]


def square(net: nn.Module, x: Tensor) -> Tensor:
    """A sum-reduced loss; a term for each sample."""
    return net(x).square().sum()


def hand_written(make: Make, clip: float | None, batches: list[Tensor]) -> Callable[[], None]:
    """Divides every loss by the window's total count."""
    net, optimizer = make()
    total = sum(map(len, batches))

    def run() -> None:
        for x in batches:
            (square(net, x) / total).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return run


def ours(make: Make, clip: float | None, batches: list[Tensor]) -> Callable[[], None]:
    """Learns the total count with the last micro-batch."""
    net, optimizer = make()
    acc = ga.Accumulator(net, optimizer, every=EVERY, clip_norm=clip)

    def run() -> None:
        for micro in acc.microbatches(iter(batches)):
            micro.backward(square(net, micro.batch), len(micro.batch))

    return run


def accelerate(make: Make, clip: float | None, batches: list[Tensor]) -> Callable[[], None]:
    """`accelerator.accumulate`, a mean of means."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=EVERY)
    net, optimizer = accelerator.prepare(*make())

    def run() -> None:
        for x in batches:
            with accelerator.accumulate(net):
                accelerator.backward(square(net, x) / len(x))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()

    return run


def fabric(make: Make, clip: float | None, batches: list[Tensor]) -> Callable[[], None]:
    """`fabric.no_backward_sync`, a mean of means."""
    fabric = Fabric(accelerator="cpu", devices=1)
    net, optimizer = fabric.setup(*make())

    def run() -> None:
        for i, x in enumerate(batches):
            with fabric.no_backward_sync(net, enabled=i + 1 < len(batches)):
                fabric.backward(square(net, x) / len(x) / EVERY)
        if clip is not None:
            fabric.clip_gradients(net, optimizer, max_norm=clip)
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    """Count and print."""
    options = arguments(__doc__)
    optimizers = {
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
        "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    }
    sizes = {"equal": [4] * EVERY, "unequal": [3, 7, 2, 9, 5, 4, 8, 6]}
    loops = {
        "hand-written": hand_written,
        "gradaccum": ours,
        "Fabric": fabric,
        "Accelerate": accelerate,
    }
    table = Table(
        "Reads and writes of gradient-sized tensors, and waits, per update of 8 micro-batches"
    )
    for case, lengths in sizes.items():
        batches = list(torch.randn(sum(lengths), 53).split(lengths))
        for optimizer, make_optimizer in optimizers.items():
            for clip in (None, 1.0):

                def make(build: Callable[..., torch.optim.Optimizer] = make_optimizer) -> Setup:
                    net = model()
                    return net, build(net.parameters())

                row: dict[str, object] = {
                    "counts": case,
                    "optimizer": optimizer,
                    "clip": clip or "-",
                }
                for name, loop in loops.items():
                    found = count(model().parameters(), loop(make, clip, batches))
                    row[name] = f"{found.reads}r {found.writes}w {found.waits} waits"
                table.add(**row)
    table.show(options.out, "passes")


if __name__ == "__main__":
    main()
