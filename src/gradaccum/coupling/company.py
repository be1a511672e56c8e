"""Whether a sample's loss depends on the samples beside it, and which module makes it so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.coupling.examine import Examination
from gradaccum.coupling.runs import Conditions
from gradaccum.planner.split import even
from gradaccum.records.report import Cause

__all__ = ["coupled"]


class _Company(NamedTuple):
    """A sample, and two sets of others of one size to put beside it."""

    sample: int
    beside: list[int]
    instead: list[int]


def coupled(exam: Examination, held: Conditions, *, small: bool) -> list[Cause]:
    """Put a sample beside others, and see its loss and its activations move.

    Args:
        exam: runs them.
        held: what is held still.
        small: whether the gradient is too short to rule out a mean of means, which moves too.
    """
    n = len(exam.runner.samples)
    if n == 2 and not small:
        return [_pair(exam, held)]
    lines = ["no shares of the micro-batches make up the whole batch's gradient"]
    companies = [_company(sample, n) for sample in sorted({0, n // 2, n - 1})]
    losses = ""
    if not small:
        losses = next(filter(None, (_losses(exam, held, one) for one in companies)), "")
    module = next(filter(None, (_first_moved(exam, held, one) for one in companies)), "")
    if losses:
        lines.append(losses)
    if module:
        title = (
            f"The model couples samples, first in `{module}`: a sample's output depends on the "
            "others beside it."
        )
        mend = "normalise or attend within a sample; or do not split this batch"
        return [Cause("coupled", title, tuple(lines), mend, (module,), "GA702")]
    if not losses and not small:
        losses = _regrouped(exam, held)
        lines += [losses] if losses else []
    if not losses:
        return []
    lines.append("no module's output for the sample moves, so it is the loss that couples")
    return [_loss_couples(lines)]


def _loss_couples(lines: list[str]) -> Cause:
    return Cause(
        "coupled",
        "The loss couples samples: a sample's loss depends on the others beside it.",
        tuple(lines),
        "gradient caching serves such losses; a split batch has fewer pairs",
        fault="GA702",
    )


def _company(sample: int, n: int) -> _Company:
    others = [i for i in range(n) if i != sample]
    half = max(1, len(others) // 2)
    return _Company(sample, others[:half], others[-half:])


def _pair(exam: Examination, held: Conditions) -> Cause:
    one, other, both = (_share(exam, held, indices) for indices in ([0], [1], [0, 1]))
    return _loss_couples(
        [
            f"together two samples have a loss of {both.loss:.6g}, alone {one.loss:.6g} and "
            f"{other.loss:.6g}"
        ]
    )


class _Share(NamedTuple):
    """What some samples bring: as it was handed over, and times the count."""

    loss: float
    counted: float
    gradient: Tensor
    gradient_counted: Tensor

    def less(self, other: _Share) -> _Share:
        return _Share(
            self.loss - other.loss,
            self.counted - other.counted,
            self.gradient - other.gradient,
            self.gradient_counted - other.gradient_counted,
        )

    def size(self, other: _Share) -> tuple[Tensor, Tensor]:
        return (
            self.gradient.abs() + other.gradient.abs(),
            self.gradient_counted.abs() + other.gradient_counted.abs(),
        )


def _losses(exam: Examination, held: Conditions, company: _Company) -> str:
    """What a sample adds to two companies, if it is not the same.

    The loss may be a sum or a mean, whatever was said of it: both ways of adding must differ.
    """
    sample, beside, instead = company
    try:
        with_one, one = (_share(exam, held, g) for g in ([sample, *beside], beside))
        with_other, other = (_share(exam, held, g) for g in ([sample, *instead], instead))
    except Exception:  # noqa: BLE001 - a loss of too few samples may fail; it is evidence only
        return ""
    first, second = with_one.less(one), with_other.less(other)
    sizes = [a + b for a, b in zip(with_one.size(one), with_other.size(other), strict=True)]
    far = min(
        exam.ruler.distance(first.gradient, second.gradient, sizes[0])[0],
        exam.ruler.distance(first.gradient_counted, second.gradient_counted, sizes[1])[0],
    )
    if not far > 4 * exam.bound:
        return ""
    mean = exam.runner.reduction == "mean"
    a, b = (share.counted if mean else share.loss for share in (first, second))
    return (
        f"sample {sample} adds {a:.6g} to the loss beside samples {_span(beside)}, {b:.6g} beside "
        f"samples {_span(instead)}; its gradient moves by {far:.1e}"
    )


def _regrouped(exam: Examination, held: Conditions) -> str:
    """What all micro-batches add up to, where it depends on which samples are together.

    A loss may couple samples too little for a single one to show it, as the penalty on the load of
    experts does. Whole groups show all of it. As above, both ways of adding must differ.
    """
    samples = exam.runner.samples
    n = len(samples)
    parts = min(4, n // 2)
    if parts < 2:
        return ""
    ways = even(n, parts), [range(start, n, parts) for start in range(parts)]
    try:
        shares = [[_share(exam, held, group) for group in way] for way in ways]
    except Exception:  # noqa: BLE001 - as above
        return ""
    one, other = (_total(way) for way in shares)
    sizes = [torch.stack([abs(g) for g in kind]).sum(0) for kind in _kinds(shares[0] + shares[1])]
    far = min(
        exam.ruler.distance(one.gradient, other.gradient, sizes[0])[0],
        exam.ruler.distance(one.gradient_counted, other.gradient_counted, sizes[1])[0],
    )
    if not far > exam.bound:
        return ""
    return (
        f"{parts} micro-batches of neighbours, and of every {parts}th sample, add up to gradients "
        f"{far:.1e} apart"
    )


def _total(shares: Sequence[_Share]) -> _Share:
    gradient, counted = (torch.stack(kind).sum(0) for kind in _kinds(shares))
    return _Share(
        sum(share.loss for share in shares),
        sum(share.counted for share in shares),
        gradient,
        counted,
    )


def _kinds(shares: Sequence[_Share]) -> tuple[list[Tensor], list[Tensor]]:
    return [share.gradient for share in shares], [share.gradient_counted for share in shares]


def _share(exam: Examination, held: Conditions, indices: Sequence[int]) -> _Share:
    terms = [term[0] for term in exam.runner.run([(list(indices), None)], held).values()]
    gradients = torch.stack([term.gradient for term in terms])
    counts = torch.tensor([term.count for term in terms], dtype=torch.float64, device="cpu")
    return _Share(
        sum(term.loss for term in terms),
        sum(term.loss * term.count for term in terms),
        gradients.sum(0),
        (gradients * counts.to(gradients.device)[:, None]).sum(0),
    )


def _first_moved(exam: Examination, held: Conditions, company: _Company) -> str:
    """The first module whose output for the sample is another one in other company."""
    sample, beside, instead = company
    try:
        one = _rows(exam, held, [sample, *beside])
        other = _rows(exam, held, [sample, *instead])
    except Exception:  # noqa: BLE001 - as above
        return ""
    for (name, row), (twin, value) in zip(one, other, strict=False):
        if name != twin or row.shape != value.shape:
            return ""
        scale = max(float(row.abs().max()), float(value.abs().max())) if row.numel() else 0.0
        if row.numel() and float((row - value).abs().max()) > 4 * exam.bound * scale:
            return name
    return ""


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
    shown = ", ".join(map(str, indices[:6]))
    return shown if len(indices) <= 6 else f"{shown}, ..."
