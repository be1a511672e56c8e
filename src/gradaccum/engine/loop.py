"""The loop that a user writes, held to one backward for each micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice, starmap
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from gradaccum.engine import state as states
from gradaccum.engine.core import Core
from gradaccum.engine.loss import Count, Loss, read_parts
from gradaccum.engine.stream import Coming, ahead, windows
from gradaccum.engine.window import Window
from gradaccum.errors import LoopError, OpenWindowWarning
from gradaccum.records import Update

__all__ = ["Loop", "Microbatch"]

T = TypeVar("T")

Gathering: TypeAlias = Callable[[Iterator[list[Any]]], Iterator[Coming[Any]]]
"""Makes a window's micro-batches of all its batches."""


class Microbatch(Generic[T]):
    """One micro-batch of a loop: its batch, and the way its loss enters the window."""

    __slots__ = ("_loop", "_padding", "_state", "batch", "index", "last", "size", "update")

    def __init__(
        self, loop: Loop, batch: T, index: int, size: int, last: bool, padding: int
    ) -> None:
        self._loop = loop
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
        if self._state != "open" or self._loop.current is not self:
            raise self._refusal()
        parts = read_parts(loss, count, reduction, self._where)
        self.update = self._loop.core.add(
            parts, last=self.last, padding=self._padding, retain_graph=retain_graph
        )
        self._state = "spent"
        if self.update is not None:
            self._loop.core.announce(self.update)

    def skip(self) -> None:
        """Leave this micro-batch out; if it is the window's last, the others are stepped."""
        if self._state == "void":
            return  # its window is gone, so it is left out already
        if self._state != "open" or self._loop.current is not self:
            raise self._refusal()
        self._state = "spent"
        self.update = self._loop.core.skip(self.last)
        self._loop.core.announce(self.update)

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


class Loop:
    """Loops over one core's windows, one at a time, and where they stand in their loader.

    Args:
        core: takes the micro-batches.
        every: gives the number of micro-batches of the next window.
    """

    def __init__(self, core: Core, every: Callable[[], int]) -> None:
        self.core = core
        self.current: Microbatch[Any] | None = None
        self.holds_batch = False
        self._every = every
        self._resumed = False
        self._random: dict[str, Any] | None = None

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
            coming = starmap(Coming, ahead(loader, self._closes, self._fetched))
        else:
            coming = islice(gathering(windows(loader, self._every)), start, None)
        if start:
            coming = self._restoring(coming)
        micro: Microbatch[Any] | None = None
        try:
            for item in coming:
                window = self.core.window or self._open(item)
                index = window.microbatches + window.dropped
                last = item.last or index + 1 >= window.expected
                micro = Microbatch(self, item.batch, index, window.expected, last, item.padding)
                self.current = micro
                yield micro
                if micro._state == "open" or self.current is not micro:
                    self._refuse_left(micro)
        finally:
            if self.current is micro:
                self.current = None
            self._warn_open()

    def stand_aside(self) -> None:
        """A batch of its own is stepped: whatever a loop had in hand is over."""
        self.void()
        self.holds_batch = False
        self._random = None

    def void(self) -> None:
        """The window of the micro-batch in hand is gone."""
        if self.current is not None:
            self.current.void()

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where a saved loop stood."""
        self.void()
        self._resumed = True
        self.holds_batch = bool(state["holds_batch"])
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

    def _closes(self) -> bool:
        """Whether the next micro-batch fills its window."""
        window = self.core.window or self.core.open(self._every())
        return window.microbatches + window.dropped + 1 >= window.expected

    def _open(self, item: Coming[Any]) -> Window:
        if item.position is None:
            return self.core.open(self._every())
        # After a flush or discard in mid-window, what is left of its plan is a window of its own.
        declared = item.declared if item.position == 0 else None
        return self.core.open(item.size - item.position, declared, gathered=True)

    def _fetched(self, found: bool, held: bool) -> None:
        # Fetching again the batch that was held when the state was saved, or finding a finished
        # loader empty, must not move the random generators.
        if self.holds_batch or not found:
            self._restore_random()
        self._random = None
        self.holds_batch = held

    def _restoring(self, coming: Iterator[Coming[Any]]) -> Iterator[Coming[Any]]:
        """After a resume inside a gathered window: gathering it again must draw nothing."""
        for item in coming:
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
            f"{'' if window.gathered else 'the next loop goes on with it, '}"
            "acc.flush() steps it, acc.discard() drops it. "
            "More: docs/messages.md#open-window",
            OpenWindowWarning,
            stacklevel=3,
        )
