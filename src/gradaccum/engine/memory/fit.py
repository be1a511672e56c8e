"""`gradaccum.fit`: how many samples at a time fit in memory, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gradaccum.engine.memory.probe import Probed, probe, read_limit
from gradaccum.engine.memory.refused import refuse_unrunnable
from gradaccum.engine.memory.resident import owned
from gradaccum.engine.memory.shortage import is_shortage
from gradaccum.engine.refuse import read_optimizers, refuse_ranks
from gradaccum.errors import InputError, PlanError, shown
from gradaccum.planner.meter import Meter, meter_for
from gradaccum.planner.padding import Side
from gradaccum.planner.phases import Run
from gradaccum.planner.size import parse_size
from gradaccum.planner.split import Samples, gather
from gradaccum.planner.within import even_within, plan_within
from gradaccum.records import Fit, FitRow, Plan
from gradaccum.records.fit import show_bytes

__all__ = ["device_of", "fit", "nothing_ran"]


def fit(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], object],
    batch: Any,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    memory: int | str = "auto",
    lengths: Iterable[Any] | Callable[[Any], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    trim: Side | Callable[[Any, int], Any] | None = "right",
    reduction: Literal["sum", "mean"] = "sum",
) -> Fit:
    """Measure a few small micro-batches, and say which sizes fit and what they take.

    Micro-batches of 2 and 4 samples are run forth and back, with lengths in up to three widths;
    larger ones are predicted. The model, its buffers, gradients and random states are left as they
    were, and the optimizer is not stepped: what its state will take is asked of a copy without
    memory.

    Args:
        model: as for `Accumulator`.
        loss_fn: as in `Accumulator.step`.
        batch: as in `Accumulator.step`: of the size that you want to train with.
        optimizer: whose state will stay in memory; one or several.
        memory: most bytes at the peak, model, gradients and optimizer state included:
            `"12GiB"`, a number of bytes, or `"auto"` for what the device can give. Where the
            device's allocator keeps count, all else that lives there is included as well.
        lengths: as in `Accumulator.step`.
        collate: as in `Accumulator.step`.
        trim: as in `Accumulator.step`.
        reduction: as in `Accumulator.step`.

    Raises:
        BatchError: if the batch cannot be split as asked.
        InputError: if the loss is no sum with its count, all counts are 0, the loss depends on no
            parameter of the model, or `memory` is no size.
        PlanError: if not a single sample could be run.

    Examples:
        >>> import torch, gradaccum as ga
        >>> model = torch.nn.Linear(1000, 1, bias=False)
        >>> loss_fn = lambda model, x: (model(x).square().sum(), len(x))
        >>> found = ga.fit(model, loss_fn, torch.zeros(64, 1000), memory="1MB")
        >>> found.microbatches, found.microbatch, found.fits
        (1, 64, True)
    """
    refuse_ranks(model)
    optimizers = () if optimizer is None else read_optimizers(optimizer, model)
    refuse_unrunnable(model, loss_fn, batch)
    size = parse_size(memory)
    meter = meter_for(device_of(model))
    samples = gather([batch], lengths=lengths, collate=collate, trim=trim)
    limit = read_limit(size, meter, owned(model, optimizers))
    try:
        probed = probe(
            model,
            loss_fn,
            samples,
            meter=meter,
            optimizers=optimizers,
            limit=limit,
            reduction=reduction,
            timed=True,
            whole=True,
        )
    except Exception as error:
        if not is_shortage(error):
            raise
        raise nothing_ran(meter, limit, error) from error
    plan, most, groups = _choose(samples, probed, limit)
    longest = max(samples.lengths) if samples.lengths is not None else 1
    shapes = _shapes(samples, plan, groups)
    return Fit(
        device=str(meter.device),
        samples=len(samples),
        limit=limit,
        auto=size == "auto",
        parameters=probed.resident.model,
        gradients=probed.resident.gradients,
        optimizer=probed.resident.optimizer,
        others=probed.resident.others,
        assumed=probed.assumed,
        memory=probed.memory,
        rows=_rows(samples, probed, most),
        plan=plan,
        microbatch=most,
        microbatches=groups,
        seconds=float(sum(probed.seconds_of(n, width) for n, width in shapes)),
        peak=max(
            (probed.memory.bytes(n, width) for n, width in shapes),
            default=max(probed.memory.bytes(1, longest), probed.memory.floor),
        ),
    )


def device_of(model: nn.Module) -> torch.device:
    """Where a model's micro-batches are computed: its first parameter's device.

    Raises:
        InputError: if it has no parameter.
    """
    first = next(model.parameters(), None)
    if first is None:
        raise InputError(
            "model",
            "The model has no parameters, so there is nothing to train.",
            got=shown(type(model).__name__),
            expected="a module with parameters",
            do="pass the module whose parameters the optimizer steps",
        )
    return first.device


def _choose(samples: Samples, probed: Probed, limit: int) -> tuple[Plan | None, int, int]:
    """The plan, most samples of a micro-batch, and how many there are; 0 where some do not fit."""
    try:
        if samples.lengths is not None:
            plan = plan_within(samples.lengths, probed.memory, limit)
            return plan, max(len(micro.indices) for micro in plan), len(plan)
        groups = even_within(len(samples), probed.memory, limit)
    except PlanError:
        return None, 0, 0
    return None, -(-len(samples) // groups), groups


def _shapes(samples: Samples, plan: Plan | None, groups: int) -> list[tuple[int, int]]:
    if plan is not None:
        return [(len(micro.indices), micro.width) for micro in plan]
    n = len(samples)
    return [(n // groups + (i < n % groups), 1) for i in range(groups)]


def _rows(samples: Samples, probed: Probed, most: int) -> tuple[FitRow, ...]:
    """The sizes that were run, and doubling ones of the longest samples, up to the whole batch."""
    lengths, n = samples.lengths, len(samples)
    width = None if lengths is None else max(lengths)
    stays = probed.resident.total

    def shown_width(run: Run) -> int | None:
        return None if lengths is None else run.width

    rows = [
        FitRow(run.samples, shown_width(run), stays + run.bytes, seconds, measured=True)
        for run, seconds in zip(probed.runs, probed.seconds, strict=True)
    ]
    seen = {(row.samples, row.width) for row in rows}
    sizes = {2**power for power in range(n.bit_length()) if 2**power < n} | {n}
    for size in sorted(sizes | ({most} if most and lengths is None else set())):
        if (size, width) not in seen:
            size_in_bytes = probed.memory.bytes(size, width or 1)
            seconds = probed.seconds_of(size, width or 1)
            rows.append(FitRow(size, width, size_in_bytes, seconds, measured=False))
    return tuple(sorted(rows, key=lambda row: (row.width or 0, row.samples)))


def nothing_ran(meter: Meter, limit: int, error: Exception) -> PlanError:
    """The refusal where the smallest micro-batch did not fit."""
    return PlanError(
        "memory-probe",
        f"Not even a single sample could be run on {meter.device}.",
        got=f"{' '.join(str(error).split())[:160]}; memory of {show_bytes(limit)}",
        expected="room for the gradients and one forward and backward of the shortest sample",
        do="cut the samples, checkpoint activations (torch.utils.checkpoint), or free memory that "
        "others hold",
    )
