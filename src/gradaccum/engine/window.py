"""The arithmetic of one window: sums, counts and the denominator that they are divided by.

Every micro-batch adds the gradient of its summed loss over a *provisional* denominator `D`, so that
the running gradient has the size of a mean. One last factor, `D / count`, puts it right:

    gradient = D / Σ count_i · Σ ∇sum_i / D

Denominators are numbers where the host knows every count, and tensors on the device where it does
not: nothing here waits for a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.engine.loss import Count, Number, Part
from gradaccum.errors import InputError

__all__ = ["Term", "Usual", "Window", "ratio"]


class Usual(NamedTuple):
    """What a window teaches the next one about a term."""

    count: Count
    """Mean count of a micro-batch."""

    alike: bool
    """Whether all micro-batches had that count."""


@dataclass(slots=True)
class Term:
    """The running state of one loss term in the open window."""

    provisional: Count
    """The denominator used so far, in loss terms; fixed for the window."""

    loss: float | Tensor
    """Sum of the losses: a number where the host holds them, else a tensor of shape `()` on the
    device, float64 where the device has it."""

    first: Count
    """Count of its first micro-batch."""

    alike: bool = True
    """Whether every micro-batch so far had that count, as far as the host knows."""

    count: Count = 0
    """Sum of the counts."""

    seed: Tensor | None = None
    """The gradient that entered its last loss, kept because most micro-batches share it."""

    seed_for: Count | None = None
    """The count of the mean that `seed` was for; `None` for a sum."""

    def fits(self, part: Part) -> bool:
        """Whether `seed` is that of `part`."""
        if self.seed is None or self.seed.dtype != part.loss.dtype:
            return False
        if not part.mean:
            return self.seed_for is None
        above = part.count
        if isinstance(above, Tensor) or isinstance(self.seed_for, Tensor):
            return self.seed_for is above
        return self.seed_for == above

    @property
    def mean(self) -> Tensor:
        """The term as it is optimised: its sum over its count; shape `()`."""
        mean = self.loss / _widened(_positive(self.count))
        if isinstance(mean, Tensor):
            return mean
        return torch.full((), mean, dtype=torch.float64, device="cpu")


@dataclass(slots=True)
class Window:
    """Everything the open window has besides gradients. A value: `state.py` saves it whole."""

    expected: int
    """Micro-batches that this window was opened for."""

    gathered: bool = False
    """Whether its batches were all taken from the loader before the first was added."""

    contents: tuple[int | float, ...] = ()
    """Of a gathered window: what tells its batches from others, to be found again on a resume."""

    declared: dict[str, Number] = field(default_factory=dict)
    """Total count of each term where the caller knew it ahead; empty where not."""

    terms: dict[str, Term] = field(default_factory=dict)
    """Running state by name of term; the name is empty for a loss of one term."""

    microbatches: int = 0
    """Micro-batches that have been added."""

    dropped: int = 0
    """Micro-batches that were skipped or dropped."""

    dropped_at: tuple[int, ...] = ()
    """Positions in the window of those that were dropped for NaN or infinity."""

    dropped_samples: tuple[int, ...] = ()
    """Positions in the batch of samples that were dropped for NaN or infinity."""

    flags: list[Tensor] = field(default_factory=list)
    """Whether each micro-batch was dropped, shape `()`, where only its device knows."""

    uniform: bool = False
    """Whether the bits of the update must not depend on how many micro-batches were expected."""

    padding: int = 0
    """Padded elements beyond the samples' lengths, over the micro-batches added."""

    broken: bool = False
    """Whether a backward was cut short, so that the gradients hold part of a micro-batch."""

    @property
    def joint(self) -> bool:
        """Whether all terms' gradients are in one sum, as their denominators were declared."""
        return len(self.terms) == 1 or self.terms.keys() <= self.declared.keys()

    @property
    def rescalable(self) -> bool:
        """Whether another number of micro-batches would have led to the same bits.

        It enters through the provisional denominators alone, and powers of two round nothing.
        """
        return all(
            name in self.declared
            or isinstance(term.provisional, Tensor)
            or math.frexp(term.provisional)[0] == 0.5
            for name, term in self.terms.items()
        )

    def add(self, parts: list[Part], padding: int) -> None:
        """Count a micro-batch whose gradient has arrived."""
        self.microbatches += 1
        self.padding += padding
        for name, loss, count, mean in parts:
            term = self.terms[name]
            term.count = term.count + count
            if count is not term.first and (isinstance(count, Tensor) or count != term.first):
                term.alike = False
            # `tolist` reads the CPU's memory as it is: no operator, no wait.
            value: Any = loss.tolist() if loss.is_cpu else loss.detach().to(_wide(loss))
            if not mean:
                term.loss += value
            elif isinstance(count, Tensor) or count:  # a mean of no terms is NaN and adds nothing
                term.loss += value * count

    def open_terms(self, parts: list[Part], last: bool, before: dict[str, Usual]) -> list[str]:
        """Give each new term of `parts` its provisional denominator; return the new names.

        Args:
            parts: the micro-batch at hand.
            last: whether it is the window's last one, so that its count is all there is to come.
            before: what the window before found usual, by term.
        """
        new = [part for part in parts if part.name not in self.terms]
        if new and self.terms and ("" in self.terms) != (new[0].name == ""):
            raise InputError(
                "loss-terms",
                "One window cannot mix a loss of one term with a loss of several.",
                got=f"terms {[part.name for part in new]} after {list(self.terms)}",
                expected="the same kind of loss for all micro-batches of a window",
                do='give the single loss its name too: micro.backward({"ce": (loss, count)})',
            )
        for part in new:
            if part.name in self.declared:
                provisional = self.declared[part.name]
            elif last:
                provisional = _positive(part.count)
            else:
                provisional = self._guess(part.count, before.get(part.name))
            alike = not isinstance(part.count, Tensor)
            self.terms[part.name] = Term(provisional, 0.0, part.count, alike)
        return [part.name for part in new]

    def _guess(self, first: Count, before: Usual | None) -> Count:
        rest = max(self.expected - self.microbatches, 1)
        # A first micro-batch far smaller than usual would leave the running gradient far above the
        # size of a mean, and out of fp16's range.
        guess = _positive(first if before is None else _larger(first, before.count)) * rest
        # Counts that are all alike make this the true denominator. Where they are not it is only
        # a size, and dividing by a power of two rounds nothing.
        known = before is not None and before.alike and not self.uniform
        return guess if known else _power_of_two(guess)

    def totals(self, parts: list[Part]) -> dict[str, Count]:
        """Each term's count once `parts` are added."""
        totals = {name: term.count for name, term in self.terms.items()}
        for part in parts:
            totals[part.name] = totals[part.name] + part.count
        return totals

    def factors(self, totals: dict[str, Count], *, whole: bool) -> dict[str, Count]:
        """What each term's summed gradient is to be multiplied by, given its total count.

        Args:
            totals: the counts to divide by.
            whole: whether all of the window's micro-batches are in, so that a count that was
                declared ahead is the total.
        """
        return {
            name: 1 if whole and name in self.declared else ratio(term.provisional, totals[name])
            for name, term in self.terms.items()
        }

    def usual(self) -> dict[str, Usual]:
        """What the next window may expect, by term."""
        return {n: Usual(t.count / self.microbatches, t.alike) for n, t in self.terms.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain types and tensors only, so that a file of it can be read with `weights_only`."""
        terms = {
            name: {
                "provisional": _copied(term.provisional),
                "loss": _copied(term.loss),
                "count": _copied(term.count),
                "first": _copied(term.first),
                "alike": term.alike,
            }
            for name, term in self.terms.items()
        }
        return {
            "expected": self.expected,
            "gathered": self.gathered,
            "contents": list(self.contents),
            "declared": dict(self.declared),
            "terms": terms,
            "microbatches": self.microbatches,
            "dropped": self.dropped,
            "dropped_at": list(self.dropped_at),
            "dropped_samples": list(self.dropped_samples),
            "flags": [flag.clone() for flag in self.flags],
            "uniform": self.uniform,
            "padding": self.padding,
            "broken": self.broken,
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Window:
        """The inverse of `as_dict`."""
        terms = {
            name: Term(
                provisional=_copied(term["provisional"]),
                loss=_copied(term["loss"]),
                first=_copied(term["first"]),
                alike=term["alike"],
                count=_copied(term["count"]),
            )
            for name, term in saved["terms"].items()
        }
        known: dict[str, Any] = {**saved, "declared": dict(saved["declared"]), "terms": terms}
        for name in ("contents", "dropped_at", "dropped_samples"):
            known[name] = tuple(saved[name])
        return cls(**known)


def ratio(above: Count, below: Count) -> Count:
    """`above / below`, with 1 in place of a count of zero: a term without loss adds nothing."""
    if isinstance(above, Tensor) or isinstance(below, Tensor):
        return _widened(above) / _widened(_positive(below))
    return 1 if above == below else above / (below or 1)


def _positive(count: Count) -> Count:
    return torch.where(count > 0, count, 1) if isinstance(count, Tensor) else count or 1


def _larger(one: Count, other: Count) -> Count:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.maximum(torch.as_tensor(one), torch.as_tensor(other))
    return max(one, other)


def _power_of_two(count: Count) -> Count:
    """The least power of two that is no smaller."""
    if isinstance(count, Tensor):
        mantissa, exponent = torch.frexp(count.to(torch.float32))
        return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    mantissa, exponent = math.frexp(count)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def _widened(count: Count) -> Count:
    return count.to(_wide(count)) if isinstance(count, Tensor) else count


def _copied(count: Count) -> Count:
    return count.clone() if isinstance(count, Tensor) else count


def _wide(tensor: Tensor) -> torch.dtype:
    # Sums of many terms stall in a narrow type; Apple's devices have nothing wider than float32.
    return torch.float32 if tensor.device.type == "mps" else torch.float64
