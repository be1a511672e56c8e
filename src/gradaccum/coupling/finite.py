"""Where a loss or its gradient stops being finite: nothing can be compared with NaN."""

from __future__ import annotations

import math

import torch

from gradaccum.coupling.runs import Conditions, Group, Piece, Runner
from gradaccum.engine.memory.refused import batch_tensors
from gradaccum.planner.split import Samples
from gradaccum.records.report import Cause

__all__ = ["all_finite", "not_finite"]

_SHOWN = 8


def all_finite(pieces: dict[str, list[Piece]]) -> bool:
    """Whether no loss and no gradient of a run has NaN or infinity."""
    return all(piece.finite for term in pieces.values() for piece in term)


def not_finite(runner: Runner, whole: Group, pieces: dict[str, list[Piece]], dtype: str) -> Cause:
    """The cause of a whole batch that has no finite gradient, with where it comes from.

    Args:
        runner: ran it; runs parts of it, to find the samples.
        whole: the group of all samples.
        pieces: what the whole batch gave.
        dtype: what it was computed in.
    """
    lines, where = [], []
    loss_too = False
    for name, (piece, *_) in pieces.items():
        of = f" of term {name!r}" if name else ""
        if not math.isfinite(piece.loss):
            loss_too = True
            lines.append(f"the whole batch's loss{of} is {piece.loss} in {dtype}")
        elif not piece.finite:
            bad = _parameters(runner, piece)
            where += [one for one in bad if one not in where]
            lines.append(
                f"the whole batch's loss{of} is {piece.loss:.6g} in {dtype}, but NaN or infinity "
                f"is in the gradient of {_listed(bad)}"
            )
    runner.begin(Conditions())  # else NaN is in the statistics that this very forward moved
    tensors = [*runner.stage.model.named_parameters(), *runner.stage.model.named_buffers()]
    broken = [name for name, tensor in tensors if bool(tensor.isnan().any())]
    given = [i for i in whole[0] if _holds(runner.samples, i, whole[1])]
    if broken:
        lines.append(f"NaN is in the model already: {_listed(broken)}")
    if given:
        lines.append(f"NaN or infinity is in the batch already: samples {_numbers(given)}")
    fewest = _fewest(runner, list(whole[0]))
    if len(fewest) < len(whole[0]):
        lines.append(f"samples {_numbers(fewest)} alone have it too")
    mend = (
        "look for log(0), 0/0, a NaN in the data, or numbers too large for the dtype"
        if loss_too
        else "look for sqrt(0), norm(0) or a power below 1: the loss is finite, its slope is not"
    )
    return Cause(
        "not-finite",
        "The loss of the whole batch is not finite, so there is nothing to compare."
        if loss_too
        else "The gradient of the whole batch is not finite, so there is nothing to compare.",
        tuple(lines),
        mend,
        tuple(broken or where)[:_SHOWN],
    )


def _parameters(runner: Runner, piece: Piece) -> list[str]:
    found, start = [], 0
    for name, parameter in runner.stage.parameters.items():
        size = parameter.numel() * (2 if parameter.is_complex() else 1)
        if not bool(torch.isfinite(piece.gradient[start : start + size]).all()):
            found.append(name)
        start += size
    return found


def _holds(samples: Samples, index: int, width: int | None) -> bool:
    tensors = batch_tensors(samples.microbatch([index], width))
    return any(not bool(torch.isfinite(tensor).all()) for _, tensor in tensors)


def _fewest(runner: Runner, indices: list[int]) -> list[int]:
    """The last of ever smaller halves that is not finite: a few runs, whatever is in them."""
    while len(indices) > 1:
        half = len(indices) // 2
        parts = (indices[:half], indices[half:])
        bad = next((part for part in parts if _is_bad(runner, part)), None)
        if bad is None:
            break
        indices = bad
    return indices


def _is_bad(runner: Runner, indices: list[int]) -> bool:
    try:
        return not all_finite(runner.run([(indices, None)], Conditions()))
    except Exception:  # noqa: BLE001 - a loss of too few samples may fail; it is evidence only
        return False


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _numbers(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN]))
    return shown if len(indices) <= _SHOWN else f"{shown} and {len(indices) - _SHOWN} more"
