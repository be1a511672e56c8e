"""The loop that a user writes: one micro-batch after another, with one batch of look-ahead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

from torch import Tensor

from gradaccum.engine.loss import Count, Loss, Number, read_count, read_parts
from gradaccum.errors import InputError, LoopError, OpenWindowWarning
from gradaccum.planner.pack import plan
from gradaccum.planner.split import Samples
from gradaccum.records import Update

if TYPE_CHECKING:
    from gradaccum.engine.accumulator import Accumulator

__all__ = [
    "Coming",
    "Microbatch",
    "ahead",
    "counted",
    "drive",
    "read_counts",
    "regrouped",
    "windows",
]

T = TypeVar("T")


class Microbatch(Generic[T]):
    """One micro-batch of a loop: its batch, and the way its loss enters the window."""

    __slots__ = ("_accumulator", "_padding", "_state", "batch", "index", "last", "size", "update")

    def __init__(
        self, accumulator: Accumulator, batch: T, index: int, size: int, last: bool, padding: int
    ) -> None:
        self._accumulator = accumulator
        self._padding = padding
        self._state: Literal["open", "spent", "void"] = "open"
        self.batch = batch
        """What the loader gave, or the samples that were grouped."""
        self.index = index
        """Position in its window, from 0."""
        self.size = size
        """Micro-batches that the window was opened for; a tail ends before."""
        self.last = last
        """Whether its backward makes the update."""
        self.update: Update | None = None
        """The update that its backward made; `None` inside a window."""

    def backward(
        self,
        loss: Loss,
        count: Count | None = None,
        *,
        reduction: Literal["sum", "mean"] = "sum",
        retain_graph: bool = False,
    ) -> None:
        """Add this micro-batch's gradient to the window; the window's last one makes the update.

        Args:
            loss: the sum of the loss terms, shape `()`; or `{name: (sum, count)}` for several
                terms, each divided by its own total.
            count: how many terms are in `loss` (tokens, pixels, samples): a number, or a tensor of
                shape `()`. One on a device is never read, so it costs no wait.
            reduction: `"mean"` if `loss` is the mean of its terms, as most criteria return.
            retain_graph: keep the graph for another backward of your own.

        Raises:
            InputError: if the loss or the count cannot be meant; the window is as it was.
            LoopError: if this micro-batch was spent, or its loop is over.
            InterferenceError: if somebody else changed gradients or parameters in mid-window.
            StaleGradientError: if a gradient stood there before the window's first micro-batch.
        """
        if self._state != "open" or self._accumulator._current is not self:
            raise self._refusal()
        parts = read_parts(loss, count, reduction, self._where)
        self.update = self._accumulator._core.add(
            parts, last=self.last, padding=self._padding, retain_graph=retain_graph
        )
        self._state = "spent"
        if self.update is not None:
            self._accumulator._core.announce(self.update)

    def skip(self) -> None:
        """Leave this micro-batch out; if it is the window's last, the others are stepped."""
        if self._state == "void":
            return  # its window is gone, so it is left out already
        if self._state != "open" or self._accumulator._current is not self:
            raise self._refusal()
        self._state = "spent"
        self.update = self._accumulator._skip(self.last)
        self._accumulator._core.announce(self.update)

    def void(self) -> None:
        """Its window is gone before its backward came."""
        if self._state == "open":
            self._state = "void"

    def __repr__(self) -> str:
        return f"Microbatch({self.index + 1} of {self.size}, last={self.last})"

    def _where(self) -> str:
        return f"micro-batch {self.index + 1} of {self.size}"

    def _refusal(self) -> LoopError:
        if self._state == "spent":
            return LoopError(
                "backward-twice",
                f"{self._where()}: backward was called twice, so its samples would count twice.",
                got="a micro-batch that is spent",
                expected="one backward (or one skip) for each micro-batch",
                do='add the losses and call it once, or pass {"a": (a, n), "b": (b, m)}',
            )
        return LoopError(
            "loop-over",
            f"{self._where()}: its loop has gone on or ended, or its window was flushed or "
            "discarded.",
            got="a micro-batch whose time is over",
            expected="backward inside the loop's body, before the next micro-batch",
            do="take a new one from acc.microbatches(loader)",
        )


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


def drive(
    accumulator: Accumulator, coming: Iterator[Coming[T]]
) -> Generator[Microbatch[T], None, None]:
    """Yield micro-batches, hold the loop to one backward each, and say if a window stays open."""
    micro: Microbatch[T] | None = None
    try:
        for item in coming:
            window = accumulator._core.window or accumulator._window_for(item)
            index = window.microbatches + window.dropped
            last = item.last or index + 1 >= window.expected
            micro = Microbatch(accumulator, item.batch, index, window.expected, last, item.padding)
            accumulator._current = micro
            yield micro
            if micro._state == "open" or accumulator._current is not micro:
                _refuse_left(accumulator, micro)
    finally:
        accumulator._loop_left(micro)
        window = accumulator._core.window
        if window is not None and window.microbatches:
            warnings.warn(
                f"The loop was left with a window half done: {window.microbatches} of "
                f"{window.expected} micro-batches. Its gradients are kept: "
                f"{'' if window.gathered else 'the next loop goes on with it, '}"
                "acc.flush() steps it, acc.discard() drops it. "
                "More: docs/messages.md#open-window",
                OpenWindowWarning,
                stacklevel=3,
            )


def _refuse_left(accumulator: Accumulator, micro: Microbatch[T]) -> NoReturn:
    if accumulator._current is not micro:
        raise LoopError(
            "loop-over",
            "Another loop over this accumulator began inside this one.",
            got="two loops that are not done",
            expected="one loop at a time for each accumulator",
            do="give each loss its own Accumulator, or end one loop before the next",
        )
    raise LoopError(
        "backward-never",
        f"{micro._where()} was left without a backward.",
        got="neither micro.backward nor micro.skip, and the loop went on",
        expected="one micro.backward(loss, count) for each micro-batch",
        do="micro.skip() leaves a micro-batch out",
    )


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
