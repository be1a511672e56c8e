"""Whether a sample's loss depends on the samples beside it, and which module makes it so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.coupling.examine import Examination
from gradaccum.coupling.runs import Conditions
from gradaccum.records.report import Cause

__all__ = ["coupled"]


def coupled(exam: Examination, held: Conditions) -> list[Cause]:
    """Put one sample beside others, and see its loss and its activations move."""
    n = len(exam.runner.samples)
    half = max(1, (n - 1) // 2)
    beside, instead = list(range(1, 1 + half)), list(range(n - half, n))
    lines = ["no weights of the micro-batches make up the whole batch's gradient"]
    if n > 2:
        lines += _losses(exam, held, beside, instead)
    module = _first_moved(exam, held, beside, instead) if n > 2 else None
    if module is None:
        title = "The loss couples samples: a sample's loss depends on the others beside it."
        lines.append("no module's output for the sample moves, so it is the loss that couples")
        mend = "gradient caching serves such losses; a split batch has fewer pairs"
        where: tuple[str, ...] = ()
    else:
        title = f"The model couples samples, first in `{module}`: a sample's output depends on "
        title += "the others beside it."
        mend = "normalise or attend within a sample; or do not split this batch"
        where = (module,)
    return [Cause("coupled", title, tuple(lines), mend, where, "GA702")]


def _losses(
    exam: Examination, held: Conditions, beside: Sequence[int], instead: Sequence[int]
) -> list[str]:
    """What the first sample adds to the loss of two companies of one size."""
    try:
        one = _value(exam, held, [0, *beside]) - _value(exam, held, beside)
        other = _value(exam, held, [0, *instead]) - _value(exam, held, instead)
    except Exception:  # noqa: BLE001 - a loss of too few samples may fail; it is evidence only
        return []
    if abs(one - other) <= exam.bound * max(abs(one), abs(other)):
        return []
    return [
        f"sample 0 adds {one:.6g} to the loss beside samples {_span(beside)}, "
        f"{other:.6g} beside samples {_span(instead)}"
    ]


def _value(exam: Examination, held: Conditions, indices: Sequence[int]) -> float:
    pieces = exam.runner.run([(list(indices), None)], held)
    mean = exam.runner.reduction == "mean"
    return sum(term[0].loss * (term[0].count if mean else 1) for term in pieces.values())


def _first_moved(
    exam: Examination, held: Conditions, beside: Sequence[int], instead: Sequence[int]
) -> str | None:
    """The first module whose output for the first sample is another one in other company."""
    try:
        one = _rows(exam, held, [0, *beside])
        other = _rows(exam, held, [0, *instead])
    except Exception:  # noqa: BLE001 - as above
        return None
    for (name, row), (twin, value) in zip(one, other, strict=False):
        if name != twin or row.shape != value.shape:
            return None
        scale = max(float(row.abs().max()), float(value.abs().max())) if row.numel() else 0.0
        if row.numel() and float((row - value).abs().max()) > 1e3 * exam.bound * scale:
            return name
    return None


def _rows(exam: Examination, held: Conditions, indices: list[int]) -> list[tuple[str, Tensor]]:
    n, seen = len(indices), []
    model = exam.runner.stage.model

    def note(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape[0] == n:
                seen.append((name, tensor[0].detach().clone()))

        return hook

    exam.runner.begin(held)
    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            exam.runner.forward((indices, None), held)
    finally:
        for hook in hooks:
            hook.remove()
    return [(name or type(model).__name__, row) for name, row in seen]


def _span(indices: Sequence[int]) -> str:
    return str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
