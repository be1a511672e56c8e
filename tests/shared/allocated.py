"""Bytes by the events of torch's own CPU allocator, which no counter of ours has a part in."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def allocated(run: Callable[[], object]) -> int:
    """The most bytes at one moment of a run, beyond those at its beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    moves = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    return max(itertools.accumulate(size for _, size in moves))


def held(*tensors: torch.Tensor) -> int:
    """Bytes of some tensors' memory."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )
