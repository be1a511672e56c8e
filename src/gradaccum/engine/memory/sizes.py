"""How many samples of which length fit: what running out of memory has taught."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Needs", "Sizes", "bucket_of"]

_STEPS = 4
"""Buckets of length in an octave: samples in one bucket differ by a fifth at most."""

_PATIENCE = 16
_MOST_PATIENCE = 4096

_CAUTION = 0.9
"""Share of the free memory that a larger size may take: what is free changes all the time."""

_ABSURD = 2.0
"""A micro-batch that took so many times what was measured failed for another reason."""


Needs = Callable[[int], float]
"""Bytes that a micro-batch of so many samples asks for beyond what is in use now."""


@dataclass(slots=True)
class _Limit:
    """What is known of one bucket."""

    samples: int
    """Most samples to put into a micro-batch."""

    needs: Needs | None = None
    """What micro-batches take, `None` where nobody can measure."""

    excess: float = 1.0
    """How many times more than measured they were found to take."""

    safe: int = 0
    """The limit before the one on trial; 0 if none is."""

    quiet: int = 0
    """Updates that the limit has decided since it was last moved."""

    patience: int = _PATIENCE
    """Updates after which a larger size is tried where memory cannot be measured."""

    used: bool = False
    """Whether it decided a size in this update."""

    @property
    def measured(self) -> bool:
        """Whether the measurement is worth more than waiting for better times."""
        return self.needs is not None and self.excess < _ABSURD

    def fits(self, samples: int, free: float) -> bool:
        return self.needs is not None and self.excess * self.needs(samples) <= free


def bucket_of(size: float) -> int:
    """The bucket of samples of `size` elements: a quarter of an octave."""
    return math.ceil(_STEPS * math.log2(max(size, 1)) - 1e-9)


class Sizes:
    """Largest micro-batches by bucket, learned from failures and allowed to grow again.

    What failed for short samples fails for long ones too, so a limit holds for its bucket and,
    shrunk in proportion, for every wider one.
    """

    def __init__(self) -> None:
        self._limits: dict[int, _Limit] = {}

    def allowed(self, bucket: int, wanted: int) -> int:
        """How many of `wanted` samples may form one micro-batch, at least 1."""
        known = max((other for other in self._limits if other <= bucket), default=None)
        if known is None:
            return wanted
        limit = self._limits[known]
        most = limit.samples
        if known != bucket:
            most = max(1, int(most * 2 ** ((known - bucket) / _STEPS)))
        if most < wanted:
            limit.used = True
        return min(most, wanted)

    def failed(self, bucket: int, samples: int, needs: Needs | None, free: float) -> int:
        """Note that `samples` did not fit; return the size to go on with.

        Args:
            bucket: of their length.
            samples: in the micro-batch that ran out of memory, at least 2.
            needs: what micro-batches of the bucket take, where that was measured.
            free: bytes that can be had now.
        """
        before = self._limits.get(bucket)
        if before is not None and before.safe and before.safe < samples:
            # a trial: what was known is still right, and the next one is further away
            before.samples, before.safe, before.quiet = before.safe, 0, 0
            before.patience = min(before.patience * 4, _MOST_PATIENCE)
            return before.samples
        limit = _Limit(-(-samples // 2), needs)
        if before is not None:
            limit.patience = before.patience
        if needs is not None:
            # it did not fit, whatever the measurement says
            limit.excess = max(1.0, free / max(needs(samples), 1.0))
            if limit.measured:
                limit.samples = _largest(limit.samples, lambda n: limit.fits(n, free))
        self._limits[bucket] = limit
        return limit.samples

    @property
    def decided(self) -> bool:
        """Whether a limit has decided a size since the last update."""
        return any(limit.used for limit in self._limits.values())

    def rest(self, free: float | None) -> None:
        """After an update: let limits grow that decided a size and for which there is room.

        Args:
            free: bytes that can be had now; `None` if nobody knows.
        """
        for limit in self._limits.values():
            if not limit.used:
                continue
            limit.used = False
            limit.quiet += 1
            on_trial, limit.safe = limit.safe > 0, 0
            waited = on_trial or limit.quiet >= limit.patience
            if free is not None and limit.measured:
                room = limit.fits(2 * limit.samples, _CAUTION * free)
                grows = room and (waited or limit.patience == _PATIENCE)
            else:
                grows = waited
            if grows:
                limit.safe, limit.samples = limit.samples, 2 * limit.samples
                limit.quiet = 0


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest size up to `most` that fits, 1 if none does; what fits, fits when smaller too."""
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
