"""Measures a loss whole and split under chosen conditions, and keeps what it measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaccum.coupling.runs import Conditions, Group, Piece, Runner
from gradaccum.coupling.weigh import Explanation, Ruler, Trial, explain
from gradaccum.errors import GradaccumError
from gradaccum.planner.split import Samples, even

__all__ = ["Examination", "Measured", "as_is", "flat", "group_of", "rounding", "ways"]

as_is = Conditions()
_SAFETY = 8.0
"""Higham and Mary (2019), https://doi.org/10.1137/18M1226312: a sum of n terms is off by at most
`8 √n u Σ|terms|` but for a chance of about `2 exp(-8²/2)`, 3e-14."""


@dataclass(frozen=True)
class Measured:
    """What a batch gave under some conditions, whole and split in every way."""

    trials: dict[str, dict[str, Trial]]
    """By term, by split."""

    errors: dict[str, str]
    """By split, what the user's code raised."""

    explained: dict[str, Explanation]
    """By term."""

    distances: dict[str, float]
    """By split, the largest over all terms."""

    counts: dict[str, tuple[float, ...]]
    loss: float

    @property
    def equal(self) -> bool:
        """Whether every split gave the whole batch's update."""
        return not self.errors and all(one.kind == "equal" for one in self.explained.values())

    @property
    def farthest(self) -> float:
        """The largest distance of all splits."""
        return max([*self.distances.values(), *[math.inf for _ in self.errors]], default=0.0)


class Examination:
    """Runs a batch whole and split, each set of conditions once.

    Args:
        runner: runs groups of samples.
        splits: by name, the groups of each way to split.
        whole: the group of all samples.
        bound: what rounding alone may make of a distance.
    """

    def __init__(
        self, runner: Runner, splits: dict[str, list[Group]], whole: Group, bound: float
    ) -> None:
        self.runner = runner
        self.splits = splits
        self.whole = whole
        self.bound = bound
        self._wholes: dict[Conditions, dict[str, Piece]] = {}
        self._measured: dict[Conditions, Measured] = {}

    @property
    def ruler(self) -> Ruler:
        """Measures with the bound, over the parameters found so far."""
        found = self.runner.stage.parameters
        sizes = [p.numel() * (2 if p.is_complex() else 1) for p in found.values()]
        return Ruler(sizes, list(found), self.bound)

    def measure(self, conditions: Conditions = as_is) -> Measured:
        """Whole and split, under these conditions."""
        if conditions not in self._measured:
            self._measured[conditions] = self._measure(conditions)
        return self._measured[conditions]

    def pieces(self, conditions: Conditions) -> dict[str, Piece]:
        """The whole batch under these conditions, by term."""
        if conditions not in self._wholes:
            found = self.runner.run([self.whole], conditions)
            self._wholes[conditions] = {name: pieces[0] for name, pieces in found.items()}
        return self._wholes[conditions]

    def gradient(self, conditions: Conditions, groups: Sequence[Group] | None = None) -> Tensor:
        """All terms' gradients of the whole batch, or of a split one, as they were handed over."""
        if groups is None:
            return torch.cat([piece.gradient for piece in self.pieces(conditions).values()])
        return flat(self.runner.run(groups, conditions))

    def apart(self, one: Tensor, other: Tensor) -> float:
        """Relative distance of what `gradient` returned."""
        ruler, found = self.ruler, 0.0
        size = sum(ruler.sizes)
        if one.shape != other.shape:
            return math.inf
        for a, b in zip(one.split(size), other.split(size), strict=True):
            found = max(found, ruler.distance(a, b, torch.maximum(a.abs(), b.abs()))[0])
        return found

    def _measure(self, conditions: Conditions) -> Measured:
        runner = self.runner
        whole = dict(self.pieces(conditions))
        trials: dict[str, dict[str, Trial]] = {name: {} for name in whole}
        errors: dict[str, str] = {}
        counts: dict[str, tuple[float, ...]] = {}
        for split, groups in self.splits.items():
            try:
                pieces = runner.run(groups, conditions)
            except Exception as error:  # noqa: BLE001 - whatever the user's code raised is the result
                if isinstance(error, GradaccumError):
                    errors[split] = error.problem
                else:
                    errors[split] = f"{type(error).__name__}: {str(error).strip()}"[:300]
                continue
            infinite = [i for term in pieces.values() for i, p in enumerate(term) if not p.finite]
            if infinite:
                though = ", though they are in the whole batch"
                finite = all(piece.finite for piece in whole.values())
                errors[split] = (
                    f"the loss and its gradient are not finite in micro-batch {infinite[0] + 1} of "
                    f"{len(groups)}{though if finite else ''}"
                )
                continue
            nothing = torch.zeros(sum(self.ruler.sizes), dtype=torch.float64, device=runner.device)
            empty = Piece(0.0, 0.0, nothing)
            for name in pieces.keys() - trials.keys():
                trials[name] = {}
                whole[name] = empty
            for name in trials:
                found = pieces.get(name, [empty for _ in groups])
                trials[name][split] = Trial(whole[name], found)
            counts[split] = tuple(
                sum(term[i].count for term in pieces.values()) for i in range(len(groups))
            )
        ruler, reduction = self.ruler, runner.reduction
        explained = {name: explain(found, reduction, ruler) for name, found in trials.items()}
        distances = {
            split: max(_distance(trials[name][split], reduction, ruler) for name in trials)
            for split in self.splits
            if split not in errors
        }
        loss = sum(_mean(piece, reduction) for piece in whole.values())
        return Measured(trials, errors, explained, distances, counts, loss)


def ways(samples: Samples) -> dict[str, list[Group]]:
    """Ways to split that show different things: evenly, unevenly, and with other neighbours."""
    n = len(samples)
    quarter = max(1, n // 4) if n < 8 else max(2, n // 4)
    mixed = list(range(0, n, 2)) + list(range(1, n, 2))
    found: dict[str, list[Sequence[int]]] = {"in 2": list(even(n, 2))}
    if n > 2:
        found["unevenly, in 2"] = [range(quarter), range(quarter, n)]
    if n > 3:
        parts = 4 if n >= 8 else 3
        found[f"in {parts}, every other sample"] = [
            [mixed[i] for i in group] for group in even(n, parts)
        ]
    return {name: [group_of(samples, one) for one in groups] for name, groups in found.items()}


def group_of(samples: Samples, indices: Sequence[int]) -> Group:
    """Some samples, cut to the longest of them."""
    width = None if samples.lengths is None else max(samples.lengths[i] for i in indices)
    return list(indices), width


def flat(pieces: dict[str, list[Piece]]) -> Tensor:
    """All gradients of a run, one after the other."""
    return torch.cat([piece.gradient for term in pieces.values() for piece in term])


def rounding(terms: int, eps: float, measured: float) -> float:
    """What rounding may make of a relative distance.

    Args:
        terms: how many are added up.
        eps: of the type that is computed in.
        measured: rounding of this very computation in that type, as estimated from a coarser one.
    """
    return _SAFETY * (math.sqrt(terms) * eps + measured)


def _distance(trial: Trial, reduction: str, ruler: Ruler) -> float:
    whole, split = trial.updates(reduction)
    counts = [piece.count for piece in trial.pieces]
    total = sum(counts) or 1
    if reduction == "mean":
        scale = trial.size([count / total for count in counts])
    else:
        divisor = trial.whole.count or 1
        scale = trial.size([divisor / total] * len(counts)) / divisor
    return ruler.distance(whole, split, scale)[0]


def _mean(piece: Piece, reduction: str) -> float:
    return piece.loss if reduction == "mean" else piece.loss / (piece.count or 1)
