"""Which micro-batches are run to learn what others take: small ones first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Ladder", "Rung"]


class Rung(NamedTuple):
    """A micro-batch to run."""

    indices: list[int]

    width: int | None
    """Length of the longest of them; None where no lengths are known."""


class Ladder:
    """Micro-batches to run, each chosen by what is known from those before.

    First 2 samples and 4: of the shortest where lengths are known, all of one width, so that what
    samples share is told from what each adds; else of those that seem largest, so that no other
    takes more. Or 1 in place of 4 where 4 are predicted not to fit.
    Then 2 as wide as half the longest, and the 2 longest; where such a width is predicted not to
    fit, the widest that does takes its place. Last, 4 samples as wide as the widest of these.

    Args:
        count: samples there are.
        lengths: of each, or None.
        apparent: how large each seems to be, where no lengths are known.
        few: samples of the smaller micro-batches; a single one often takes another way through
            the operators than two do.

    Examples:
        >>> ladder = Ladder(6, [9, 3, 10, 4, 20, 19])
        >>> [(rung.indices, rung.width) for rung in ladder.rungs(lambda samples, width: True)]
        [([0, 2], 10), ([0, 1, 2, 3], 10), ([4, 5], 20), ([0, 2, 4, 5], 20)]
        >>> [len(rung.indices) for rung in ladder.rungs(lambda samples, width: samples < 3)]
        [2, 1, 2]
    """

    def __init__(
        self,
        count: int,
        lengths: Sequence[int] | None,
        apparent: Sequence[int] | None = None,
        few: int = 2,
    ) -> None:
        self._lengths = lengths
        self._few, self._more = min(few, count), min(2 * few, count)
        if lengths is not None:
            self._order = sorted(range(count), key=lengths.__getitem__)
            self._start = self._more - 1
            return
        sizes = apparent or [1] * count
        # Of those that are alike the first come last, and are taken.
        self._order = sorted(range(count), key=lambda index: (sizes[index], -index))
        self._start = count - 1

    @property
    def widest(self) -> int:
        """Length of the longest sample; 1 without lengths."""
        return self._width(len(self._order) - 1)

    @property
    def first(self) -> Rung:
        """The first of them."""
        return self._rung(self._few, self._start)

    def rungs(self, fits: Callable[[int, int], bool]) -> Iterator[Rung]:
        """The micro-batches to run.

        Args:
            fits: `fits(samples, width)` is asked before each but the first; what has been run so
                far is known then.
        """
        yield self.first
        start = last = self._start
        if self._more > self._few:
            size = self._more if fits(self._more, self._width(start)) else 1
            if size != self._few:
                yield self._rung(size, start)
        if self._lengths is None:
            return
        # What was too wide at first may fit by what the narrower ones have shown since.
        for share in (0.5, 1.0, 1.0, 1.0):
            goal = self._last_up_to(share * self.widest)
            while goal > last and not fits(self._few, self._width(goal)):
                goal = self._last_up_to(self._width(goal) - 1)
            if goal > last and self._width(goal) > self._width(last):
                last = goal
                yield self._rung(self._few, last)
        if last > start and self._more > self._few and fits(self._more, self._width(last)):
            yield self._rung(self._more, last)

    def _rung(self, size: int, place: int) -> Rung:
        members = sorted(self._order[place - size + 1 : place + 1])
        return Rung(members, None if self._lengths is None else self._width(place))

    def _width(self, place: int) -> int:
        return 1 if self._lengths is None else self._lengths[self._order[place]]

    def _last_up_to(self, width: float) -> int:
        assert self._lengths is not None
        return bisect_right(self._order, width, key=self._lengths.__getitem__) - 1
