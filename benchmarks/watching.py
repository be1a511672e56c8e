"""What the doctor costs while it watches: on a tiny model, and on the demo's.

The same loop with and without the hooks, turn by turn in one process, so that whatever else the
machine does falls on both; CPU time. *At first* is a whole new run of so many micro-batches (400 of
the tiny model, 32 of the demo's): its modules are found once, and its first windows are looked at
closely. *Later* is the rest of a long run.

    python benchmarks/watching.py [--out DIR] [--rounds N]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from common import Table, arguments, interleaved
from gradaccum.demo.model import Decoder, DecoderConfig, loss_fn
from gradaccum.doctor.arrive import head, ledger
from gradaccum.doctor.hooks.install import install
from gradaccum.doctor.trace.recorder import Recorder
from gradaccum.doctor.trace.sink import ListSink

EVERY, ROUNDS, LATER = 8, 30, 1001


def tiny(batches: int, every: int = EVERY) -> Callable[[], None]:
    """An MLP 16-16-1 on batches of 4."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = list(torch.randn(batches, 4, 16))

    def run() -> None:
        for i, x in enumerate(data):
            (model(x).square().mean() / every).backward()
            if (i + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    return run


def updates(batches: int) -> Callable[[], None]:
    """The same where each micro-batch is an update."""
    return tiny(batches, every=1)


def demo(batches: int) -> Callable[[], None]:
    """The demo's decoder on 8 samples of 256 tokens, in windows of 8."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocabulary=2048, max_length=1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [torch.randint(1, 500, (8, 256)) for _ in range(batches)]

    def run() -> None:
        for i, tokens in enumerate(data):
            loss_sum, count = loss_fn(model, tokens)
            (loss_sum / count / EVERY).backward()
            if (i + 1) % EVERY == 0:
                optimizer.step()
                optimizer.zero_grad()

    return run


def watched(loop: Callable[[], None], young: bool) -> Callable[[], None]:
    """The loop under hooks; `young`: as in a run's first windows, else as in its later ones."""
    recorder = Recorder(torch, ListSink(), head(torch), ledger())

    def run() -> None:
        recorder.closed = False
        if young:
            recorder.named = False
            recorder.begin(ListSink(), head(torch))
        remove = install(recorder)
        try:
            loop()
        finally:
            remove()

    def later() -> None:
        # Its share of its own time: what the other loops take does not count.
        recorder.segments.spent = recorder.segments.allowed()
        run()

    if young:
        return run
    run()
    recorder.segments.index = LATER
    later()
    return later


def measure(table: Table, name: str, build: Callable[[int], Callable[[], None]], batches: int,
            rounds: int) -> None:  # fmt: skip
    """Add a row for each way."""
    loops = {
        f"{name}, plain": build(batches),
        f"{name}, at first": watched(build(batches), young=True),
        f"{name}, later": watched(build(batches), young=False),
    }
    seconds = interleaved(loops, rounds=rounds, clock=time.process_time)
    each = {way: [1e6 * s / batches for s in times] for way, times in seconds.items()}
    table.add_timings(each, base=f"{name}, plain", unit="us")


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    table = Table("Microseconds per micro-batch with and without the doctor's hooks")
    measure(table, "tiny", tiny, 400, options.rounds or ROUNDS)
    measure(table, "tiny updates", updates, 400, options.rounds or ROUNDS)
    measure(table, "demo", demo, 4 * EVERY, max(3, (options.rounds or ROUNDS) // 5))
    table.show(options.out, "doctor")


if __name__ == "__main__":
    main()
