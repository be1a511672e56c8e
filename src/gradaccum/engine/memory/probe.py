"""Measuring what micro-batches take: a few small ones are run, and the rest is predicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.grads import fill
from gradaccum.engine.loss import Part, read_parts, read_result
from gradaccum.engine.memory.move import lane_of
from gradaccum.engine.memory.refused import no_terms, unreached
from gradaccum.engine.memory.resident import foretell, owned, state_tensors
from gradaccum.engine.memory.shortage import is_shortage
from gradaccum.engine.memory.untouched import untouched
from gradaccum.planner.ladder import Ladder, Rung
from gradaccum.planner.live import storages
from gradaccum.planner.meter import Meter
from gradaccum.planner.phases import Run, fit_phases
from gradaccum.planner.split import Samples, move
from gradaccum.records import MemoryModel, Phase

__all__ = ["LossFunction", "Probed", "Resident", "probe", "read_limit"]

LossFunction = Callable[[nn.Module, Any], object]

_QUICK = 0.25


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

    time: Phase | None
    """Seconds of a micro-batch, fitted; None where nobody asked."""

    assumed: bool
    """Whether an optimizer could not be asked for its state, and was taken for Adam."""

    def seconds_of(self, samples: int, width: int = 1) -> float:
        """Predicted time of a forward and backward; 0.0 where none were timed."""
        return 0.0 if self.time is None else self.time.at(samples, width)


def read_limit(size: int | str, meter: Meter, tensors: Sequence[Tensor]) -> int:
    """Bytes that are allowed at the peak; for `"auto"` what is in use and what can still be had."""
    return meter.used(tensors) + meter.free() if isinstance(size, str) else size


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
    whole: bool = False,
) -> Probed:
    """Run a few small micro-batches forth and back, and fit what they take.

    Micro-batches of 2 and of 4 samples, not of 1, for which operators often take another way; and
    of up to three widths. Gradients are there meanwhile, as in mid-window, and the optimizer's
    state is foretold. Nothing of the model, its gradients, buffers and random states is changed.

    Args:
        model: on the meter's device.
        loss_fn: as in `Accumulator.step`.
        samples: the batch, of which a few samples are run.
        meter: of the device that the memory is planned on.
        optimizers: step together.
        limit: most bytes that a probe beyond the first may be predicted to take, what stays
            included.
        reduction: as in `Accumulator.step`.
        declared: whether the counts of several terms are known ahead; else each term beyond the
            first needs a sum of gradients of its own.
        timed: whether to run the micro-batches again for their time.
        whole: whether the samples are all that an update would have, so that a loss which counts
            nothing in them, or has no gradient, is refused.

    Raises:
        InputError: if `loss_fn` returns something else than a loss and its count, counts nothing
            in a whole batch, or there depends on no parameter of the model.
        RuntimeError: (`torch.OutOfMemoryError` on a device) if not even one sample fits.
    """
    before = meter.used(owned(model, optimizers))
    runner = _Runner(model, loss_fn, samples, meter, reduction)
    apparent = samples.apparent() if samples.lengths is None else None
    ladder = Ladder(len(samples), samples.lengths, apparent)
    runs: list[Run] = []
    seconds: list[float] = []
    with untouched(model) as writes:
        try:
            with writes:
                terms = runner.prepare(ladder.first)
        except Exception as error:
            if not is_shortage(error) or len(ladder.first.indices) == 1:
                raise
            ladder = Ladder(len(samples), samples.lengths, apparent, few=1)
            with writes:
                terms = runner.prepare(ladder.first)
        if whole and not runner.reached:
            raise unreached(model.parameters())
        ahead = foretell(optimizers, runner.having)
        gradients = runner.gradients * (1 if declared else terms)
        resident = _resident(model, optimizers, meter, before, gradients, ahead.state)

        def fits(count: int, width: int) -> bool:
            known = MemoryModel(fit_phases(runs, max(width, ladder.widest)), resident.total)
            return limit is None or known.fits(count, width, limit)

        for rung in ladder.rungs(fits):
            try:
                found = runner.measure(rung)
                took = runner.clock(rung) if timed else 0.0
            except Exception as error:
                if not runs or not is_shortage(error):
                    raise
                break  # what is known so far has to do
            runs.append(found)
            seconds.append(took)
        if whole and not runner.counted and runner.counts_nothing(len(ladder.first.indices)):
            raise no_terms(-(-len(samples) // len(ladder.first.indices)))
    memory = MemoryModel(fit_phases(runs, ladder.widest), resident.total, ahead.step)
    times = tuple(seconds) if timed else ()
    fitted = _fit_time(runs, seconds) if timed else None
    return Probed(memory, resident, tuple(runs), times, fitted, ahead.assumed)


class _Going(NamedTuple):
    parts: list[Part]
    following: object
    """The next batch, where it is on its way; held until this one is done."""


class _Runner:
    """Runs single micro-batches as a window in its middle does."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        samples: Samples,
        meter: Meter,
        reduction: str,
    ) -> None:
        self._model, self._loss_fn, self._samples = model, loss_fn, samples
        self._meter, self._reduction = meter, reduction
        self._ahead = lane_of(meter.device) is not None
        # On the CPU operators are looked at in any case.
        compiled = any(_is_compiled(module) for module in model.modules())
        self._marks = meter.device.type == "cpu" or not compiled
        self.having: list[nn.Parameter] = []
        """Parameters on the device that get a gradient; known once `prepare` has run."""
        self.gradients = 0
        """Bytes of these gradients."""
        self.reached = False
        """Whether some parameter of the model got a gradient; known once `prepare` has run."""
        self.counted = False
        """Whether some loss term was counted so far."""

    def prepare(self, rung: Rung) -> int:
        """Run the first one unmeasured, so that what is made once is there; returns its terms."""
        going = self._forward(rung)
        self._backward(going)
        self.reached = any(p.grad is not None for p in self._model.parameters())
        kind = self._meter.device.type
        self.having = [
            p for p in self._model.parameters() if p.grad is not None and p.device.type == kind
        ]
        self.gradients = fill(self.having)
        return len(going.parts)

    def measure(self, rung: Rung) -> Run:
        """Run one, and count its bytes."""
        fill(self.having)
        with self._meter.peak(marks=self._marks) as peak:
            going = self._forward(rung, peak.begin)
            peak.turn()
            self._backward(going)
            del going
        marks = tuple(peak.marks)
        if marks:
            # How a batch is cut out takes more operators for some widths than for others.
            marks = max(marks[: peak.begun], default=0), *marks[peak.begun :]
        turned = peak.turned - peak.begun + 1
        return Run(len(rung.indices), rung.width or 1, peak.bytes, marks, turned)

    def clock(self, rung: Rung) -> float:
        """Run one, quick ones twice for the faster time; seconds."""
        times: list[float] = []
        for _ in range(2):
            fill(self.having)
            _wait(self._meter.device)
            start = time.perf_counter()
            self._backward(self._forward(rung))
            _wait(self._meter.device)
            times.append(time.perf_counter() - start)
            if times[0] > _QUICK:
                break
        return min(times)

    def _forward(self, rung: Rung, begin: Callable[[], object] = lambda: None) -> _Going:
        batch = self._batch(rung)
        # Where the next batch travels while this one computes, it takes its place as well.
        following = self._batch(rung) if self._ahead else None
        begin()
        loss, count = read_result(self._loss_fn(self._model, batch), "probe")
        parts = read_parts(loss, count, self._reduction, lambda: "probe")
        self.counted = self.counted or any(bool(part.count) for part in parts)
        return _Going(parts, following)

    def counts_nothing(self, few: int) -> bool:
        """Whether no sample of the batch counts; the labels of those that ran may be ignored."""
        n, lengths = len(self._samples), self._samples.lengths
        for start in range(0, n, few):
            indices = list(range(start, min(start + few, n)))
            width = None if lengths is None else max(lengths[i] for i in indices)
            try:
                self._forward(Rung(indices, width))
            except Exception:  # noqa: BLE001 - it may not fit, or be too few samples: not known
                return False
            if self.counted:
                return False
        return True

    def _batch(self, rung: Rung) -> Any:
        return move(self._samples.microbatch(rung.indices, rung.width), self._meter.device)

    def _backward(self, going: _Going) -> None:
        # A window's seeds are other numbers of the same shape.
        torch.autograd.backward([part.loss for part in going.parts])


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or (
        module._compiled_call_impl is not None
    )


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _fit_time(runs: Sequence[Run], seconds: Sequence[float]) -> Phase:
    # In nanoseconds, because the fit takes whole numbers.
    phase = fit_phases(
        [Run(r.samples, r.width, int(s * 1e9)) for r, s in zip(runs, seconds, strict=True)]
    )[0]
    shared, each = ([c * 1e-9 for c in part] for part in (phase.shared, phase.each))
    return Phase((shared[0], shared[1], shared[2]), (each[0], each[1], each[2]))


def _resident(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    meter: Meter,
    before: int,
    gradients: int,
    foretold: int,
) -> Resident:
    kind = meter.device.type
    own = sum(storages([*model.parameters(), *model.buffers()], kind).values())
    state = sum(storages(state_tensors(optimizers), kind).values())
    return Resident(own, gradients, max(state, foretold), max(0, before - own - state))
