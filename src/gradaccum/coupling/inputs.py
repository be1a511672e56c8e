"""Reads what `gradaccum.check` is given, and refuses what cannot be meant."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradaccum.engine.memory.refused import refuse_unrunnable
from gradaccum.errors import BatchError, InputError, shown
from gradaccum.planner.split import Samples, gather

__all__ = ["read_samples"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_samples(
    model: object,
    loss_fn: object,
    batch: Any,
    *,
    lengths: Any,
    collate: Any,
    trim: Any,
    reduction: object,
    dtype: object,
) -> Samples:
    """Check all arguments of `check`, and return the batch's samples."""
    if not isinstance(model, nn.Module):
        raise InputError(
            "model",
            "The model is not a module.",
            got=shown(model),
            expected="a torch.nn.Module",
            do="gather several in torch.nn.ModuleList([...])",
        )
    if reduction not in ("sum", "mean"):
        raise InputError(
            "reduction",
            "`reduction` must be 'sum' or 'mean'.",
            got=f"reduction={reduction!r:.60}",
            expected="what the loss is of its terms",
            do="return a sum from your loss and pass it with its count",
        )
    if dtype is not None and dtype not in _DTYPES:
        raise InputError(
            "check-dtype",
            "A gradient cannot be computed in that.",
            got=f"dtype={shown(dtype)}",
            expected="torch.float64 or another floating type, or None for the model's own",
            do="leave out dtype=",
        )
    refuse_unrunnable(model, loss_fn, batch)
    samples = gather([batch], lengths=lengths, collate=collate, trim=trim)
    if len(samples) < 2:
        raise BatchError(
            "check-samples",
            "A batch of one sample cannot be split, so there is nothing to compare.",
            got="1 sample",
            expected="at least 2 samples, better 8",
            do="ga.check(model, loss_fn, batch) with a batch as you train with",
        )
    return samples
