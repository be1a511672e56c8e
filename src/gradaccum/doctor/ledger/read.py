"""Read the weight of every loss term off the graph that is about to be differentiated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from gradaccum.doctor.ledger.elements import Elements, below, ignored
from gradaccum.doctor.ledger.nodes import LOSSES, graphs, numel, opaque, short, shown
from gradaccum.doctor.ledger.walk import Arrived, walk
from gradaccum.doctor.reading import Reading, Term
from gradaccum.doctor.saved import hooked

__all__ = ["read"]

_MEAN, _SUM = 1, 2
_MOST_TERMS = 32
_READ = 4096


def read(tensors: Sequence[Any], seeds: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    """The terms of what is about to be differentiated, and the weight of each.

    The factors come from the nodes' own backward functions, run on the few scalars between a loss
    and its reductions, so they are what autograd itself will compute, to the last bit. Nothing is
    freed, no hook runs, no gradient arrives anywhere. On an accelerator it waits for the device,
    since it reads values.

    Args:
        tensors: the losses, or graph edges.
        seeds: what `backward` starts from: `gradient`, or 1 where `None`.

    Returns:
        `Reading.to_dict()`.

    Examples:
        >>> import torch
        >>> from gradaccum.doctor.ledger import read
        >>> from gradaccum.doctor.reading import Reading
        >>> weight = torch.ones(3, requires_grad=True)
        >>> loss = (weight - 1).pow(2).mean() / 4
        >>> [term] = Reading.from_dict(read([loss], [None])).terms
        >>> term.name, term.reduction, term.weight, term.count
        ('pow', 'mean', 0.25, 3.0)
    """
    roots = []
    for tensor, seed in zip(tensors, seeds, strict=True):
        node, at = _root(tensor)
        if node is None:
            return Reading(why="the loss has no graph").to_dict()
        if seed is None:
            if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
                return Reading(why="the loss is not a scalar").to_dict()
            seed = torch.ones_like(tensor)
        roots.append((node, at, seed.detach()))
    terms: list[Term] = []
    with torch.no_grad():
        for arrived in walk(roots):
            terms += _terms(arrived)
            if len(terms) > _MOST_TERMS:
                return Reading(why=f"the loss has more than {_MOST_TERMS} terms").to_dict()
    return Reading(tuple(terms)).to_dict()


def _root(tensor: Any) -> tuple[Any, int]:
    if isinstance(tensor, torch.Tensor):
        return tensor.grad_fn, tensor.output_nr
    return tensor.node, tensor.output_nr


def _terms(arrived: Arrived) -> list[Term]:
    node, name = arrived.node, short(arrived.node)
    if arrived.gradient is None:
        return [_term(arrived, shown(node), "none", None)]
    if name in LOSSES:
        return _loss(arrived)
    if name in ("Mean", "Sum"):
        return _reduction(arrived)
    if opaque(node):
        why = "it comes out of a function whose inside autograd does not show"
        return [_term(arrived, shown(node), "none", None, why=why)]
    elements = Elements(shown(node), arrived.gradient)
    if arrived.gradient.numel() > 1:
        # A vector that was differentiated with a seed for each value: a sum, weighted by them.
        found = below(node, arrived.at, arrived.gradient, [])
        return [_summed(arrived, one) for one in found]
    return [_summed(arrived, elements, reduction="none")]


def _loss(arrived: Arrived) -> list[Term]:
    node, factor = arrived.node, arrived.gradient
    if factor is None:
        return [_term(arrived, shown(node), "none", None)]
    if hooked(node):
        why = "the loss was computed under saved-tensor hooks, as in activation checkpointing"
        return [_term(arrived, shown(node), "none", None, why=why)]
    try:
        reduction, input = node._saved_reduction, node._saved_self
        left_out = ignored(node)
    except RuntimeError:
        why = "a tensor of the loss was changed in place since its forward"
        return [_term(arrived, shown(node), "none", None, why=why)]
    if reduction not in (_MEAN, _SUM):
        return [_summed(arrived, one) for one in below(node, arrived.at, factor, [])]
    each_is = _values(node, input)
    count = float(each_is if left_out is None else int((~left_out).sum()))
    value = _number(factor)
    total = count
    if getattr(node, "_saved_total_weight", None) is not None and left_out is not None:
        weighted = node._saved_weight is not None
        if weighted:
            chosen = node._saved_weight[node._saved_target.clamp(min=0)]
            total = float(torch.where(left_out, torch.zeros_like(chosen), chosen).double().sum())
    if reduction == _MEAN:
        # The division happens inside the node, so its rounding is copied: factor / total.
        each = _number(factor / total) if total else None
        if total != count:
            each = None
        weight, how = value, "mean"
    else:
        weight, how = value * total, "sum"
        each = value if total == count else None
    return [
        _term(
            arrived,
            shown(node),
            how,
            weight,
            each=each,
            count=total,
            masked=left_out is not None,
            coupled=_coupled(node, input),
        )
    ]


def _values(node: Any, input: torch.Tensor) -> int:
    """How many loss values the node made before it reduced them."""
    if short(node) in ("NllLoss", "NllLoss2D"):
        return node._saved_target.numel()
    if short(node) in ("MultiMarginLoss", "MultilabelMarginLoss"):
        return input.shape[0] if input.dim() > 1 else 1
    target = getattr(node, "_saved_target", None)
    if target is None or target.shape == input.shape:
        return input.numel()
    # torch.broadcast_shapes would import a second's worth of modules.
    sizes = zip_longest(reversed(input.shape), reversed(target.shape), fillvalue=1)
    return math.prod(max(pair) for pair in sizes)


def _coupled(node: Any, input: torch.Tensor) -> bool:
    """Square logits from a product of two encodings, each row's target being itself."""
    if short(node) != "NllLoss" or input.dim() != 2 or input.shape[0] != input.shape[1]:
        return False
    target = node._saved_target
    if not target.numel() or not torch.equal(target, torch.arange(len(target)).to(target)):
        return False
    under = node.next_functions[0][0]
    for _ in range(12):
        if under is None:
            return False
        if short(under) in ("Mm", "Bmm"):
            return len(graphs(under)) == 2
        inputs = graphs(under)
        if short(under) not in ("LogSoftmax", "Mul", "Div", "T", "Transpose", "ToCopy"):
            return False
        under = under.next_functions[inputs[0]][0] if inputs else None
    return False


def _reduction(arrived: Arrived) -> list[Term]:
    node, factor = arrived.node, arrived.gradient
    how = short(node).lower()
    if factor is None:
        return [_term(arrived, how, how, None)]
    count = numel(node)
    under, at = node.next_functions[graphs(node)[0]]
    if factor.numel() != 1:  # a reduction over some dimensions of values that have their own seeds
        elements = below(node, arrived.at, factor, [])
        return [_summed(arrived, one) for one in elements]
    each = factor.reshape(()) / count if how == "mean" else factor.reshape(())
    size = tuple(int(one) for one in node._saved_self_sym_sizes)
    divisors = [one.value for one in arrived.factors if one.how == "div"]
    found = below(under, at, each.expand(size), divisors)
    if len(found) == 1 and not found[0].masked and not found[0].finer:
        value = _number(factor)
        weight = value if how == "mean" else value * count
        return [
            _term(
                arrived,
                found[0].name,
                how,
                weight,
                each=_number(each),
                count=float(count),
            )
        ]
    return [_summed(arrived, one, reduction=how) for one in found]


def _summed(arrived: Arrived, elements: Elements, *, reduction: str = "sum") -> Term:
    """A term whose elements each have a weight of their own."""
    gradient = elements.gradient
    if gradient.is_complex():
        gradient = gradient.real
    counted = gradient[gradient != 0]
    count = counted.numel()
    each = weight = None
    if count:
        low, high = counted.min(), counted.max()
        each = _number(low) if bool(low == high) else None
        weight = each * count if each is not None else _total(counted)
    else:
        weight = 0.0
    return _term(
        arrived,
        elements.name,
        reduction,
        weight,
        each=each,
        count=float(count),
        masked=elements.masked,
    )


def _total(weights: torch.Tensor) -> float:
    """Their sum, rounded once where they are few enough to be read."""
    if weights.numel() <= _READ:
        return math.fsum(weights.double().tolist())
    return _number(weights.double().sum())


def _number(value: torch.Tensor) -> float:
    return float(value.real if value.is_complex() else value)


def _term(arrived: Arrived, name: str, reduction: str, weight: float | None, **more: Any) -> Term:
    why = more.pop("why", "") or arrived.why
    if weight is not None and not math.isfinite(weight):
        weight, why = None, why or "it is not finite"
    if weight is None and not why:
        why = "the graph does not tell"
    try:
        serial = arrived.node._sequence_nr()
    except AttributeError:
        serial = -1
    path = f"{arrived.path}/{short(arrived.node)}"
    known = {} if weight is None else more
    return Term(name, path, serial, reduction, weight, factors=arrived.factors, why=why, **known)
