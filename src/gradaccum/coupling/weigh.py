"""What the gradients of micro-batches say about how the whole batch's is made of them.

With `G` the whole batch's gradient of one term and `G_i` those of micro-batches, all as the losses
were handed over, a loss that may be split has `G = Σ G_i` if it is a sum, and
`G = Σ c_i G_i / Σ c_i` if it is a mean with the right counts. What else `G` is made of tells what
is wrong: other weights, or a part that does not grow with the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaccum.coupling.runs import Piece

__all__ = ["Explanation", "Ruler", "Trial", "explain"]


@dataclass(frozen=True)
class Trial:
    """One term of the whole batch, and of the batch split in one way."""

    whole: Piece
    pieces: Sequence[Piece]

    def updates(self, reduction: str) -> tuple[Tensor, Tensor]:
        """The gradient of the update of the whole batch, and of the split one."""
        counts = [piece.count for piece in self.pieces]
        total = sum(counts)
        if reduction == "mean":
            return self.whole.gradient, self.combined(counts) / (total or 1)
        return self.whole.gradient / (self.whole.count or 1), self.combined() / (total or 1)

    def combined(self, weights: Sequence[float] | None = None) -> Tensor:
        """Weighted sum of the micro-batches' gradients."""
        weights = [1.0] * len(self.pieces) if weights is None else weights
        out = torch.zeros_like(self.whole.gradient)
        for piece, weight in zip(self.pieces, weights, strict=True):
            out += weight * piece.gradient
        return out

    def size(self, weights: Sequence[float] | None = None) -> Tensor:
        """Sum of the magnitudes that `combined` adds."""
        weights = [1.0] * len(self.pieces) if weights is None else weights
        out = self.whole.gradient.abs()
        for piece, weight in zip(self.pieces, weights, strict=True):
            out += abs(weight) * piece.gradient.abs()
        return out


@dataclass(frozen=True)
class Ruler:
    """Measures how far two gradients are from each other, parameter by parameter."""

    sizes: Sequence[int]
    names: Sequence[str]
    bound: float
    """What rounding alone may make of a distance."""

    def distance(self, one: Tensor, other: Tensor, scale: Tensor) -> tuple[float, str]:
        """Largest distance of a parameter relative to the magnitudes in it, and whose it is.

        A gradient that is zero but for rounding is measured against the others': each parameter's
        own scale has a share of the overall one added.
        """
        if not bool(torch.isfinite(one).all() and torch.isfinite(other).all()):
            return float("inf"), next(iter(self.names), "")
        floor = float(scale.norm()) / max(len(scale), 1) ** 0.5
        farthest, name = 0.0, self.names[0] if self.names else ""
        start = 0
        for size, label in zip(self.sizes, self.names, strict=True):
            part = slice(start, start + size)
            start += size
            apart = float((one[part] - other[part]).norm())
            reach = float(scale[part].norm()) + floor * size**0.5
            if apart > farthest * reach:
                farthest, name = apart / reach if reach else float("inf"), label
        return farthest, name

    def alike(self, one: Tensor, other: Tensor, scale: Tensor) -> bool:
        """Whether rounding alone can account for the distance."""
        return self.distance(one, other, scale)[0] <= self.bound


@dataclass(frozen=True)
class Explanation:
    """How the whole batch's gradient of one term is made of its micro-batches'."""

    kind: str
    """`equal`, `mean`, `sum`, `counts`, `shares`, `constant`, `none`; `small` if the
    gradient is too short to tell, `unseen` if no split ran or the whole is not finite."""

    evidence: tuple[str, ...] = ()


def explain(trials: dict[str, Trial], reduction: str, ruler: Ruler) -> Explanation:
    """Find what holds for one term in every split.

    Args:
        trials: by the name of the split.
        reduction: what the user says the losses are of their terms.
        ruler: how far is far.
    """
    if not trials or not all(trial.whole.finite for trial in trials.values()):
        return Explanation("unseen")
    if all(_equal(trial, reduction, ruler) for trial in trials.values()):
        return Explanation("equal")
    additive = all(
        ruler.alike(trial.whole.gradient, trial.combined(), trial.size())
        for trial in trials.values()
    )
    averaged = all(_averages(trial, ruler) for trial in trials.values())
    if averaged:
        return Explanation("mean", _ratios(trials, reduction))
    if additive:
        return Explanation("sum" if reduction == "mean" else "counts", _ratios(trials, reduction))
    shares = [_shares(name, trial, reduction, ruler) for name, trial in trials.items()]
    if all(shares):
        return Explanation("shares", tuple(shares))
    constant = _constant(trials, ruler)
    if constant:
        return Explanation("constant", constant)
    enough = all(_proves(len(t.pieces), t.whole.gradient) for t in trials.values())
    return Explanation("none" if enough else "small")


def _equal(trial: Trial, reduction: str, ruler: Ruler) -> bool:
    counts = [piece.count for piece in trial.pieces]
    total = sum(counts) or 1
    weights = [c / total for c in counts] if reduction == "mean" else [1 / total] * len(counts)
    whole, split = trial.updates(reduction)
    divisor = 1 if reduction == "mean" else trial.whole.count or 1
    return ruler.alike(whole, split, trial.size([w * divisor for w in weights]) / divisor)


def _averages(trial: Trial, ruler: Ruler) -> bool:
    total = sum(piece.count for piece in trial.pieces)
    if not total:
        return False
    weights = [piece.count / total for piece in trial.pieces]
    return ruler.alike(trial.whole.gradient, trial.combined(weights), trial.size(weights))


def _ratios(trials: dict[str, Trial], reduction: str) -> tuple[str, ...]:
    lines = []
    for name, trial in trials.items():
        whole, split = trial.updates(reduction)
        ratio = float(torch.dot(whole, split) / torch.dot(whole, whole).clamp(min=1e-300))
        counts = sum(piece.count for piece in trial.pieces)
        lines.append(
            f"{name}: {len(trial.pieces)} micro-batches give {ratio:.6g} times the whole batch's "
            f"gradient; counts {counts:.6g}, whole {trial.whole.count:.6g}"
        )
    return tuple(lines)


def _shares(name: str, trial: Trial, reduction: str, ruler: Ruler) -> str:
    """The weights with which the whole batch's gradient is made of the others, if it is."""
    pieces = [piece for piece in trial.pieces if piece.count]
    columns = torch.stack([piece.gradient for piece in pieces], 1)
    if not _proves(len(pieces), trial.whole.gradient):
        return ""
    norms = columns.norm(dim=0)
    if not bool((norms > 0).all()):
        return ""
    unit = columns / norms
    solved = torch.linalg.lstsq(unit, trial.whole.gradient[:, None]).solution[:, 0]
    weights = (solved / norms).tolist()
    found = Trial(trial.whole, pieces)
    scale = found.size(weights)
    # Columns that are nearly parallel have weights that are not sure, and fit anything near them.
    if min(weights) <= 0 or not ruler.alike(trial.whole.gradient, found.combined(weights), scale):
        return ""
    smallest = float(torch.linalg.svdvals(unit)[-1])
    unsure = ruler.bound * float(scale.norm()) / smallest if smallest else float("inf")
    if not _of_a_mean(found, weights, [4 * unsure / float(norm) for norm in norms], ruler.bound):
        return ""
    total = sum(piece.count for piece in pieces)
    declared = [p.count / total if reduction == "mean" else 1.0 for p in pieces]
    if reduction != "mean" and abs(sum(weights) - 1) < 1e-6:
        declared = [
            p.count / total for p in pieces
        ]  # it is a mean, of other terms than were counted
    return (
        f"{name}: in the whole batch its micro-batches weigh {_listed(weights)}; "
        f"by the counts they would weigh {_listed(declared)}"
    )


def _of_a_mean(
    trial: Trial, weights: Sequence[float], unsure: Sequence[float], bound: float
) -> bool:
    """Whether weights are shares of terms, by which the loss itself is made up too.

    Shares add up to one: as they are, or where a mean was multiplied by the count or the samples,
    once that is taken out. `sqrt` and `log` of a sum over the batch have weights as well, for
    their gradients are parallel to the sum's, but those are none of terms.

    Args:
        trial: whole, and the pieces that the weights are for.
        weights: of the pieces' gradients.
        unsure: by how much each weight may be off.
        bound: what rounding may make of a relative distance.
    """
    counts = [piece.count for piece in trial.pieces]
    samples = [float(piece.samples) for piece in trial.pieces]
    ones = [1.0] * len(counts)
    slack = sum(unsure) + 1e-9
    shares = any(
        total and abs(sum(w * n for w, n in zip(weights, of, strict=True)) / total - 1) <= slack
        for of, total in ((ones, 1.0), (counts, sum(counts)), (samples, sum(samples)))
    )
    losses = [piece.loss for piece in trial.pieces]
    apart = sum(w * loss for w, loss in zip(weights, losses, strict=True)) - trial.whole.loss
    size = sum(abs(w * loss) for w, loss in zip(weights, losses, strict=True))
    reach = sum(off * abs(loss) for off, loss in zip(unsure, losses, strict=True))
    return shares and abs(apart) <= reach + (bound + 1e-9) * (size + abs(trial.whole.loss))


def _proves(unknowns: int, gradient: Tensor) -> bool:
    """As many equations as unknowns are always solved, and prove nothing."""
    return len(gradient) > 2 * unknowns


def _constant(trials: dict[str, Trial], ruler: Ruler) -> tuple[str, ...]:
    """A part that every micro-batch brings whole, if that is what is too much."""
    extra: dict[int, tuple[Tensor, Tensor]] = {}
    for trial in trials.values():
        times = len(trial.pieces) - 1
        if times:
            excess = (trial.combined() - trial.whole.gradient) / times
            extra.setdefault(len(trial.pieces), (excess, trial.size()))
    if len(extra) < 2:
        return ()
    (first, scale), *others = extra.values()
    if not all(ruler.alike(first, other, torch.maximum(scale, size)) for other, size in others):
        return ()
    every = [(t.combined() - t.whole.gradient) / (len(t.pieces) - 1) for t in trials.values()]
    if not all(ruler.alike(first, one, scale) for one in every):
        return ()
    return (
        f"every micro-batch beyond the first adds the same gradient again, of norm "
        f"{float(first.norm()):.3g}, whatever samples are in it "
        f"(seen in splits into {', '.join(map(str, sorted(extra)))})",
    )


def _listed(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:.4g}" for weight in weights[:6])
