"""Trains two epochs with windows of three and a tail of two; run by `test_state.py`.

`python resume_script.py whole FOLDER CASE...` trains without a stop and saves everything after
every micro-batch; `resume` goes on from each of these files and saves where each run ended.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gradaccum as ga

EPOCHS, EVERY = 2, 3
BATCHES = 5  # windows of three and of two; six in the case where windows end with the loader
WIDE: dict[str, Any] = {
    "wide": torch.float32,
    "wide terms": torch.float32,
    "wide scaler": torch.float32,
    "compensated": "compensated",
    "compensated terms": "compensated",
}
MODE, FOLDER, CASES = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]


def build(case: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    if case in WIDE:
        model.bfloat16()
    kind = torch.optim.SGD if case == "sgd" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    # a scale that grows at every update and overflows once
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    acc = ga.Accumulator(
        model,
        optimizer,
        every=EVERY,
        clip_norm=None if "terms" in case else 0.5,
        scheduler=scheduler,
        scaler=scaler if case.endswith("scaler") else None,
        on_stale="zero" if case == "zero" else "raise",
        accumulate_dtype=WIDE.get(case),
    )
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "accumulator": acc}


def batches(case: str, epoch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(epoch)
    number = BATCHES + (case == "whole windows")
    dtype = torch.bfloat16 if case in WIDE else torch.float32
    return [torch.randn(i % 3 + 1, 4, generator=generator).to(dtype) for i in range(number)]


def loop(case: str, acc: ga.Accumulator, epoch: int, start: int) -> Iterator[ga.Microbatch[Any]]:
    if case in ("loader", "whole windows"):
        # its iterator draws from torch's generator when it is made
        rows: Any = torch.cat(batches(case, epoch))
        return acc.microbatches(islice(DataLoader(rows, batch_size=2), start, None))
    rest = batches(case, epoch)[start:]
    if case == "counts":
        return acc.microbatches(rest, counts=len)
    if case == "regrouped":
        lists = [list(batch) for batch in rest]
        return acc.microbatches(
            lists, lengths=lambda x: int(x.abs().sum()) + 1, budget=10, collate=torch.stack
        )
    return acc.microbatches(rest)


def train(case: str, parts: dict[str, Any], epoch: int, start: int, save: bool) -> None:
    acc, model = parts["accumulator"], parts["model"]
    for now in range(epoch, EPOCHS):
        consumed = start if now == epoch else 0
        for micro in loop(case, acc, now, consumed):
            loss = (model(micro.batch) - 1).square().sum()
            if "terms" in case:
                tiny = model[0].weight.abs().sum()
                micro.backward({"fit": (loss, len(micro.batch)), "size": (tiny, 1)})
            else:
                micro.backward(loss, len(micro.batch))
            if case not in ("counts", "regrouped"):
                consumed += 1
            elif micro.last:  # a window's batches are gathered first: go on from its beginning
                consumed = min(consumed + EVERY, BATCHES)
            if save:
                state = {name: part.state_dict() for name, part in parts.items()}
                number = len(list(FOLDER.glob(f"{case}-after-*.pt")))
                place = {"epoch": now, "start": consumed}
                torch.save({**state, **place}, FOLDER / f"{case}-after-{number:02}.pt")


def resume(case: str, path: Path, target: Path, forget: bool = False) -> None:
    saved = torch.load(path, weights_only=True)
    parts = build(case)
    torch.manual_seed(12345)  # whatever a fresh process draws must not matter
    for name, part in parts.items():
        if not (forget and name == "accumulator"):
            part.load_state_dict(saved[name])
    train(case, parts, saved["epoch"], saved["start"], save=False)
    finish(parts, target)


def finish(parts: dict[str, Any], target: Path) -> None:
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "next": torch.rand(3)}, target)


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.use_deterministic_algorithms(True)
    for case in CASES:
        if MODE == "whole":
            everything = build(case)
            train(case, everything, 0, 0, save=True)
            finish(everything, FOLDER / f"{case}-whole.pt")
        elif MODE == "resume":
            for path in sorted(FOLDER.glob(f"{case}-after-*.pt")):
                resume(case, path, FOLDER / path.name.replace("after", "resumed"))
        else:
            resume(case, FOLDER / f"{case}-after-01.pt", FOLDER / f"{case}-forgot.pt", forget=True)
