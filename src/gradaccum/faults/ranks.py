"""GA6xx: what ranks send one another, and when."""

from __future__ import annotations

from gradaccum.faults.entry import Fault

__all__ = ["FAULTS"]

_RANK = """\
import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
os.environ["MASTER_ADDR"] = "127.0.0.1"
dist.init_process_group("gloo", rank=0, world_size=1)
model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = [torch.ones(2, 1)] * 4
every = 4
sent = []


def count(state, bucket):
    sent.append(1)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


model.register_comm_hook(None, count)
"""

FAULTS = (
    Fault(
        code="GA601",
        title="gradients are synchronised every micro-batch",
        severity="warning",
        what="A DDP model accumulates without `no_sync()`.",
        why="The gradients of all ranks travel {bad} times a window instead of {good}. The update "
        "is right; the time is lost.",
        mend="Run all micro-batches but the last under `model.no_sync()`.",
        bad="""\
for i, x in enumerate(data):
    loss = model(x).mean() / every
    loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
figure = len(sent)
dist.destroy_process_group()
""",
        good="""\
from contextlib import nullcontext

for i, x in enumerate(data):
    with model.no_sync() if (i + 1) % every else nullcontext():
        loss = model(x).mean() / every
        loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
figure = len(sent)
dist.destroy_process_group()
""",
        figures=(4.0, 1.0),
        prelude=_RANK,
    ),
    Fault(
        code="GA602",
        title="the forward is outside `no_sync`",
        severity="warning",
        what="Only `backward()` stands under `no_sync()`; DDP decides in the forward.",
        why="Every micro-batch still synchronises: {bad} times a window instead of {good}.",
        mend="Put the forward under `no_sync()` as well.",
        bad="""\
from contextlib import nullcontext

for i, x in enumerate(data):
    loss = model(x).mean() / every
    with model.no_sync() if (i + 1) % every else nullcontext():
        loss.backward()
figure = len(sent)
dist.destroy_process_group()
""",
        good="""\
from contextlib import nullcontext

for i, x in enumerate(data):
    with model.no_sync() if (i + 1) % every else nullcontext():
        loss = model(x).mean() / every
        loss.backward()
figure = len(sent)
dist.destroy_process_group()
""",
        figures=(4.0, 1.0),
        prelude=_RANK,
    ),
    Fault(
        code="GA603",
        title="`no_sync` counts one off",
        severity="error",
        what="The condition that chooses `no_sync()` and the one that steps use different offsets: "
        "the first micro-batch synchronises, the last does not.",
        why="Each rank steps with a gradient that only it has, so the ranks drift apart: {bad} of "
        "the window's micro-batches were not sent when the step came, instead of {good}.",
        mend="Use one condition for both: the micro-batch that steps is the one that synchronises.",
        bad="""\
from contextlib import nullcontext

for i, x in enumerate(data):
    with model.no_sync() if i % every else nullcontext():
        loss = model(x).mean() / every
        loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
        figure = 3 if i % every else 0
dist.destroy_process_group()
""",
        good="""\
from contextlib import nullcontext

for i, x in enumerate(data):
    with model.no_sync() if (i + 1) % every else nullcontext():
        loss = model(x).mean() / every
        loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
        figure = 3 if (i + 1) % every else 0
dist.destroy_process_group()
""",
        figures=(3.0, 0.0),
        prelude=_RANK,
    ),
    Fault(
        code="GA604",
        title="the model is called past DDP",
        severity="error",
        what="The loss is computed by `ddp.module(x)`, or by the model that DDP was given, and not "
        "by `ddp(x)`.",
        why="DDP prepares the exchange in its own forward. Without it, {bad} gradients are sent in "
        "{good} updates: every rank trains a model of its own.",
        mend="Call the DDP module itself in training; keep `.module` for what is saved or "
        "evaluated.",
        bad="""\
for x in data:
    loss = model.module(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
figure = len(sent)
dist.destroy_process_group()
""",
        good="""\
for x in data:
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
figure = len(sent)
dist.destroy_process_group()
""",
        figures=(0.0, 4.0),
        prelude=_RANK,
    ),
)
