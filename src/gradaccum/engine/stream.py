"""From a loader's batches to the micro-batches of a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from gradaccum.engine.loss import Number, read_count
from gradaccum.errors import InputError, LoopError
from gradaccum.planner.pack import plan
from gradaccum.planner.split import Samples

__all__ = [
    "Coming",
    "Place",
    "counted",
    "overwritten",
    "read_counts",
    "regrouped",
    "versions_of",
    "windows",
]

T = TypeVar("T")


class Place(NamedTuple):
    """Where a micro-batch stands in a window whose batches were gathered first."""

    position: int
    """Position in its window, from 0."""

    size: int
    """Micro-batches of the window."""

    declared: dict[str, Number] | None
    """The window's counts, where they are known ahead."""

    contents: tuple[int | float, ...]
    """The lengths of the window's samples, or the counts of its batches: what tells it from
    others."""


Coming: TypeAlias = tuple[Any, bool, int, Place | None]
"""A micro-batch on its way to the loop: its batch, whether it must end its window because nothing
follows or its plan is done, its padded elements, and its place in a gathered window."""


def windows(loader: Iterable[T], size: Callable[[], int]) -> Iterator[list[T]]:
    """Gather as many batches as a window takes; the last group may be short."""
    iterator = iter(loader)
    group: list[T] = []
    versions: list[list[int]] = []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except Exception:
            if group:  # the loader failed; what it gave before is whole
                yield group
            raise
        group.append(batch)
        versions.append(versions_of(batch))
        if len(group) >= size():
            if [versions_of(one) for one in group] != versions:
                raise overwritten()
            yield group
            group, versions = [], []
    if group:
        yield group


def versions_of(batch: object) -> list[int]:
    """Version counters of the tensors in a batch, as far as they lie open."""
    leaves: Iterable[object] = (batch,)
    if isinstance(batch, Mapping):
        leaves = batch.values()
    elif isinstance(batch, tuple | list):
        leaves = batch
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def overwritten() -> LoopError:
    """What to raise where a fetch changed the batch at hand."""
    return LoopError(
        "batch-overwritten",
        "The loader writes every batch into the same memory, so fetching one ahead changed the "
        "batch at hand.",
        got="a batch that was changed in place by the loader's next one",
        expected="a new batch each time",
        do="acc.microbatches(batch.clone() for batch in loader)",
    )


def counted(groups: Iterator[list[T]], counts: Callable[[T], object]) -> Iterator[Coming]:
    """Each of a window's batches is a micro-batch, and its counts are known ahead."""
    for group in groups:
        each = [read_counts([counts(batch)]) for batch in group]
        declared = read_counts(each)
        contents = tuple(number for one in each for number in one.values())
        for i, batch in enumerate(group):
            yield batch, i + 1 == len(group), 0, Place(i, len(group), declared, contents)


def regrouped(
    groups: Iterator[list[Any]],
    samples_of: Callable[[list[Any]], Samples],
    budget: int,
    counts: Callable[[Any], object] | None,
) -> Iterator[Coming]:
    """A window's samples are regrouped by length into the micro-batches of a plan."""
    for group in groups:
        samples = samples_of(group)
        assert samples.lengths is not None
        chosen = plan(samples.lengths, budget=budget)
        declared = read_counts([counts(batch) for batch in group]) if counts else None
        for i, one in enumerate(chosen.microbatches):
            batch = samples.microbatch(one.indices, one.width)
            place = Place(i, len(chosen), declared, samples.lengths)
            yield batch, i + 1 == len(chosen), one.padded - one.real, place


def read_counts(counts: list[Any]) -> dict[str, Number]:
    """Add counts that were given ahead: numbers, or `{name: number}`."""
    total: dict[str, Number] = {}
    for i, one in enumerate(counts):
        named = one if isinstance(one, dict) else {"": one}
        for name, count in named.items():
            number = read_count(count, f"`counts` of batch {i}")
            if not isinstance(number, int | float):
                raise InputError(
                    "count",
                    "A count that is known ahead must be known to the host.",
                    got=f"a tensor on {number.device}",
                    expected="a number, or a tensor on the CPU",
                    do="count on the batch before it is moved to the device",
                )
            total[name] = total.get(name, 0) + number
    return total
