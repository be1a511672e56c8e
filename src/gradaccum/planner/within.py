"""Plans whose micro-batches are bounded by something else than their padded size: by bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import SupportsIndex

from gradaccum.errors import PlanError
from gradaccum.planner.lengths import checked_lengths, whole_number
from gradaccum.planner.optimum import cut_within
from gradaccum.planner.pack import default_overhead, grouped
from gradaccum.records import MemoryModel, Plan
from gradaccum.records.fit import show_bytes

__all__ = ["even_within", "plan_within", "rooms"]


def plan_within(
    lengths: Iterable[SupportsIndex],
    model: MemoryModel,
    limit: int,
    *,
    budget: int | None = None,
    microbatches: int | None = None,
    overhead: int | None = None,
) -> Plan:
    """Group samples by length into micro-batches of least padded work, none over `limit` bytes.

    As `gradaccum.plan`, but what a micro-batch may hold is what the model predicts for its samples
    and its width, which may grow with the square of the width. Exact, in O(n log n).

    Args:
        lengths: size of each sample without padding, in elements.
        model: predicts the peak of a micro-batch.
        limit: most bytes at that peak, all that stays in memory included.
        budget: most padded elements in a micro-batch, beside the bytes.
        microbatches: most micro-batches.
        overhead: price of one more micro-batch, in padded elements; as in `gradaccum.plan`.

    Returns:
        The micro-batches with their predicted bytes, the most expensive first.

    Raises:
        PlanError: if a sample alone is predicted to take more, or the optimizer's step does.

    Examples:
        >>> from gradaccum.records import MemoryModel, Phase
        >>> model = MemoryModel((Phase((0, 0, 0), (0, 100, 1)),), resident=0)
        >>> [micro.indices for micro in plan_within([10, 100, 10, 100, 10], model, 20_000)]
        [(1,), (3,), (0, 2, 4)]
    """
    sizes = checked_lengths(lengths)
    most = len(sizes)
    if microbatches is not None:
        most = whole_number("microbatches", microbatches, least=1)
    padded = None if budget is None else whole_number("budget", budget, least=1)
    _refuse_floor(model, limit)

    def fits(samples: int, width: int) -> bool:
        small = padded is None or samples * width <= padded
        return small and model.fits(samples, width, limit)

    order = sorted(range(len(sizes)), key=lambda position: -sizes[position])
    descending = [sizes[position] for position in order]
    room = rooms(descending, fits)
    if room[0] == 0:
        raise _too_large(sizes, order, room, model, limit, padded)
    largest = max(n * size for n, size in zip(room, descending, strict=True))
    price = (
        default_overhead(largest)
        if overhead is None
        else whole_number("overhead", overhead, least=0)
    )
    bounds = cut_within(descending, room, price, most)
    if len(bounds) - 1 > most:
        raise PlanError(
            "plan-too-few",
            f"{len(sizes)} samples do not fit in {most} micro-batch{'es' if most > 1 else ''} of "
            f"{show_bytes(limit)}.",
            got=f"microbatches={most}, memory of {limit:,} bytes",
            expected=f"microbatches >= {len(bounds) - 1} with this memory",
            do=f"microbatches={len(bounds) - 1}, or more memory",
        )
    found = [
        replace(micro, bytes=model.bytes(len(micro.indices), micro.width))
        for micro in grouped(sizes, order, bounds)
    ]
    found.sort(key=lambda micro: (-(micro.bytes or 0), -micro.padded, micro.indices))
    return Plan(tuple(found), budget=largest, overhead=price, memory=limit)


def even_within(samples: int, model: MemoryModel, limit: int) -> int:
    """Fewest micro-batches of near-equal numbers of samples that stay within `limit` bytes.

    Raises:
        PlanError: if a sample alone is predicted to take more, or the optimizer's step does.

    Examples:
        >>> from gradaccum.records import MemoryModel, Phase
        >>> even_within(64, MemoryModel((Phase((0, 0, 0), (100, 0, 0)),), resident=50), 1000)
        8
    """
    _refuse_floor(model, limit)
    most = model.most(limit)
    if most == 0:
        raise _too_large([1], [0], [0], model, limit, None)
    return -(-samples // most)


def rooms(descending: Sequence[int], fits: Callable[[int, int], bool]) -> list[int]:
    """For each length, the most samples of that width that fit; at most as many as there are.

    Args:
        descending: lengths, the longest first.
        fits: `fits(samples, width)`; what holds for a micro-batch has to hold for any with fewer
            samples, or narrower ones.

    Examples:
        >>> rooms([4, 4, 2, 1], lambda samples, width: samples * width <= 5)
        [1, 1, 2, 4]
    """
    n = len(descending)
    found: list[int] = []
    width, room = 0, 0
    for length in descending:
        if length != width:
            # A shorter one has at least as much room, and often about as much: gallop from there.
            width, step = length, 1
            while room < n and fits(min(room + step, n), width):
                room, step = min(room + step, n), 2 * step
            above = min(room + step, n + 1)
            while above - room > 1:
                middle = (room + above) // 2
                if fits(middle, width):
                    room = middle
                else:
                    above = middle
        found.append(room)
    return found


def _refuse_floor(model: MemoryModel, limit: int) -> None:
    if model.floor > limit:
        least = max(model.bytes(1), model.floor)
        raise PlanError(
            "memory-floor",
            "The model, its gradients and its optimizer alone take more than the memory given.",
            got=f"{show_bytes(model.resident)} that stay, {show_bytes(model.step)} more while the "
            f"optimizer steps; memory of {show_bytes(limit)} ({limit:,} bytes)",
            expected=f"at least {model.floor:,} bytes, and room for a sample beside what stays",
            do=f"memory={least} or more; or an optimizer with less state",
        )


def _too_large(
    sizes: Sequence[int],
    order: Sequence[int],
    room: Sequence[int],
    model: MemoryModel,
    limit: int,
    padded: int | None,
) -> PlanError:
    over = sorted(order[place] for place in range(len(order)) if room[place] == 0)
    longest = max(sizes)
    others = f", and {len(over) - 1} more" if len(over) > 1 else ""
    if padded is not None and longest > padded:
        least = f"budget >= {longest}"
    else:
        least = f"memory >= {model.bytes(1, longest):,} bytes, for the longest alone"
    length = f" of length {sizes[over[0]]:,}" if longest > 1 else ""
    needs = model.bytes(1, sizes[over[0]])
    return PlanError(
        "memory-sample",
        f"A single sample{length} does not fit in the memory given.",
        got=f"sample {over[0]}{others}: {needs:,} bytes are predicted ({show_bytes(needs)}, of "
        f"which {show_bytes(model.resident)} stay), memory of {limit:,} bytes "
        f"({show_bytes(limit)})",
        expected=least,
        do="cut that sample, give more memory, or checkpoint activations (torch.utils.checkpoint)",
    )
