"""The loop that a user writes, held to one backward for each micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from gradaccum.engine import state as states
from gradaccum.engine.core import Core, Rejected
from gradaccum.engine.loss import Count, Loss, read_parts
from gradaccum.engine.memory.shortage import first_line, is_shortage, kind_of
from gradaccum.engine.memory.transaction import Snapshot, Snapshots
from gradaccum.engine.stream import Coming, Place, overwritten, versions_of, windows
from gradaccum.engine.window import Window
from gradaccum.errors import (
    GradaccumError,
    LoopError,
    OpenWindowWarning,
    ShortageError,
    StateError,
)
from gradaccum.records import Update

__all__ = ["Loop", "Microbatch"]

T = TypeVar("T")

Stage: TypeAlias = Literal["idle", "between", "ahead"]
"""Where a loop stands in its loader: done, between two fetches, or with a batch fetched ahead."""

Gathering: TypeAlias = Callable[[Iterator[list[Any]]], Iterator[Coming]]
"""Makes a window's micro-batches of all its batches."""


class Microbatch(Generic[T]):
    """One micro-batch of a loop: its batch, and the way its loss enters the window."""

    __slots__ = (
        "_loop",
        "_padding",
        "_state",
        "batch",
        "failed",
        "index",
        "last",
        "size",
        "update",
    )

    def __init__(
        self, loop: Loop, batch: T, index: int, size: int, last: bool, padding: int
    ) -> None:
        self._loop = loop
        self._padding = padding
        self._state: Literal["open", "spent", "void"] = "open"
        self.failed = False
        """Whether its backward raised; another one, of a new loss, may be tried."""
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
            reduction: `"mean"` if `loss` is the mean of its terms, as most criteria return. The
                mean of no terms is NaN: it is left out where the host knows the count; where only
                a device does, a sum is safe and a mean is not.
            retain_graph: keep the graph for another backward of your own.

        Raises:
            InputError: if the loss or the count cannot be meant; the window is as it was.
            LoopError: if this micro-batch was spent, or its loop is over.
            InterferenceError: if somebody else changed gradients or parameters in mid-window.
            StaleGradientError: if a gradient stood there before the window's first micro-batch.
        """
        if self._state != "open" or self._loop.current is not self:
            raise self._refusal()
        parts = read_parts(loss, count, reduction, self._where)
        try:
            self.update = self._loop.core.add(
                parts, last=self.last, padding=self._padding, retain_graph=retain_graph
            )
        except Rejected:
            self._loop.take_back()
            self.update = self._loop.core.drop(self.last)
        except Exception as error:
            self.failed = not isinstance(error, GradaccumError)
            lost = self._loop.begin_again()
            if not is_shortage(error):
                raise
            short = self._shortage(error, lost)
            self._loop.core.gradients.ran_short()
            raise short from error
        self._state = "spent"
        if self.update is not None:
            self._loop.core.announce(self.update)

    def skip(self) -> None:
        """Leave this micro-batch out; if it is the window's last, the others are stepped."""
        if self._state == "void":
            return  # its window is gone, so it is left out already
        if self._state != "open" or self._loop.current is not self:
            raise self._refusal()
        if self._loop.restores:
            self._loop.take_back()
        self.update = self._loop.core.skip(self.last)
        self._state = "spent"
        self._loop.core.announce(self.update)

    def void(self) -> None:
        """Its window is gone before its backward came."""
        if self._state == "open":
            self._state = "void"

    def __repr__(self) -> str:
        return f"Microbatch({self.index + 1} of {self.size}, last={self.last})"

    def _where(self) -> str:
        return f"micro-batch {self.index + 1} of {self.size}"

    def _shortage(self, error: BaseException, lost: str | None) -> ShortageError:
        window = self._loop.core.window
        if window is None or window.broken:
            return kind_of(error)(
                "memory-microbatch",
                f"Memory ran out in the backward of {self._where()}, and some of its gradients "
                "had been added already.",
                got=f"{first_line(error)}; the window is broken",
                expected="room for this micro-batch; a loop of your own decides its size",
                do="acc.discard() drops the window; " + self._loop.prevention(),
            )
        kept = (
            "buffers and random states are what they were before its forward"
            if self._loop.restores and lost is None
            else f"the large buffer `{lost}` is as its forward left it"
            if lost is not None
            else "what its forward changed, buffers and random states, is yours to put back"
        )
        return kind_of(error)(
            "memory-microbatch",
            f"Memory ran out in the backward of {self._where()}. The window is as it was before "
            "it.",
            got=f"{first_line(error)}; {window.microbatches} micro-batches are in the window, "
            f"gradients and counts are theirs; {kept}",
            expected="room for this micro-batch; a loop of your own decides its size",
            do="micro.skip() leaves it out, and micro.backward may be tried again with a new loss; "
            "acc.step(batch, loss_fn) splits what does not fit",
        )

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


class Loop:
    """Loops over one core's windows, one at a time, and where they stand in their loader.

    Args:
        core: takes the micro-batches.
        every: gives the number of micro-batches of the next window.
        snapshots: of the model, taken before each micro-batch where bad ones are dropped.
    """

    def __init__(self, core: Core, every: Callable[[], int], snapshots: Snapshots) -> None:
        self.core = core
        self.current: Microbatch[Any] | None = None
        self.stage: Stage = "idle"
        self._every = every
        self._resumed = False
        self._random: dict[str, Any] | None = None
        self._snapshots = snapshots
        self._before: Snapshot | None = None

    def take_back(self) -> str | None:
        """Random states and buffers as they were before the micro-batch in hand.

        Returns:
            The name of a large buffer that no micro-batch before had changed, so that there is no
            copy to go back to; `None` if all are as they were.
        """
        return None if self._before is None else self._snapshots.restore(self._before)

    def begin_again(self) -> str | None:
        """After a backward that failed: another one, of a new loss, may be tried.

        Returns:
            As `take_back`.
        """
        lost = self.take_back() if self.restores else None
        window = self.core.window
        if window is not None and not window.broken and not self.core.normalisation.idle:
            self.core.normalisation.start(window.microbatches)
        return lost

    @property
    def restores(self) -> bool:
        """Whether the micro-batch in hand leaves no trace if it fails or is skipped."""
        return self._before is not None and self.core.gradients.restores

    def prevention(self) -> str:
        """What keeps a window whole when memory runs out again."""
        if self.core.gradients.may_restore:
            return (
                "from now on each micro-batch's gradients are kept apart until all are there, and "
                "the window stays whole (Accumulator(..., restore=True): from the start)"
            )
        return "without restore=False each micro-batch would be kept apart until it is whole"

    def over(
        self, loader: Iterable[T], gathering: Gathering | None
    ) -> Generator[Microbatch[Any], None, None]:
        """Yield micro-batches of `loader`, and say if a window stays open at the end.

        Args:
            loader: gives batches.
            gathering: makes micro-batches of a window's batches; `None` if each batch is one.
        """
        start = self._start(gathering is not None)
        if gathering is None:
            coming = self._ahead(loader)
        else:
            coming = islice(gathering(windows(loader, self._every)), start, None)
        if start:
            coming = self._restoring(coming)
        micro: Microbatch[Any] | None = None
        try:
            for batch, ends, padding, place in coming:
                window = self.core.window or self._open(place)
                index = window.microbatches + window.dropped
                last = ends or index + 1 >= window.expected
                micro = Microbatch(self, batch, index, window.expected, last, padding)
                self.current = micro
                if self.core.drops or self.core.gradients.restores:
                    self._before = self._snapshots.take()
                if not self.core.normalisation.idle:
                    self.core.normalisation.start(window.microbatches)
                yield micro
                if micro._state == "open" or self.current is not micro:
                    self._refuse_left(micro)
        finally:
            self._before = None
            if self.current is micro:
                self.current = None
            self.core.normalisation.leave()
            self._warn_open()

    def stand_aside(self) -> None:
        """A batch of its own is stepped: whatever a loop had in hand is over."""
        self.void()
        self.stage = "idle"
        self._random = None

    def void(self) -> None:
        """The window of the micro-batch in hand is gone."""
        if self.current is not None:
            self.current.void()

    @property
    def failed(self) -> bool:
        """Whether the micro-batch in hand had a backward that raised."""
        return self.current is not None and self.current.failed

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where a saved loop stood."""
        self.void()
        self._resumed = True
        self.stage = state["stage"]
        self._random = state["random"]

    def _start(self, gathers: bool) -> int:
        """How many micro-batches of its first window a loop must pass over."""
        window, resumed = self.core.window, self._resumed
        self._resumed = False
        if window is None or not (self.core.begun or window.dropped):
            self.core.discard()
            return 0
        self.core.sound_window()
        if gathers != window.gathered or (gathers and not resumed):
            raise LoopError(
                "window-open",
                "A window is open that this loop cannot go on with.",
                got=f"{window.microbatches} of {window.expected} micro-batches, of batches that "
                f"were {'gathered ahead and are gone' if window.gathered else 'not gathered'}",
                expected="no open window, or one that this kind of loop opened",
                do="acc.flush() steps it, acc.discard() drops it",
            )
        return window.microbatches + window.dropped if gathers else 0

    def _ahead(self, loader: Iterable[T]) -> Iterator[Coming]:
        """Each batch with whether it is the last, known by fetching one ahead where that decides.

        A window's last place needs to know nothing of what follows: the next batch is fetched
        after its update, so a loader may make batches with the parameters of the moment.
        """
        iterator = iter(loader)
        if self.stage == "between":
            self._restore_random()  # making the iterator anew must not move the generators
        held: list[T] = []
        watched = 8  # a loader that overwrites its batches does so from the start
        while True:
            if not held:
                try:
                    held.append(next(iterator))
                except StopIteration:
                    self._restore_random()  # a finished loader was found empty
                    self.stage = "idle"
                    return
                if self.stage == "ahead":
                    self._restore_random()  # that batch had been fetched when the state was saved
                self._random = None
            batch = held.pop()
            window = self.core.window or self.core.open(self._every())
            if window.microbatches + window.dropped + 1 >= window.expected:
                self.stage = "between"
                yield batch, True, 0, None
                continue
            late: Exception | None = None
            versions = versions_of(batch) if watched else []
            try:
                held.append(next(iterator))
            except StopIteration:
                pass
            except Exception as error:  # noqa: BLE001 - the batch at hand is whole, and goes first
                late = error
            if watched:
                watched -= 1
                if versions_of(batch) != versions:
                    raise overwritten()
            self.stage = "ahead" if held else "idle"
            yield batch, not held and late is None, 0, None
            if late is not None:
                raise late
            if not held:
                return

    def _open(self, place: Place | None) -> Window:
        if place is None:
            return self.core.open(self._every())
        # After a flush or discard in mid-window, what is left of its plan is a window of its own.
        declared = place.declared if place.position == 0 else None
        return self.core.open(place.size - place.position, declared, place.contents)

    def _restoring(self, coming: Iterator[Coming]) -> Iterator[Coming]:
        """After a resume inside a gathered window: gathering it again must draw nothing."""
        window = self.core.window
        for item in coming:
            place = item[3]
            if window is not None and place is not None and place.contents != window.contents:
                raise StateError(
                    "state-batches",
                    "The loader does not give the batches that the saved window was made of.",
                    got=f"{len(place.contents)} lengths or counts, {list(place.contents[:8])}...",
                    expected=f"{len(window.contents)}, {list(window.contents[:8])}...",
                    do="start the loader at the window's first batch, not at the micro-batch that "
                    "follows; or acc.discard() the window",
                )
            window = None
            self._restore_random()
            yield item

    def _restore_random(self) -> None:
        if self._random is not None:
            states.load_random(self._random)
            self._random = None

    def _refuse_left(self, micro: Microbatch[Any]) -> NoReturn:
        if self.current is not micro:
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

    def _warn_open(self) -> None:
        window = self.core.window
        if window is None or not window.microbatches:
            return
        warnings.warn(
            f"The loop was left with a window half done: {window.microbatches} of "
            f"{window.expected} micro-batches. Its gradients are kept: "
            f"{'' if window.gathered or window.broken else 'the next loop goes on with it, '}"
            f"{'' if window.broken else 'acc.flush() steps it, '}acc.discard() drops it. "
            "More: docs/messages.md#open-window",
            OpenWindowWarning,
            stacklevel=3,
        )
