"""Which samples form which micro-batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradaccum.errors import PlanError

__all__ = ["Plan", "PlannedMicrobatch"]

_PLAN_VERSION = 1
_ROWS_SHOWN = 24


@dataclass(frozen=True, slots=True)
class PlannedMicrobatch:
    """One micro-batch of a plan."""

    indices: tuple[int, ...]
    """Positions of its samples in the lengths that were planned, ascending."""

    width: int
    """Length of its longest sample, in elements: what the others are padded to."""

    real: int
    """Elements of its samples without padding: the sum of their lengths."""

    bytes: int | None = None
    """Peak that is predicted for it, in bytes, all that stays in memory included; None where the
    plan knows of no bytes."""

    @property
    def padded(self) -> int:
        """Its size in elements: samples times width."""
        return len(self.indices) * self.width


@dataclass(frozen=True, slots=True)
class Plan:
    """Which samples form which micro-batch; made by `gradaccum.plan`.

    An *element* is the unit of the lengths: a token, a frame, a pixel. `len(plan)` counts the
    micro-batches, iterating yields them, `print(plan)` shows them as a table.

    Examples:
        >>> import gradaccum as ga
        >>> plan = ga.plan([7, 100, 9, 90, 8], budget=200, overhead=10)
        >>> [micro.indices for micro in plan]
        [(1, 3), (0, 2, 4)]
        >>> plan.real, plan.padded, plan.padding
        (214, 227, 13)
        >>> ga.Plan.from_json(plan.to_json()) == plan
        True
    """

    microbatches: tuple[PlannedMicrobatch, ...]
    """In the order in which they are to run: largest first (by predicted bytes where there are
    any, else by padded size), so that if the first fits in memory, all do."""

    budget: int
    """Most padded elements that one micro-batch was allowed."""

    overhead: int
    """Price of one more micro-batch in the cost model, in padded elements."""

    memory: int | None = None
    """Most bytes that a micro-batch was allowed at its peak; None where none were set."""

    def __len__(self) -> int:
        return len(self.microbatches)

    def __iter__(self) -> Iterator[PlannedMicrobatch]:
        return iter(self.microbatches)

    @property
    def samples(self) -> int:
        """Samples in all micro-batches."""
        return sum(len(micro.indices) for micro in self.microbatches)

    @property
    def real(self) -> int:
        """Elements without padding: the sum of the lengths."""
        return sum(micro.real for micro in self.microbatches)

    @property
    def padded(self) -> int:
        """Elements with padding: what the model is given to compute."""
        return sum(micro.padded for micro in self.microbatches)

    @property
    def padding(self) -> int:
        """Elements that are padding only."""
        return self.padded - self.real

    @property
    def waste(self) -> float:
        """Padded elements for each real one; 1.0 is none wasted."""
        return self.padded / self.real

    @property
    def largest(self) -> int:
        """Padded elements of the largest micro-batch, which decides the memory."""
        return max(micro.padded for micro in self.microbatches)

    @property
    def cost(self) -> int:
        """What the plan minimises: padded elements, and `overhead` for each micro-batch."""
        return self.padded + self.overhead * len(self)

    def __str__(self) -> str:
        sized = self.memory is not None
        limit = f", memory {self.memory:,} bytes" if sized else ""
        lines = [
            f"{self.samples:,} samples in {len(self):,} micro-batches: {self.real:,} elements, "
            f"{self.padded:,} padded ({self.waste:.2f} of the real)",
            f"budget {self.budget:,}, overhead {self.overhead:,} for each micro-batch{limit}",
            "",
            f"{'#':>6}{'samples':>10}{'width':>10}{'padded':>12}{'padding':>12}"
            + (f"{'bytes':>18}" if sized else ""),
        ]
        for row, micro in enumerate(self.microbatches[:_ROWS_SHOWN]):
            lines.append(
                f"{row:>6,}{len(micro.indices):>10,}{micro.width:>10,}"
                f"{micro.padded:>12,}{micro.padded - micro.real:>12,}"
                + (f"{micro.bytes or 0:>18,}" if sized else "")
            )
        hidden = len(self) - _ROWS_SHOWN
        return "\n".join([*lines, f"       ... and {hidden:,} more"] if hidden > 0 else lines)

    def to_json(self) -> str:
        """The plan as a JSON object, with its totals for readers that are not Python."""
        memory = {} if self.memory is None else {"memory": self.memory}
        return json.dumps(
            {
                "version": _PLAN_VERSION,
                "budget": self.budget,
                "overhead": self.overhead,
                **memory,
                "samples": self.samples,
                "real": self.real,
                "padded": self.padded,
                "waste": self.waste,
                "microbatches": [
                    {"indices": micro.indices, "width": micro.width, "real": micro.real}
                    | ({} if micro.bytes is None else {"bytes": micro.bytes})
                    for micro in self.microbatches
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            PlanError: if the text is not a plan, or one of another version.
        """
        try:
            found = json.loads(text)
            if found["version"] != _PLAN_VERSION:
                raise ValueError(f"version {found['version']}")
            microbatches = tuple(_microbatch(item) for item in found["microbatches"])
            if not microbatches:
                raise ValueError("no micro-batches")
            memory = _whole(found["memory"]) if "memory" in found else None
            plan = cls(microbatches, _whole(found["budget"]), _whole(found["overhead"]), memory)
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(
                "plan-json",
                "The text is not a plan that this version can read.",
                got=f"{type(error).__name__}: {error}",
                expected=f"what `plan.to_json()` writes, version {_PLAN_VERSION}",
                do="make the plan again: gradaccum.plan(lengths, budget=...)",
            ) from None
        return plan


def _microbatch(item: Mapping[str, Any]) -> PlannedMicrobatch:
    indices = tuple(_whole(index) for index in item["indices"])
    size = _whole(item["bytes"]) if "bytes" in item else None
    return PlannedMicrobatch(indices, _whole(item["width"]), _whole(item["real"]), size)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value
