"""Whether a loss term weighed what it should have."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from gradaccum.records.diagnosis import Diagnosis, MicrobatchSeen, TermSeen

__all__ = ["Weighed", "named", "state", "weighed"]

RIGHT, OFF, UNKNOWN, LOST = "right", "off", "unknown", "lost"

# Weights are products of factors that autograd keeps in float32: each of up to a thousand
# roundings moves the product by at most 2**-24 of itself.
_ROUNDING = 1000 * 2.0**-24


def state(term: TermSeen, micro: MicrobatchSeen) -> str:
    """`right`, `off`, `unknown` or `lost`: the term's weight against what it should have been."""
    if micro.lost:
        return LOST
    if term.weight is None or term.expected is None:
        return UNKNOWN
    near = math.isclose(term.weight, term.expected, rel_tol=_ROUNDING, abs_tol=0.0)
    return RIGHT if near else OFF


def named(micro: MicrobatchSeen) -> list[tuple[str, TermSeen]]:
    """The terms of a micro-batch by names that differ: a second `loss` is `loss 2`."""
    seen: Counter[str] = Counter()
    found = []
    for term in micro.terms:
        seen[term.name] += 1
        place = seen[term.name]
        found.append((f"{term.name} {place}" if place > 1 else term.name, term))
    return found


@dataclass(frozen=True, slots=True)
class Weighed:
    """How many terms of the windows that were looked at are in each state."""

    right: int
    off: int
    unknown: int
    lost: int

    @property
    def all(self) -> int:
        """Terms that were looked at."""
        return self.right + self.off + self.unknown + self.lost


def weighed(diagnosis: Diagnosis) -> Weighed:
    """The terms of a diagnosis, counted by state."""
    states = [
        state(term, micro)
        for window in diagnosis.windows
        for micro in window.microbatches
        for term in micro.terms
    ]
    return Weighed(*(states.count(name) for name in (RIGHT, OFF, UNKNOWN, LOST)))
