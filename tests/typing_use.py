"""Public names as users write them; read by type checkers only, never run."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import gradaccum as ga

model = nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)


def on_update(update: ga.Update) -> None:
    print(update.index, float(update.loss), update.microbatches)  # noqa: T201


def loss_fn(net: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return net(batch).square().sum(), len(batch)


acc = ga.Accumulator(
    model,
    [optimizer],
    every=lambda update: 8 if update < 100 else 16,
    clip_norm=math.inf,
    scheduler=scheduler,
    scaler=torch.amp.GradScaler("cpu"),
    on_update=on_update,
    on_stale="zero",
    on_nonfinite="raise",
    batchnorm="pooled",
    dropout="per-sample",
)
for micro in acc.microbatches(torch.randn(4, 3, 2).unbind()):
    batch: Tensor = micro.batch
    micro.backward(model(batch).sum(), len(batch))
    micro.backward({"a": (model(batch).sum(), 3), "b": (model(batch).mean(), torch.tensor(1))})
    micro.backward(model(batch).mean(), 3, reduction="mean", retain_graph=True)
    micro.skip()
    if micro.update is not None:
        norm: Tensor | None = micro.update.grad_norm

update: ga.Update = acc.step(torch.randn(9, 2), loss_fn, budget=4, counts=9)
left: ga.Update | None = acc.flush()
acc.discard()
state: dict[str, object] = acc.state_dict()
report: ga.Report = ga.check(model, loss_fn, torch.randn(9, 2), reduction="sum", dtype=None)
places: list[tuple[str, ...]] = [cause.where for cause in report.causes]
again: ga.Report = ga.assert_splittable(model, loss_fn, torch.randn(9, 2)).assert_equal()
chosen: ga.Plan = ga.plan([3, 4, 5], budget=10)
widths: list[int] = [one.width for one in chosen]
found: ga.Fit = ga.fit(model, loss_fn, torch.randn(9, 2), optimizer=optimizer, memory="1GiB")
size: int = found.memory.bytes(8, 512)
