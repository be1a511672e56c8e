"""How many bytes a micro-batch of a given size takes, as numbers fitted to a few that were run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Any

__all__ = ["MemoryModel", "Phase"]


@dataclass(frozen=True, slots=True)
class Phase:
    """A moment in a forward and backward that may be the most expensive one.

    With `n` samples of width `w` it takes
    `shared[0] + shared[1]·w + shared[2]·w² + n·(each[0] + each[1]·w + each[2]·w²)`.
    No coefficient is negative, so more samples or wider ones never take less.
    """

    shared: tuple[float, float, float]
    """What all samples share: a weight's gradient on its way, a mask of positions."""

    each: tuple[float, float, float]
    """What every sample adds."""

    def at(self, samples: int, width: int) -> float:
        """Its value for `samples` samples of `width` elements."""
        return _polynomial(self.shared, width) + samples * _polynomial(self.each, width)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes of an update's micro-batches on their device.

    The peak of a micro-batch is the largest of several phases: near the loss it grows with the
    samples, while a large weight's gradient arrives it may not. A line through two peaks would
    mistake the one for the other, so each phase has a line of its own.

    Examples:
        >>> model = MemoryModel((Phase((0, 0, 0), (100, 8, 0)),), resident=1000, step=50)
        >>> model.bytes(4, width=10), model.most(2000, width=10)
        (1720, 5)
    """

    phases: tuple[Phase, ...]
    """Bytes beyond `resident` while a micro-batch runs."""

    resident: int
    """Bytes that are there all the time: parameters, buffers, gradients, the optimizer's state;
    where the device's allocator counts, also all else that lives on the device."""

    step: int = 0
    """Bytes beyond `resident` while the optimizer steps."""

    def bytes(self, samples: int, width: int = 1) -> int:
        """Peak of a micro-batch, `resident` included; `width` is 1 where lengths play no part."""
        return self.resident + ceil(max(phase.at(samples, width) for phase in self.phases))

    def fits(self, samples: int, width: int, limit: int) -> bool:
        """Whether a micro-batch stays within `limit` bytes, `resident` included."""
        return self.bytes(samples, width) <= limit

    def most(self, limit: int, width: int = 1) -> int:
        """Most samples of `width` that stay within `limit` bytes; 0 if not one does."""
        found = sys.maxsize
        for phase in self.phases:
            left = limit - self.resident - _polynomial(phase.shared, width)
            each = _polynomial(phase.each, width)
            if left < 0:
                return 0
            if each > 0:
                found = min(found, int(min(left / each, sys.maxsize)))
        # The division rounds; what counts is `bytes`.
        while 0 < found < sys.maxsize and not self.fits(found, width, limit):
            found -= 1
        return found

    @property
    def floor(self) -> int:
        """Bytes that an update takes whatever its micro-batches are: the optimizer's step."""
        return self.resident + self.step

    def moved(self, resident: int) -> MemoryModel:
        """The same micro-batches beside other residents."""
        return replace(self, resident=resident)

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        phases = [{"shared": list(p.shared), "each": list(p.each)} for p in self.phases]
        return {"phases": phases, "resident": self.resident, "step": self.step}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> MemoryModel:
        """The inverse of `as_dict`.

        Raises:
            ValueError, TypeError or KeyError: if it is not what `as_dict` returned.
        """
        phases = tuple(Phase(_three(p["shared"]), _three(p["each"])) for p in saved["phases"])
        if not phases:
            raise ValueError("no phases")
        for key in ("resident", "step"):
            if type(saved[key]) is not int:
                raise TypeError(f"{key} is no whole number")
        return cls(phases, saved["resident"], saved["step"])


def _polynomial(coefficients: tuple[float, float, float], width: int) -> float:
    constant, linear, square = coefficients
    return constant + linear * width + square * width * width


def _three(values: Any) -> tuple[float, float, float]:
    a, b, c = (float(value) for value in values)
    if not all(isfinite(value) and value >= 0 for value in (a, b, c)):
        raise ValueError("a coefficient is negative or not finite")
    return a, b, c
