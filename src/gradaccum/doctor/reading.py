"""What was read off one backward's graph. Plain: the checks read it where there is no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Factor", "Reading", "Term"]


@dataclass(frozen=True, slots=True)
class Factor:
    """One scalar that stands between the loss and a term."""

    how: str
    """`mul` or `div`."""
    value: float


@dataclass(frozen=True, slots=True)
class Term:
    """One reduction of loss values, and the weight it has in what is differentiated.

    A term is where many loss values become one: `mse_loss`, `(nll * mask).sum()`, `x.mean()`; or a
    scalar that nothing was reduced to. *Elements* are the values that it reduces.
    """

    name: str
    """The loss function or the operation that made the values: `nll_loss`, `pow`."""
    path: str
    """The operations between the loss and the term: the same for the same line of code."""
    serial: int
    """Number of the term's node in its graph: the same number is the same graph again."""
    reduction: str
    """`mean`, `sum`, or `none` for a scalar that was not reduced here."""
    weight: float | None
    """Sum of its elements' weights: 1 for a mean that is not scaled. `None` if unknown."""
    each: float | None = None
    """Weight of each element that counts, where all have the same."""
    count: float | None = None
    """Elements that count: not ignored, not masked. With class weights, their sum."""
    masked: bool = False
    """Whether elements can be left out: by `ignore_index`, a mask, a fill."""
    factors: tuple[Factor, ...] = ()
    """Scalars on the way from the loss, outermost first."""
    coupled: bool = False
    """Whether it compares each sample with all others: square logits, the diagonal as target."""
    why: str = ""
    """Why the weight is unknown."""


@dataclass(frozen=True, slots=True)
class Reading:
    """All terms of one backward."""

    terms: tuple[Term, ...] = ()
    why: str = ""
    """Why nothing could be read at all."""

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for a trace file; what holds its default is left out."""
        terms = []
        for term in self.terms:
            plain = {
                name: getattr(term, name)
                for name, default in _PLAIN.items()
                if getattr(term, name) != default
            }
            plain["factors"] = [(one.how, one.value) for one in term.factors]
            terms.append(plain)
        return {"terms": terms, "why": self.why}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Reading:
        """Read what `to_dict` wrote."""
        terms = []
        for plain in found.get("terms", ()):
            factors = tuple(Factor(how, value) for how, value in plain.get("factors", ()))
            known: dict[str, Any] = {**_PLAIN, **plain, "factors": factors}
            terms.append(Term(**known))
        return cls(tuple(terms), found.get("why", found.get("error", "")))


_PLAIN: dict[str, Any] = {
    "name": "",
    "path": "",
    "serial": -1,
    "reduction": "none",
    "weight": None,
    "each": None,
    "count": None,
    "masked": False,
    "coupled": False,
    "why": "",
}
