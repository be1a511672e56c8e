"""Trains under a real limit of address space, or with given sizes; prints what came of it as JSON.

Usage: shortage_script.py MEBIBYTES EVERY; MEBIBYTES that may be taken beyond what the process has
before the first update, 0 for no limit.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum as ga

SAMPLES, WIDTH, UPDATES = 64, 2048, 3


class Model(nn.Module):
    """Activations far larger than its parameters, with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(2, 32, 3, padding=1),
            nn.BatchNorm1d(32),
            nn.Dropout(0.2),
            nn.Conv1d(32, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv1d(32, 1, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.convolutions(x)


def kept() -> int:
    """KiB of memory that holds something of this process's own.

    Not the pages of libraries, of which a failure touches some for the first time (12 MiB of
    torch's code), nor what the C library's allocator keeps of freed blocks (up to 30 MiB).
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("RssAnon")


def status(field: str) -> int:
    """A line of the process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main(mebibytes: int, every: int) -> dict[str, Any]:
    """Three updates under the limit, then as many as it takes to grow back without it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acc = ga.Accumulator(model, optimizer, every=every, clip_norm=1.0, batchnorm="microbatch")
    batch = torch.randn(SAMPLES, 2, WIDTH)
    calls: list[int] = []

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        calls.append(len(x))
        return model(x).square().sum(), x.numel()

    model.eval()
    acc_warm = model(batch[:2]).sum()  # what is loaded and allocated once
    del acc_warm
    model.train()
    if mebibytes:
        most = status("VmSize") * 1024 + mebibytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    before, rows, digests = kept(), [], []
    for _ in range(UPDATES):
        calls.clear()
        update = acc.step(batch, loss_fn)
        rows.append({"calls": list(calls), "microbatches": update.microbatches})
        values = [*model.state_dict().values(), *[p.grad for p in model.parameters()]]
        digest = hashlib.sha256()
        for value in [*values, torch.get_rng_state()]:
            digest.update(b"" if value is None else value.contiguous().view(-1).numpy().tobytes())
        digests.append(digest.hexdigest())
    after = kept()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    later = range(8 if mebibytes else 0)
    grown = [acc.step(batch, loss_fn).microbatches for _ in later]
    return {"rows": rows, "digests": digests, "before": before, "after": after, "grown": grown}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
