"""How the batch of a `step` is cut into micro-batches: by number, by length, or by memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from gradaccum.engine.loss import Number
from gradaccum.engine.memory.fit import device_of, nothing_ran
from gradaccum.engine.memory.probe import LossFunction, probe, read_limit
from gradaccum.engine.memory.resident import owned
from gradaccum.engine.memory.shortage import is_shortage
from gradaccum.engine.memory.sizes import bucket_of
from gradaccum.engine.refuse import read_budget
from gradaccum.planner.meter import meter_for
from gradaccum.planner.pack import plan
from gradaccum.planner.size import parse_size
from gradaccum.planner.split import Samples, even
from gradaccum.planner.within import even_within, plan_within
from gradaccum.records import MemoryModel, Plan

__all__ = ["Group", "Grouping", "Work"]

_FARTHER = 2
"""How many times longer than what was measured a sample may be before it is measured again."""

_LARGER = 1.02
"""The same where no lengths are known, by which what was measured could be carried on."""


class Group(NamedTuple):
    """Samples of one micro-batch."""

    indices: Sequence[int]
    width: int | None
    """Elements of its longest sample; `None` where no lengths were given."""
    padding: int


@dataclass(frozen=True, slots=True)
class Work:
    """One batch, and what is to be computed of it."""

    samples: Samples
    loss_fn: LossFunction
    reduction: str
    declared: dict[str, Number] | None
    """The counts, where they are known ahead."""


class Grouping:
    """Cuts batches; what it has measured serves the next ones too.

    Args:
        model: runs the micro-batches.
        optimizers: whose state stays in memory.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._measured: dict[int | None, tuple[MemoryModel, int]] = {}
        self._limits: dict[int | str, int] = {}

    def groups(
        self,
        work: Work,
        every: Callable[[], int],
        budget: int | None,
        memory: int | str | None,
    ) -> list[Group]:
        """The micro-batches of a batch, the largest first.

        Args:
            work: the batch.
            every: gives the number of micro-batches where nothing else bounds them.
            budget: most padded elements, or without lengths samples, in each.
            memory: most bytes at the peak.

        Raises:
            PlanError: if a sample alone is beyond the bound.
        """
        samples = work.samples
        lengths, most = samples.lengths, None
        if memory is not None:
            model, limit = self._memory(work, memory)
            if lengths is not None:
                return _planned(plan_within(lengths, model, limit, budget=budget))
            most = even_within(len(samples), model, limit)
        if budget is not None:
            if lengths is not None:
                return _planned(plan(lengths, budget=budget))
            most = max(-(-len(samples) // read_budget(budget)), most or 1)
        if most is None:
            most = every()
            if lengths is not None:
                return _planned(plan(lengths, microbatches=most))
        return [Group(indices, None, 0) for indices in even(len(samples), most)]

    def _memory(self, work: Work, memory: int | str) -> tuple[MemoryModel, int]:
        """What micro-batches take, and what they may: both measured once, and then kept."""
        meter = meter_for(device_of(self._model))
        size = parse_size(memory)
        if size not in self._limits:
            # Kept: what is free changes all the time, and the plan should not.
            self._limits[size] = read_limit(size, meter, owned(self._model, self._optimizers))
        limit, lengths = self._limits[size], work.samples.lengths
        key = None if lengths is not None else bucket_of(work.samples.elements)
        longest = max(lengths) if lengths is not None else work.samples.largest
        farther = _FARTHER if lengths is not None else _LARGER
        if key not in self._measured or longest > farther * self._measured[key][1]:
            try:
                found = probe(
                    self._model,
                    work.loss_fn,
                    work.samples,
                    meter=meter,
                    optimizers=self._optimizers,
                    limit=limit,
                    reduction=work.reduction,
                    declared=work.declared is not None,
                )
            except Exception as error:
                if not is_shortage(error):
                    raise
                raise nothing_ran(meter, limit, error) from error
            self._measured[key] = found.memory, longest
        return self._measured[key][0], limit


def _planned(chosen: Plan) -> list[Group]:
    return [Group(one.indices, one.width, one.padded - one.real) for one in chosen]
