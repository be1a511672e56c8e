"""Measuring what micro-batches take: a few small ones are run, and the rest is predicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.grads import fill
from gradaccum.engine.loss import Part, read_parts, read_result
from gradaccum.engine.move import lane_of
from gradaccum.engine.resident import foretell, state_tensors
from gradaccum.engine.untouched import untouched
from gradaccum.planner.live import storages
from gradaccum.planner.meter import Meter
from gradaccum.planner.phases import Run, fit_phases
from gradaccum.planner.split import Samples, move
from gradaccum.records import MemoryModel, Phase

__all__ = ["Probed", "Resident", "probe", "read_limit"]

LossFunction = Callable[[nn.Module, Any], object]


class Resident(NamedTuple):
    """Bytes that stay from one micro-batch to the next, by owner."""

    model: int
    gradients: int
    optimizer: int
    others: int
    """Other tensors that the device's allocator counts; 0 where none does."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class Probed:
    """What was measured, and what is predicted from it."""

    memory: MemoryModel
    resident: Resident
    runs: tuple[Run, ...]
    seconds: tuple[float, ...]
    """Of each run, once more without being measured; empty where nobody asked."""

    time: Phase | None = None
    """Seconds of a micro-batch, fitted; None where nobody asked."""


def read_limit(size: int | str, meter: Meter, owned: Sequence[Tensor]) -> int:
    """Bytes at the peak that `"auto"` allows: what is in use, and what can still be had."""
    return meter.used(owned) + meter.free() if isinstance(size, str) else size


def probe(
    model: nn.Module,
    loss_fn: LossFunction,
    samples: Samples,
    *,
    meter: Meter,
    optimizers: Sequence[Optimizer] = (),
    limit: int | None = None,
    reduction: str = "sum",
    declared: bool = False,
    timed: bool = False,
) -> Probed:
    """Run a few small micro-batches forth and back, and fit what they take.

    Micro-batches of 2 and of 4 samples, not of 1, for which operators often take another way; and
    of up to three widths, the widest last. Gradients are there meanwhile, as in mid-window, and the
    optimizer's state is foretold. Nothing of the model, its gradients, buffers and random states
    is changed. A width whose micro-batch would pass `limit` by what is known so far is left out.

    Args:
        model: on the meter's device.
        loss_fn: as in `Accumulator.step`.
        samples: the batch; its shortest samples serve for the narrow micro-batches.
        meter: of the device that the memory is planned on.
        optimizers: step together.
        limit: most bytes that a probe may take, what stays included.
        reduction: as in `Accumulator.step`.
        declared: whether the counts of several terms are known ahead; else each term beyond the
            first needs a sum of gradients of its own.
        timed: whether to run each micro-batch once more for its time.

    Raises:
        InputError: if `loss_fn` returns something else than a loss and its count.
        RuntimeError: (`torch.OutOfMemoryError` on a device) if even the smallest does not fit.
    """

    def run(point: _Point, begin: Callable[[], object] = lambda: None) -> _Going:
        batch = move(samples.microbatch(point.indices, point.width), meter.device)
        # Where the next batch travels while this one computes, it takes its place as well.
        following = move(samples.microbatch(point.indices, point.width), meter.device) if two else 0
        begin()
        loss, count = read_result(loss_fn(model, batch), "probe")
        return _Going(read_parts(loss, count, reduction, lambda: "probe"), following)

    two = lane_of(meter.device) is not None
    parameters = list(model.parameters())
    points = list(_points(samples))
    before = meter.used(_owned(model, optimizers))
    runs: list[Run] = []
    seconds: list[float] = []
    with untouched(model):
        going = run(points[0])
        _backward(going)
        terms, here = len(going.parts), _here(parameters, meter.device)
        del going
        having = [p for p in here if p.grad is not None]
        gradients = fill(having)
        resident = _resident(model, optimizers, meter, before, having, gradients)
        beside = 0 if declared else (terms - 1) * gradients
        resident = resident._replace(gradients=resident.gradients + beside)
        ahead = foretell(optimizers, having)
        for point in points:
            if runs and limit is not None:
                known = MemoryModel(fit_phases(runs), resident.total)
                if not known.fits(len(point.indices), point.width or 1, limit):
                    continue
            runs.append(_measure(meter, point, run, having))
            if timed:
                seconds.append(_time(meter.device, point, run, having))
    memory = MemoryModel(fit_phases(runs), resident.total, ahead.step)
    return Probed(memory, resident, tuple(runs), tuple(seconds), _fit_time(runs, seconds))


class _Point(NamedTuple):
    indices: list[int]
    width: int | None


class _Going(NamedTuple):
    parts: list[Part]
    following: object
    """The next batch, where it is on its way; held until this one is done."""


def _points(samples: Samples) -> Iterator[_Point]:
    """Micro-batches to run, the cheapest first."""
    n, lengths = len(samples), samples.lengths
    if lengths is None:
        for size in dict.fromkeys(min(size, n) for size in (2, 4)):
            yield _Point(list(range(size)), None)
        return
    order = sorted(range(n), key=lambda position: (lengths[position], position))
    longest = lengths[order[-1]]
    places = {}
    for share in (0.25, 0.5, 1.0):
        # The last sample that is no longer than this share of the longest.
        place = max(i for i in range(n) if i == 0 or lengths[order[i]] <= share * longest)
        places[lengths[order[place]]] = place
    for size in dict.fromkeys(min(size, n) for size in (2, 4)):
        for place in dict.fromkeys(max(place, size - 1) for place in places.values()):
            members = order[place - size + 1 : place + 1]
            yield _Point(sorted(members), max(lengths[i] for i in members))


def _backward(going: _Going) -> None:
    # As a window does it; seeds of one take what any seed takes.
    torch.autograd.backward([part.loss for part in going.parts])


def _measure(
    meter: Meter,
    point: _Point,
    run: Callable[..., _Going],
    having: Sequence[nn.Parameter],
) -> Run:
    fill(having)
    with meter.peak() as peak:
        going = run(point, peak.begin)
        peak.turn()
        _backward(going)
        del going
    # How a batch is cut out takes more operators for some widths than for others.
    marks = max(peak.marks[: peak.begun], default=0), *peak.marks[peak.begun :]
    turned = peak.turned - peak.begun + 1
    return Run(len(point.indices), point.width or 1, peak.bytes, marks, turned)


def _time(
    device: torch.device,
    point: _Point,
    run: Callable[..., _Going],
    having: Sequence[nn.Parameter],
) -> float:
    fill(having)
    _wait(device)
    start = time.perf_counter()
    _backward(run(point))
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _fit_time(runs: Sequence[Run], seconds: Sequence[float]) -> Phase | None:
    if not seconds:
        return None
    # Nanoseconds: the fit takes whole numbers, and calls differences below 64 of them none.
    phases = fit_phases(
        [Run(r.samples, r.width, int(s * 1e9)) for r, s in zip(runs, seconds, strict=True)]
    )
    shared, each = ([c * 1e-9 for c in part] for part in (phases[0].shared, phases[0].each))
    return Phase((shared[0], shared[1], shared[2]), (each[0], each[1], each[2]))


def _resident(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    meter: Meter,
    before: int,
    having: Sequence[nn.Parameter],
    gradients: int,
) -> Resident:
    kind = meter.device.type
    own = sum(storages([*model.parameters(), *model.buffers()], kind).values())
    state = sum(storages(state_tensors(optimizers), kind).values())
    future = max(state, foretell(optimizers, having).state)
    return Resident(own, gradients, future, max(0, before - own - state))


def _owned(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), *state_tensors(optimizers)]


def _here(parameters: Sequence[nn.Parameter], device: torch.device) -> list[nn.Parameter]:
    return [p for p in parameters if p.device.type == device.type]
