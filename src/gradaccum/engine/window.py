"""The arithmetic of one window: sums, counts and the denominator that they are divided by.

Every micro-batch adds the gradient of its summed loss over a *provisional* denominator `D`, so that
the running gradient has the size of a mean. One last factor, `D / count`, puts it right:

    gradient = D / Σ count_i · Σ ∇sum_i / D

Denominators are numbers where the host knows every count, and tensors on the device where it does
not: nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradaccum.engine.loss import Count, Number, Part

__all__ = ["Term", "Window", "ratio"]


@dataclass(slots=True)
class Term:
    """The running state of one loss term in the open window."""

    provisional: Count
    """The denominator used so far, in loss terms; fixed for the window."""

    loss: Tensor
    """Sum of the losses; shape `()`, float64 where the device has it."""

    count: Count = 0
    """Sum of the counts."""

    seed: Tensor | None = None
    """The gradient that entered its last loss, kept because most micro-batches share it."""

    seed_for: Count | None = None
    """The numerator of `seed`."""

    @property
    def mean(self) -> Tensor:
        """The term as it is optimised: its sum over its count; shape `()`."""
        return self.loss / _positive(self.count)


@dataclass(slots=True)
class Window:
    """Everything the open window has besides gradients. A value: `state.py` saves it whole."""

    expected: int
    """Micro-batches that this window was opened for."""

    gathered: bool = False
    """Whether its batches were all taken from the loader before the first was added."""

    declared: dict[str, Number] = field(default_factory=dict)
    """Total count of each term where the caller knew it ahead; empty where not."""

    terms: dict[str, Term] = field(default_factory=dict)
    """Running state by name of term; the name is empty for a loss of one term."""

    microbatches: int = 0
    """Micro-batches that have been added."""

    dropped: int = 0
    """Micro-batches that were skipped."""

    padding: int = 0
    """Padded elements beyond the samples' lengths, over the micro-batches added."""

    broken: bool = False
    """Whether a backward was cut short, so that the gradients hold part of a micro-batch."""

    def add(self, parts: list[Part], padding: int) -> None:
        """Count a micro-batch whose gradient has arrived."""
        self.microbatches += 1
        self.padding += padding
        for name, loss, count, mean in parts:
            term = self.terms[name]
            term.count = term.count + count
            if not mean:
                term.loss.add_(loss.detach())
            elif isinstance(count, Tensor):
                term.loss.add_(loss.detach() * count)
            elif count:  # a mean of no terms is NaN and adds nothing
                term.loss.add_(loss.detach(), alpha=count)

    def open_terms(self, parts: list[Part], last: bool, usual: dict[str, Count]) -> None:
        """Give each new term of `parts` its provisional denominator.

        Args:
            parts: the micro-batch at hand.
            last: whether it is the window's last one, so that its count is all there is to come.
            usual: mean count of a micro-batch in the window before, by term. A first micro-batch
                far below it would leave the running gradient far above the size of a mean.
        """
        for part in parts:
            if part.name in self.terms:
                continue
            declared = self.declared.get(part.name)
            if declared is not None:
                provisional = declared
            elif last:
                provisional = _positive(part.count)
            else:
                most = _larger(part.count, usual.get(part.name, 0))
                provisional = _positive(most) * max(self.expected - self.microbatches, 1)
            total = torch.zeros((), dtype=_wide(part.loss), device=part.loss.device)
            self.terms[part.name] = Term(provisional, total)

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

    def usual(self) -> dict[str, Count]:
        """Mean count of a micro-batch in this window, by term."""
        return {name: term.count / self.microbatches for name, term in self.terms.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain types and tensors only, so that a file of it can be read with `weights_only`."""
        terms = {
            name: {
                "provisional": _copied(term.provisional),
                "loss": term.loss.clone(),
                "count": _copied(term.count),
            }
            for name, term in self.terms.items()
        }
        return {
            "expected": self.expected,
            "gathered": self.gathered,
            "declared": dict(self.declared),
            "terms": terms,
            "microbatches": self.microbatches,
            "dropped": self.dropped,
            "padding": self.padding,
            "broken": self.broken,
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Window:
        """The inverse of `as_dict`."""
        terms = {
            name: Term(_copied(term["provisional"]), term["loss"].clone(), _copied(term["count"]))
            for name, term in saved["terms"].items()
        }
        known: dict[str, Any] = {**saved, "declared": dict(saved["declared"]), "terms": terms}
        return cls(**known)


def ratio(above: Count, below: Count) -> Count:
    """`above / below`, with 1 in place of a zero that only the device can see."""
    if isinstance(above, Tensor) or isinstance(below, Tensor):
        return above / _positive(below)
    return 1 if above == below else above / below


def _positive(count: Count) -> Count:
    return torch.where(count > 0, count, 1) if isinstance(count, Tensor) else count or 1


def _larger(one: Count, other: Count) -> Count:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.maximum(torch.as_tensor(one), torch.as_tensor(other))
    return max(one, other)


def _copied(count: Count) -> Count:
    return count.clone() if isinstance(count, Tensor) else count


def _wide(loss: Tensor) -> torch.dtype:
    # Sums of many losses stall in a narrow type; Apple's devices have nothing wider than float32.
    return torch.float32 if loss.device.type == "mps" else torch.float64
