"""Below a reduction: which of the reduced values count, and how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradaccum.doctor.ledger.nodes import LOSSES, PICKS, RESHAPES, const, graphs, shown
from gradaccum.doctor.ledger.nodes import short as kind
from gradaccum.doctor.saved import hooked

__all__ = ["Elements", "below", "ignored"]

_MOST = 1 << 20
"""Elements above which masks are not followed, so that a look stays cheap."""
_DEEPEST = 24


@dataclass(slots=True)
class Elements:
    """Loss values that one reduction reduced, and what the objective changes with each."""

    name: str
    gradient: torch.Tensor
    """The weight of each element; 0 where it does not count."""
    masked: bool = False
    finer: bool = False
    """Whether this level is the right one though its weights sum to something else."""


def below(node: Any, at: int, gradient: torch.Tensor, divisors: list[float]) -> list[Elements]:
    """The elements that a reduction reduced.

    Args:
        node: what made the reduced tensor.
        at: which of the node's outputs that is.
        gradient: the weight of each of its values.
        divisors: scalars that the sum was divided by, which tell a weighted mean's weights.
    """
    found = _follow(node, at, gradient, divisors, 0)
    if found is not None and (
        any(one.masked or one.finer for one in found) or _same(found, gradient)
    ):
        return found
    return [Elements(_name(node), gradient)]


def _same(found: list[Elements], gradient: torch.Tensor) -> bool:
    """Whether a deeper level holds the same weight, so that it is only the finer one."""
    if len(found) != 1:
        return False
    deep, top = found[0].gradient.double().sum(), gradient.double().sum()
    return bool((deep - top).abs() <= 1e-6 * top.abs())


def _name(node: Any) -> str:
    """The operation that made the values, seen through what only moves them."""
    for _ in range(_DEEPEST):
        inputs = graphs(node)
        if kind(node) not in RESHAPES | PICKS or len(inputs) != 1:
            break
        node = node.next_functions[inputs[0]][0]
    return shown(node)


def _follow(
    node: Any, at: int, gradient: torch.Tensor, divisors: list[float], depth: int
) -> list[Elements] | None:
    """Elements further down that say more than the ones here, or None."""
    name = kind(node)
    if depth > _DEEPEST or gradient.numel() > _MOST or hooked(node):
        return None
    if name in LOSSES:
        return _unreduced(node, gradient)
    inputs = graphs(node)
    if name == "Mul" and len(inputs) == 1:
        return _product(node, gradient, divisors, depth)
    if name in ("MaskedFill", "Where"):
        return _filled(node, at, gradient, divisors, depth)
    if name in ("Sum", "Mean", "Neg", "Add", "Sub", "Rsub", *RESHAPES, *PICKS) or (
        name == "Div" and len(inputs) == 1
    ):
        return _inputs(node, at, gradient, divisors, depth)
    return None


def _inputs(
    node: Any, at: int, gradient: torch.Tensor, divisors: list[float], depth: int
) -> list[Elements] | None:
    inputs = graphs(node)
    flows = _through(node, at, gradient)
    if flows is None:
        return None
    found: list[Elements] = []
    better = False
    for position in inputs:
        under, output = node.next_functions[position]
        flow = flows[position]
        if flow is None:
            continue
        deeper = _follow(under, output, flow, divisors, depth + 1)
        better = better or deeper is not None
        found += deeper if deeper is not None else [Elements(_name(under), flow)]
    return found if better else None


def _through(node: Any, at: int, gradient: torch.Tensor) -> tuple[Any, ...] | None:
    """What the node's own backward makes of the weights: bit for bit what autograd will."""
    metadata = node._input_metadata
    outputs = [gradient if index == at else None for index in range(len(metadata))]
    for index, one in enumerate(metadata):
        if outputs[index] is None:
            outputs[index] = torch.zeros(tuple(one.shape), dtype=one.dtype, device=one.device)
    try:
        flows = node(*outputs)
    except RuntimeError:  # a saved tensor was changed in place since, or is freed
        return None
    return flows if isinstance(flows, tuple) else (flows,)


def _unreduced(node: Any, gradient: torch.Tensor) -> list[Elements] | None:
    """A loss with `reduction="none"`: its own targets say which elements count."""
    if node._saved_reduction != 0:
        return None
    left_out = ignored(node)
    if left_out is None:
        return [Elements(shown(node), gradient)]
    kept = torch.where(left_out, torch.zeros_like(gradient), gradient)
    return [Elements(shown(node), kept, masked=True)]


def ignored(node: Any) -> torch.Tensor | None:
    """Which targets the loss ignores, in the shape of its unreduced output."""
    if kind(node) not in ("NllLoss", "NllLoss2D"):
        return None
    return node._saved_target == node._saved_ignore_index


def _product(
    node: Any, gradient: torch.Tensor, divisors: list[float], depth: int
) -> list[Elements] | None:
    position = graphs(node)[0]
    under, output = node.next_functions[position]
    factor = const(node)
    flows = _through(node, 0, gradient)
    if factor is None or flows is None:
        return None
    flow = flows[position]
    deeper = _follow(under, output, flow, divisors, depth + 1)
    if not isinstance(factor, torch.Tensor) or factor.numel() == 1:
        return deeper
    if kind(under) == "LogSoftmax":
        # Targets that are probabilities: each row of the logits makes one loss value.
        row = gradient[..., 0]
        if bool((gradient == row.unsqueeze(-1)).all()):
            return [Elements("cross_entropy", -row, finer=True)]
        return None
    if not _is_mask(factor) and not _weighs(factor, gradient, divisors):
        return None
    if kind(_moved(under)) == "torch::autograd::AccumulateGrad":
        return None  # a parameter times data, not losses times a mask
    if deeper is None:
        return [Elements(_name(under), flow, masked=True)]
    return [Elements(one.name, one.gradient, True, one.finer) for one in deeper]


def _moved(node: Any) -> Any:
    for _ in range(_DEEPEST):
        inputs = graphs(node)
        if (kind(node) not in RESHAPES | PICKS and kind(node) != "Expand") or len(inputs) != 1:
            break
        node = node.next_functions[inputs[0]][0]
    return node


def _is_mask(factor: torch.Tensor) -> bool:
    return factor.dtype == torch.bool or bool(((factor == 0) | (factor == 1)).all())


def _weighs(factor: torch.Tensor, gradient: torch.Tensor, divisors: list[float]) -> bool:
    """Whether the sum is divided by the factors' own sum: a weighted mean."""
    total = float(factor.double().expand(gradient.shape).sum())
    return any(abs(one - total) <= 1e-5 * abs(total) for one in divisors if total)


def _filled(
    node: Any, at: int, gradient: torch.Tensor, divisors: list[float], depth: int
) -> list[Elements] | None:
    flows = _through(node, at, gradient)
    if flows is None:
        return None
    found = []
    for position in graphs(node):
        under, output = node.next_functions[position]
        flow = flows[position]
        if flow is None:
            continue
        deeper = _follow(under, output, flow, divisors, depth + 1)
        if deeper is None:
            deeper = [Elements(_name(under), flow)]
        found += [Elements(one.name, one.gradient, True, one.finer) for one in deeper]
    return found
