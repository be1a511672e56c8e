"""From a loader's batches to the micro-batches of a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from gradaccum.engine.loss import Number, read_count
from gradaccum.errors import InputError, LoopError
from gradaccum.planner.pack import plan
from gradaccum.planner.split import Samples

__all__ = ["Coming", "ahead", "counted", "read_counts", "regrouped", "windows"]

T = TypeVar("T")


@dataclass(slots=True)
class Coming(Generic[T]):
    """A micro-batch on its way to the loop."""

    batch: T
    last: bool
    """Whether it must end its window, because nothing follows or its plan is done."""
    padding: int = 0
    position: int | None = None
    """Position in its window, where the window's batches were gathered first; else `None`."""
    size: int = 0
    """Micro-batches of a gathered window."""
    declared: dict[str, Number] | None = None
    """A gathered window's counts, where they are known ahead."""


def ahead(
    loader: Iterable[T], closes: Callable[[], bool], fetched: Callable[[bool, bool], None]
) -> Iterator[tuple[T, bool]]:
    """Each batch with whether it is the last, known by fetching one ahead where that decides.

    A window's last place needs to know nothing of what follows: the next batch is fetched after
    its update, so a loader may make batches with the parameters of the moment.

    Args:
        loader: any iterable, with or without a length.
        closes: whether the batch at hand fills its window.
        fetched: told of each fetch, with whether there was a batch, and whether it is held ahead.
    """
    iterator = iter(loader)
    held: list[T] = []
    while True:
        if not held:
            try:
                held.append(next(iterator))
            except StopIteration:
                fetched(False, False)
                return
            fetched(True, False)
        batch = held.pop()
        if closes():
            yield batch, True
            continue
        late: Exception | None = None
        versions = _versions(batch)
        try:
            held.append(next(iterator))
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - the batch at hand is whole: give it out first
            late = error
        if _versions(batch) != versions:
            raise _overwritten()
        fetched(bool(held), bool(held))
        yield batch, not held and late is None
        if late is not None:
            raise late
        if not held:
            return


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
        versions.append(_versions(batch))
        if len(group) >= size():
            if [_versions(one) for one in group] != versions:
                raise _overwritten()
            yield group
            group, versions = [], []
    if group:
        yield group


def _versions(batch: object) -> list[int]:
    """Version counters of the tensors in a batch, as far as they lie open."""
    leaves: Iterable[object] = (batch,)
    if isinstance(batch, Mapping):
        leaves = batch.values()
    elif isinstance(batch, tuple | list):
        leaves = batch
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def _overwritten() -> LoopError:
    return LoopError(
        "batch-overwritten",
        "The loader writes every batch into the same memory, so fetching one ahead changed the "
        "batch at hand.",
        got="a batch that was changed in place by the loader's next one",
        expected="a new batch each time",
        do="acc.microbatches(batch.clone() for batch in loader)",
    )


def counted(groups: Iterator[list[T]], counts: Callable[[T], object]) -> Iterator[Coming[T]]:
    """Each of a window's batches is a micro-batch, and its counts are known ahead."""
    for group in groups:
        declared = read_counts([counts(batch) for batch in group])
        for i, batch in enumerate(group):
            yield Coming(batch, i + 1 == len(group), 0, i, len(group), declared)


def regrouped(
    groups: Iterator[list[Any]],
    samples_of: Callable[[list[Any]], Samples],
    budget: int,
    counts: Callable[[Any], object] | None,
) -> Iterator[Coming[Any]]:
    """A window's samples are regrouped by length into the micro-batches of a plan."""
    for group in groups:
        samples = samples_of(group)
        assert samples.lengths is not None
        chosen = plan(samples.lengths, budget=budget)
        declared = read_counts([counts(batch) for batch in group]) if counts else None
        for i, one in enumerate(chosen.microbatches):
            batch = samples.microbatch(one.indices, one.width)
            last = i + 1 == len(chosen)
            yield Coming(batch, last, one.padded - one.real, i, len(chosen), declared)


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
