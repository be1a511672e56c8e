"""What it costs to keep each micro-batch apart until it is whole: `Accumulator(..., restore=True)`.

Processor time on one thread, beside the same loop with `restore=False`, window by window in turns;
and live bytes at the peak of a window. From the smallest model over layers whose gradients are all
the work there is (one row to a micro-batch) to the demo's decoder.

    python benchmarks/restore.py [--out DIR] [--rounds N]
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum as ga
from common import Table, arguments, interleaved
from gradaccum.demo.data import collate, load
from gradaccum.demo.measure import peak_memory
from gradaccum.demo.model import Decoder, DecoderConfig
from gradaccum.demo.model import loss_fn as decoder_loss

EVERY, LONG, ROUNDS = 8, 512, 9

Loss = Callable[[nn.Module, Any], Any]


def squares(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """A loss that costs next to nothing."""
    return model(x).square().sum(), len(x)


def cases() -> dict[str, tuple[nn.Module, list[Tensor], Loss]]:
    """Models, a window's micro-batches, and losses."""
    small = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    layers = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    corpus = load(LONG)
    batch = next(iter(corpus.batches(8 * EVERY, 1, seed=0)))
    decoder = Decoder(DecoderConfig(len(corpus.tokenizer.words), LONG))
    functions = [collate(batch[k : k + 8]) for k in range(0, len(batch), 8)]
    return {
        "16-16-1, 4 rows": (small, [torch.randn(4, 16)] * EVERY, squares),
        "8 layers of 1024, 1 row": (layers, [torch.randn(1, 1024)] * EVERY, squares),
        "8 layers of 1024, 64 rows": (layers, [torch.randn(64, 1024)] * EVERY, squares),
        "8 layers of 1024, 512 rows": (layers, [torch.randn(512, 1024)] * EVERY, squares),
        "the demo's decoder, 8 functions": (decoder, functions, decoder_loss),
    }


def looped(
    model: nn.Module, micros: Sequence[Tensor], loss_fn: Loss, restore: bool
) -> Callable[[], None]:
    """A window."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    acc = ga.Accumulator(model, optimizer, every=EVERY, restore=restore)

    def window() -> None:
        for micro in acc.microbatches(micros):
            micro.backward(*loss_fn(model, micro.batch))

    return window


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table("restore=True beside restore=False, by micro-batch; bytes at a window's peak")
    for name, (model, micros, loss_fn) in cases().items():
        loops = {str(on): looped(model, micros, loss_fn, on) for on in (False, True)}
        rounds = options.rounds or (200 if "16-16-1" in name else ROUNDS)
        seconds = interleaved(loops, rounds=rounds, clock=time.process_time)
        pairs = list(zip(seconds["True"], seconds["False"], strict=True))
        peaks = {}
        for on, window in loops.items():
            with peak_memory(torch.device("cpu")) as peak:
                window()
            peaks[on] = peak.value
        table.add(
            case=name,
            ratio=round(median(on / off for on, off in pairs), 3),
            more_ms=round(median(on - off for on, off in pairs) / EVERY * 1e3, 2),
            peak=peaks["False"],
            peak_with_it=peaks["True"],
            gradients=sum(p.numel() * p.element_size() for p in model.parameters()),
        )
    table.show(options.out, "restore")


if __name__ == "__main__":
    main()
