"""A batch of 64 functions that does not fit in memory: who trains with what, and how soon.

Every contender runs in a process of its own, under the same real limit: once its model, optimizer
and first batch are there and one sample has been run, its address space may grow by 400 MB and no
more (`RLIMIT_AS`), so that torch's own allocator says no. All ask for a batch of 64:

- the whole batch at once;
- Accelerate's `find_executable_batch_size`, which begins with 64 and takes off a tenth after each
  failure;
- Lightning's `BatchSizeFinder`, which doubles from 2 until it fails;
- gradaccum with `memory="auto"`, which measures some samples and plans.

Beside them the whole batch without a limit. glibc is told to hand freed blocks back at once
(`MALLOC_MMAP_THRESHOLD_`), for all alike: else a failure would depend on what was freed before.

    python benchmarks/memory.py [--out DIR] [--rounds N]
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import gradaccum as ga
from common import Table, arguments
from gradaccum.demo.data import collate, length, load
from gradaccum.demo.model import Decoder, DecoderConfig, loss_fn

BATCH, CUT, ALLOWED, ROUNDS = 64, 512, 400 * 10**6, 3

Batch = Sequence[Tensor]


@dataclass
class Outcome:
    """What came of one contender."""

    name: str
    batch: int = 0
    """Samples in each update that it trains with; 0 if it makes none."""
    attempts: int = 0
    """Forward passes that were begun before the first update was made."""
    first_update_s: float = 0.0
    """Seconds until the first update, the search included."""
    first_update_cpu_s: float = 0.0
    """The same in seconds of the processors, which other processes do not stretch."""
    update_s: float = 0.0
    """Median seconds of the updates after that."""
    microbatches: int = 1
    mapped_bytes: int = 0
    """Most bytes of address space beyond what was there before the limit was set."""
    error: str = ""


class Task:
    """The same model, optimizer and batches for everyone."""

    def __init__(self, rounds: int) -> None:
        corpus = load(CUT)
        torch.manual_seed(0)
        self.model = Decoder(DecoderConfig(len(corpus.tokenizer.words), CUT))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches: list[Batch] = list(corpus.batches(BATCH, 1 + rounds, seed=0))
        self.forwards = 0
        self.started = 0.0
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.forwards += 1

    def warm_up(self) -> None:
        """One sample forth and back: threads and libraries are there before the limit."""
        loss_fn(self.model, collate(self.batches[0][:1]))[0].backward()
        self.optimizer.zero_grad()
        self.forwards = 0

    def update(self, samples: Batch) -> None:
        """The plain update of some samples at once."""
        self.optimizer.zero_grad()
        loss_sum, count = loss_fn(self.model, collate(samples))
        (loss_sum / count).backward()
        self.optimizer.step()


Contender = Callable[[Task, Outcome, float], None]
"""Given its start, fills the outcome."""


def timed(outcome: Outcome, updates: Sequence[Callable[[], object]]) -> None:
    """Run the updates that follow the first one."""
    seconds = []
    for update in updates:
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    outcome.update_s = median(seconds)


def whole(task: Task, outcome: Outcome, start: float) -> None:
    """All samples at once."""
    task.update(task.batches[0])
    finish(task, outcome, start, BATCH)
    timed(outcome, [lambda b=b: task.update(b) for b in task.batches[1:]])


def accelerate(task: Task, outcome: Outcome, start: float) -> None:
    """The training function is begun anew with a smaller batch after each failure."""
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415 - others do without

    @find_executable_batch_size(starting_batch_size=BATCH)
    def train(batch_size: int) -> None:
        task.update(task.batches[0][:batch_size])
        finish(task, outcome, start, batch_size)
        timed(outcome, [lambda b=b: task.update(b[:batch_size]) for b in task.batches[1:]])

    train()


def lightning(task: Task, outcome: Outcome, start: float) -> None:
    """`BatchSizeFinder` before `fit`; it never asks for more than the batch that is wanted."""
    # Here, because the other contenders are to start without it.
    import lightning.pytorch as pl  # noqa: PLC0415
    from lightning.pytorch.callbacks import BatchSizeFinder  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    samples = [sample for batch in task.batches for sample in batch]
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    marks: list[float] = []

    class Finder(BatchSizeFinder):
        """Says when the search is over."""

        done = False

        def scale_batch_size(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            super().scale_batch_size(trainer, module)
            self.done = True

    finder = Finder(init_val=2, max_val=BATCH)

    class Module(pl.LightningModule):
        """The task as Lightning wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model = task.model

        def training_step(self, batch: Tensor) -> Tensor:
            loss_sum, count = loss_fn(self.model, batch)
            return loss_sum / count

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer

        def train_dataloader(self) -> DataLoader[Any]:
            # The first samples are always the same ones, as for the others.
            return DataLoader(samples, batch_size=self.batch_size, collate_fn=collate)

        def on_train_batch_end(self, *_: object) -> None:
            if finder.done:
                if not marks:
                    finish(task, outcome, start, self.batch_size)
                marks.append(time.perf_counter())

    trainer = pl.Trainer(accelerator="cpu", max_steps=1 + ROUNDS, callbacks=[finder], **quiet)
    trainer.fit(Module())
    outcome.update_s = median(b - a for a, b in pairwise(marks))


def gradaccum(task: Task, outcome: Outcome, start: float) -> None:
    """Measures, plans, and makes the update of all samples."""
    memory = "auto"
    fit = ga.fit(
        task.model,
        loss_fn,
        task.batches[0],
        optimizer=task.optimizer,
        memory=memory,
        lengths=length,
        collate=collate,
    )
    limit, model = fit.limit, fit.memory
    accumulators: list[ga.Accumulator] = []

    def update(batch: Batch) -> int:
        from gradaccum.planner.within import plan_within  # noqa: PLC0415

        plan = plan_within(map(length, batch), model, limit)
        acc = ga.Accumulator(task.model, task.optimizer, every=len(plan))
        accumulators.append(acc)
        groups = ([batch[i] for i in micro.indices] for micro in plan)
        for micro in acc.microbatches(collate(samples) for samples in groups):
            micro.backward(*loss_fn(task.model, micro.batch))
        return len(plan)

    outcome.microbatches = update(task.batches[0])
    finish(task, outcome, start, BATCH)
    timed(outcome, [lambda b=b: update(b) for b in task.batches[1:]])


CONTENDERS: dict[str, Contender] = {
    "whole batch, no limit": whole,
    "whole batch": whole,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "gradaccum": gradaccum,
}


def finish(task: Task, outcome: Outcome, start: float, batch: int) -> None:
    """The first update is made."""
    outcome.first_update_s = time.perf_counter() - start
    outcome.first_update_cpu_s = time.process_time() - task.started
    outcome.batch, outcome.attempts = batch, task.forwards


def status(field: str) -> int:
    """Bytes of the process, by the kernel's account."""
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def run_one(name: str, rounds: int) -> Outcome:
    """One contender, in a process that is its own."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    task, outcome = Task(rounds), Outcome(name)
    if name == "Lightning":
        import lightning.pytorch  # noqa: F401, PLC0415 - loaded before the limit, as the others are
    if name == "Accelerate":
        import accelerate.utils  # noqa: F401, PLC0415
    task.warm_up()
    before = status("VmSize")
    if "no limit" not in name:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (before + ALLOWED, hard))
    start, task.started = time.perf_counter(), time.process_time()
    try:
        CONTENDERS[name](task, outcome, start)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the contender's outcome
        outcome.error = " ".join(f"{type(error).__name__}: {error}".split())[:90]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    outcome.mapped_bytes = max(0, status("VmPeak") - before)
    return outcome


def run_all(rounds: int) -> list[Outcome]:
    """Every contender, one after the other."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "CUDA_VISIBLE_DEVICES": ""}
    found = []
    for name in CONTENDERS:
        command = [sys.executable, __file__, "--rounds", str(rounds)]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**environment, "GRADACCUM_CONTENDER": name},
            check=False,
        )
        last = result.stdout.strip().splitlines()[-1:] or [""]
        if result.returncode == 0 and last[0].startswith("{"):
            found.append(Outcome(**json.loads(last[0])))
        else:
            reason = " ".join(result.stderr.split())[-90:]
            found.append(Outcome(name, error=f"exit {result.returncode}: {reason}"))
    return found


def draw(found: Sequence[Outcome], folder: Path) -> None:
    """Three bars for each: what it trains with, how soon, and in what memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - for --out only
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(13, 3.6), facecolor="white")
    FigureCanvasAgg(figure)
    rows = range(len(found))
    titles = (
        f"Samples in each update (wanted: {BATCH})",
        "Seconds until the first update",
        "Address space beyond the start, MB",
    )
    values: list[list[float]] = [
        [one.batch for one in found],
        [one.first_update_s for one in found],
        [one.mapped_bytes / 1e6 for one in found],
    ]
    for place, (title, column) in enumerate(zip(titles, values, strict=True)):
        axes = figure.add_subplot(1, 3, place + 1)
        colours = ["#0072b2" if one.name == "gradaccum" else "#8a929c" for one in found]
        axes.barh(rows, column, color=colours, height=0.62)
        for row, value in zip(rows, column, strict=True):
            text = "none" if place < 2 and not value else f"{value:,.1f}".removesuffix(".0")
            axes.text(value + 0.02 * max(column), row, text, va="center", size=9)
        axes.set_yticks(rows, [one.name for one in found] if place == 0 else [""] * len(found))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(column))
        axes.set_title(title, size=10, loc="left", weight="bold")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[2].axvline(ALLOWED / 1e6, color="#1f2328", linewidth=0.8, linestyle=(0, (3, 3)))
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "memory.png", dpi=150)


def main() -> None:
    """Run one contender, or all and compare them."""
    options = arguments(__doc__)
    rounds = options.rounds or ROUNDS
    mine = os.environ.get("GRADACCUM_CONTENDER")
    if mine:
        print(json.dumps(asdict(run_one(mine, rounds))))
        return
    found = run_all(rounds)
    table = Table(
        f"A batch of {BATCH} functions cut at {CUT} tokens, {ALLOWED / 1e6:.0f} MB of address space"
    )
    base = found[0]
    for one in found:
        table.add(
            contender=one.name,
            batch=one.batch or "none",
            microbatches=one.microbatches if one.batch else "",
            forwards_before_update=one.attempts if one.batch else "",
            first_update_s=round(one.first_update_s, 2) if one.batch else "",
            first_update_cpu_s=round(one.first_update_cpu_s, 2) if one.batch else "",
            update_s=round(one.update_s, 2) if one.batch else "",
            samples_per_s=round(one.batch / one.update_s, 1) if one.update_s else "",
            mapped_MB=round(one.mapped_bytes / 1e6),
            of_whole=round(one.mapped_bytes / base.mapped_bytes, 3) if base.mapped_bytes else "",
            error=one.error,
        )
    table.show(options.out, "memory")
    if options.out is not None:
        draw(found, options.out)


if __name__ == "__main__":
    main()
