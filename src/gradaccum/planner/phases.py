"""From what a few micro-batches took to what any takes: one small fit for each phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from gradaccum.records import Phase

__all__ = ["Run", "fit_phases"]

_SEGMENTS = 48
_GRID = 4
_NOISE = 1e-3


@dataclass(frozen=True, slots=True)
class Run:
    """What a micro-batch that was run took, beyond what was there before."""

    samples: int
    width: int
    """Of the micro-batch in elements; 1 where lengths play no part."""

    bytes: int
    """At the peak."""

    marks: tuple[int, ...] = ()
    """Around each operator in turn; empty where only the peak is known."""

    turned: int = 0
    """How many of the marks belong to the forward."""


def fit_phases(runs: Sequence[Run], widest: int = 1) -> tuple[Phase, ...]:
    """The phases of a forward and backward that can be the most expensive one.

    Each mark of the runs is fitted by itself, with no negative coefficient, to
    `1, w, w², n, n·w, n·w²`, as many of these as the runs can tell apart. Where several fits
    explain the runs alike, the one that predicts most far out is taken; and where the largest of
    all phases stays below a peak that was seen, all are lifted by what is missing.

    Args:
        runs: at least one. Where all have one number of samples, all that grows is taken to grow
            with it.
        widest: width up to which predictions are asked for. Where the runs do not reach it and
            cannot tell, what grows is taken to grow with the square.

    Examples:
        >>> phases = fit_phases([Run(2, 1, 12_000), Run(4, 1, 14_000)])
        >>> [round(phase.at(8, 1)) for phase in phases]
        [18000]
    """
    points = torch.tensor(
        [[run.samples, run.width] for run in runs], dtype=torch.float64, device="cpu"
    )
    basis = _basis(runs, widest)
    phases, noise = _aligned(runs)
    values = torch.tensor(phases, dtype=torch.float64, device="cpu")  # (runs, phases)
    values = torch.unique(values, dim=1)
    far = _monomials(_GRID * points.amax(0, keepdim=True))
    coefficients = _fit(_monomials(points), values, basis, far, noise)
    kept = _largest(coefficients, points)
    found = kept @ _monomials(points).T  # (phases, runs)
    peaks = torch.tensor([run.bytes for run in runs], dtype=torch.float64, device="cpu")
    # What the fit leaves out, and what some operator took where only the peak was seen.
    kept[:, 0] += (peaks - found.amax(0)).clamp(min=0).max()
    return tuple(
        Phase((c[0], c[1], c[2]), (c[3], c[4], c[5])) for c in (row.tolist() for row in kept)
    )


def _monomials(points: Tensor) -> Tensor:
    n, w = points[:, 0], points[:, 1]
    one = torch.ones_like(n)
    return torch.stack([one, w, w * w, n, n * w, n * w * w], dim=1)


def _basis(runs: Sequence[Run], widest: int) -> list[int]:
    """Which monomials the runs can tell apart."""
    widths = {run.width for run in runs}
    short = max(widths) < widest
    if len(widths) == 1:
        powers = [2 if short else 0]
    elif len(widths) == 2:
        # Between the two a chord lies above any parabola; beyond them a parabola above it.
        powers = [0, 2 if short else 1]
    else:
        powers = [0, 1, 2]
    # With one number of samples nothing tells what they share: to be safe, they share nothing.
    alone = len({run.samples for run in runs}) == 1
    shared = [] if alone else sorted({0, *powers})
    return [3 + power for power in powers] + shared


def _aligned(runs: Sequence[Run]) -> tuple[list[list[int]], float]:
    """By run, the values of the same phases; and by what share they may be off."""
    if not all(run.marks for run in runs):
        return [[run.bytes] for run in runs], _NOISE
    if len({(len(run.marks), run.turned) for run in runs}) == 1:
        return [list(run.marks) for run in runs], _NOISE
    # A model that loops over its input runs more operators for a wider one. Then each stretch of
    # the way forth and back is a phase; where it ends depends on the number of operators a little.
    halves = [(run.marks[: run.turned], run.marks[run.turned :]) for run in runs]
    fewest = min(len(half) for pair in halves for half in pair)
    return (
        [_segments(forth) + _segments(back) for forth, back in halves],
        max(_NOISE, 2 / max(1, fewest)),
    )


def _segments(marks: Sequence[int]) -> list[int]:
    n = len(marks)
    if n == 0:
        return [0] * _SEGMENTS
    found = []
    for segment in range(_SEGMENTS):
        start = min(segment * n // _SEGMENTS, n - 1)
        end = max(start + 1, (segment + 1) * n // _SEGMENTS)
        found.append(max(marks[start:end]))
    return found


def _fit(design: Tensor, values: Tensor, basis: Sequence[int], far: Tensor, noise: float) -> Tensor:
    """Coefficients of each phase, `(phases, 6)`, none negative, by trying all supports.

    Args:
        design: the monomials of each run, `(runs, 6)`.
        values: bytes, `(runs, phases)`.
        basis: which monomials may be used.
        far: the monomials of a micro-batch far out, `(1, 6)`.
        noise: share by which values may be off.
    """
    runs, phases = values.shape
    best = torch.zeros(phases, 6, dtype=torch.float64, device="cpu")
    least = torch.full((phases,), torch.inf, dtype=torch.float64, device="cpu")
    reach = torch.full((phases,), -torch.inf, dtype=torch.float64, device="cpu")
    scale = values.amax(0).clamp(min=1)
    # Sizes are rounded up by allocators and down by strides: fits as good as that are equally good.
    blur = noise * scale + 64
    for size in range(1, min(len(basis), runs) + 1):
        fewer = least.clone()
        for support in combinations(basis, size):
            columns = design[:, list(support)]
            weights = columns.amax(0)
            if torch.linalg.matrix_rank(columns / weights) < size:
                continue
            solved = torch.linalg.lstsq(columns / weights, values).solution / weights[:, None]
            solved = torch.where(solved.abs() * weights[:, None] < 1e-6 * scale, 0.0, solved)
            off = (columns @ solved - values).abs().amax(0)
            wide = (far[:, list(support)] @ solved)[0]
            # One more coefficient has to explain more; of as many, the one that predicts most.
            worthy = (solved >= 0).all(0) & (off < fewer - blur)
            better = worthy & ((off < least - blur) | (off <= least + blur) & (wide > reach))
            least = torch.where(better, off, least)
            reach = torch.where(better, wide, reach)
            found = torch.zeros_like(best)
            found[:, list(support)] = solved.T
            best = torch.where(better[:, None], found, best)
    return best


def _largest(coefficients: Tensor, points: Tensor) -> Tensor:
    """The phases that are the largest somewhere between one sample and very many."""
    widest = float(points[:, 1].max())
    samples = 2.0 ** torch.arange(0, 21, dtype=torch.float64, device="cpu")
    widths = torch.tensor([1.0], device="cpu")
    if widest > 1:
        widths = widest * 2.0 ** torch.arange(-8, 3, dtype=torch.float64, device="cpu")
    grid = torch.cartesian_prod(samples, widths.to(torch.float64))
    found = coefficients @ _monomials(grid).T
    winners = torch.unique(found.argmax(0))
    return coefficients[winners]
