"""Which samples form which micro-batch: integers in, a `Plan` out, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import SupportsIndex

from gradaccum.errors import PlanError
from gradaccum.planner.lengths import checked_lengths, whole_number
from gradaccum.planner.optimum import cut_within
from gradaccum.records import Plan, PlannedMicrobatch

__all__ = ["default_overhead", "grouped", "plan"]

_LEAST_OVERHEAD = 128
_OVERHEADS_IN_A_BUDGET = 64


def default_overhead(budget: int) -> int:
    """Price of one more micro-batch where none is given: a 64th of the budget, at least 128.

    A budget is what keeps a device busy, so its share follows the device and the unit of the
    lengths; below it stands what one forward and backward of a small transformer costs on a CPU.

    Examples:
        >>> default_overhead(8 * 1024), default_overhead(64 * 1024)
        (128, 1024)
    """
    return max(_LEAST_OVERHEAD, budget // _OVERHEADS_IN_A_BUDGET)


def plan(
    lengths: Iterable[SupportsIndex],
    *,
    budget: int | None = None,
    microbatches: int | None = None,
    overhead: int | None = None,
) -> Plan:
    """Group samples by length into micro-batches of least padded work.

    A micro-batch costs its samples times its longest one, which is what the others are padded to,
    plus `overhead`. Of all ways to group the samples, with none over the budget, the plan is one
    whose sum of costs is least: the exact optimum, in O(n log n). The same input gives the same
    plan, and the order of the samples changes only which of equal length goes where.

    Args:
        lengths: size of each sample without padding, in elements (tokens, frames, ...): ints of
            at least 1, or a tensor or array of one dimension.
        budget: most padded elements in one micro-batch. Without it, what the longest micro-batch
            of an even split into `microbatches` could take: `ceil(n / microbatches) * longest`.
        microbatches: most micro-batches.
        overhead: price of one more micro-batch, in padded elements: what the fixed part of a
            forward and backward costs, as the number of elements computed in that time. By
            default a 64th of the budget, and at least 128.

    Returns:
        The micro-batches, largest padded size first.

    Raises:
        PlanError: if a length is not a whole number of at least 1, a sample is longer than the
            budget, neither `budget` nor `microbatches` is given, or they cannot be met together.

    Examples:
        >>> import gradaccum as ga
        >>> print(ga.plan([30, 500, 40, 480, 20], budget=1024))
        5 samples in 2 micro-batches: 1,070 elements, 1,120 padded (1.05 of the real)
        budget 1,024, overhead 128 for each micro-batch
        <BLANKLINE>
             #   samples     width      padded     padding
             0         2       500       1,000          20
             1         3        40         120          30
    """
    sizes = checked_lengths(lengths)
    most = len(sizes)
    if microbatches is not None:
        most = whole_number("microbatches", microbatches, least=1)
    elif budget is None:
        raise _unbounded(sizes)
    limit = _even_size(sizes, most) if budget is None else whole_number("budget", budget, least=1)
    price = (
        default_overhead(limit) if overhead is None else whole_number("overhead", overhead, least=0)
    )
    _check_fit(sizes, limit)
    order = sorted(range(len(sizes)), key=lambda position: -sizes[position])
    descending = [sizes[position] for position in order]
    bounds = cut_within(descending, [limit // size for size in descending], price, most)
    if len(bounds) - 1 > most:
        raise _too_few(sizes, limit, most, least=len(bounds) - 1)
    return Plan(tuple(grouped(sizes, order, bounds)), budget=limit, overhead=price)


def _even_size(sizes: Sequence[int], groups: int) -> int:
    return -(-len(sizes) // groups) * max(sizes)


def _check_fit(sizes: Sequence[int], budget: int) -> None:
    over = [position for position, size in enumerate(sizes) if size > budget]
    if over:
        first = over[0]
        others = f", and {len(over) - 1} more" if len(over) > 1 else ""
        raise PlanError(
            "plan-over-budget",
            f"Sample {first} alone is larger than the budget of {budget} elements.",
            got=f"lengths[{first}] = {sizes[first]}{others}; the longest has {max(sizes)}",
            expected=f"every length <= budget = {budget}",
            do=f"cut the samples to {budget}, or set budget={max(sizes)} or more",
        )


def grouped(
    sizes: Sequence[int], order: Sequence[int], bounds: Sequence[int]
) -> list[PlannedMicrobatch]:
    """Groups of positions as micro-batches, largest padded size first.

    Args:
        sizes: length of each sample.
        order: positions of the samples, longest first.
        bounds: where in `order` each group begins, and its end.
    """
    found = []
    for start, end in pairwise(bounds):
        members = order[start:end]
        real = sum(sizes[position] for position in members)
        # Ascending positions: samples that stand side by side are then taken as a view.
        found.append(PlannedMicrobatch(tuple(sorted(members)), sizes[members[0]], real))
    return sorted(found, key=lambda micro: (-micro.padded, micro.indices))


def _unbounded(sizes: Sequence[int]) -> PlanError:
    return PlanError(
        "plan-argument",
        "A plan needs to know how large a micro-batch may be, or how many there may be.",
        got="neither `budget` nor `microbatches`",
        expected="one of them, or both",
        do=f"plan(lengths, budget={8 * max(sizes)})",
    )


def _too_few(sizes: Sequence[int], budget: int, most: int, *, least: int) -> PlanError:
    return PlanError(
        "plan-too-few",
        f"{len(sizes)} samples do not fit in {most} micro-batch{'es' if most > 1 else ''} of "
        f"{budget} elements.",
        got=f"microbatches={most}, budget={budget}",
        expected=f"microbatches >= {least} with this budget",
        do=f"plan(lengths, budget={budget}, microbatches={least}), or a larger budget",
    )
