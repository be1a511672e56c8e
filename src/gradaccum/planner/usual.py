"""The loop that plans are compared with: random micro-batches, padded to their longest."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gradaccum.planner.lengths import whole_number
from gradaccum.records import Plan

__all__ = ["UsualLoop", "compare_json", "compare_text", "usual_loop"]

_SHUFFLES = 20


@dataclass(frozen=True, slots=True)
class UsualLoop:
    """What the usual loop pads the same samples to."""

    size: int
    """Samples in a micro-batch; the last one may have fewer."""

    padded: float
    """Elements with padding, the mean over the shuffles."""

    waste: float
    """Padded elements for each real one; 1.0 is none wasted."""

    shuffles: int
    """Random orders that were tried; always the same ones."""


def usual_loop(lengths: Sequence[int], size: int) -> UsualLoop:
    """Padding of micro-batches of `size` samples in random order, each padded to its longest.

    Raises:
        PlanError: if `size` is not a whole number of at least 1.

    Examples:
        >>> usual_loop([5, 5, 5, 5], 2).waste
        1.0
    """
    size = whole_number("size", size, least=1)
    generator = random.Random(0)
    order, total = list(lengths), 0
    for _ in range(_SHUFFLES):
        generator.shuffle(order)
        groups = (order[start : start + size] for start in range(0, len(order), size))
        total += sum(len(group) * max(group) for group in groups)
    padded = total / _SHUFFLES
    return UsualLoop(size, padded, padded / sum(lengths), _SHUFFLES)


def compare_text(plan: Plan, usual: UsualLoop) -> str:
    """The plan as a table, and beneath it what the usual loop would pad."""
    return (
        f"{plan}\n\n"
        f"The usual loop, {usual.size:,} samples in random order padded to their longest: "
        f"{usual.padded:,.0f} padded ({usual.waste:.2f} of the real,\n"
        f"mean of {usual.shuffles} shuffles). "
        f"The plan computes {plan.padded / usual.padded:.2f} of that."
    )


def compare_json(plan: Plan, usual: UsualLoop) -> str:
    """`plan.to_json()` with one more entry, `usual`; `Plan.from_json` reads it."""
    return json.dumps({**json.loads(plan.to_json()), "usual": asdict(usual)})
