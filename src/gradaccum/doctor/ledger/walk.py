"""From the loss down to its reductions, with the factor that autograd will bring to each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gradaccum.doctor.ledger.nodes import (
    PICKS,
    RESHAPES,
    const,
    graphs,
    numel,
    outputs_alike,
    short,
    stacked,
)
from gradaccum.doctor.reading import Factor
from gradaccum.doctor.saved import hooked

__all__ = ["Arrived", "walk"]

_MOST = 4096
_FEW = 1024
"""Losses in one stack that are followed one by one."""
_LINEAR = {"Add", "Sub", "Rsub", "Neg", "Mul", "Div", "Dot", "Expand", *RESHAPES}


@dataclass(slots=True)
class Arrived:
    """One node at which the walk ends: a reduction, or a scalar made by something else."""

    node: Any
    gradient: torch.Tensor | None
    """The factor; `None` if it cannot be told."""
    path: str
    factors: tuple[Factor, ...]
    at: int = 0
    """Which of the node's outputs."""
    product: bool = False
    """Whether another graph's value is among the factors."""
    why: str = ""


@dataclass(slots=True)
class _Waiting:
    node: Any
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    path: str = ""
    factors: tuple[Factor, ...] = ()
    product: bool = False
    why: str = ""


def walk(roots: list[tuple[Any, int, torch.Tensor]]) -> Iterator[Arrived]:
    """Yield where the factors of some scalars' graphs end.

    Args:
        roots: for each tensor that is differentiated its node, which of the node's outputs it is,
            and its gradient (its seed).
    """
    waiting: dict[Any, _Waiting] = {}
    order: list[tuple[int, int, Any]] = []
    for number, (node, at, seed) in enumerate(roots):
        path = "" if len(roots) == 1 else f"{number}:"
        _deliver(waiting, order, node, at, seed, _Waiting(None, path=path))
    visited = 0
    while order:
        node = heapq.heappop(order)[2]
        state = waiting.pop(node)
        visited += 1
        if visited > _MOST:
            yield Arrived(node, None, state.path, (), why="the loss has too many parts to follow")
            return
        yield from _pass(state, waiting, order)


def _deliver(
    waiting: dict[Any, _Waiting],
    order: list[tuple[int, int, Any]],
    node: Any,
    output: int,
    gradient: torch.Tensor,
    origin: _Waiting,
) -> None:
    state = waiting.get(node)
    if state is None:
        state = waiting[node] = _Waiting(
            node, {}, origin.path, origin.factors, origin.product, origin.why
        )
        # Later nodes first, so that a node is passed only when all that use it were.
        heapq.heappush(order, (-node._sequence_nr(), len(order) + id(node), node))
    else:
        if state.factors != origin.factors:
            state.factors = ()
        state.why = state.why or origin.why
        state.product = state.product or origin.product
    known = state.gradients.get(output)
    state.gradients[output] = gradient if known is None else known + gradient


def _pass(
    state: _Waiting, waiting: dict[Any, _Waiting], order: list[tuple[int, int, Any]]
) -> Iterator[Arrived]:
    node, name = state.node, short(state.node)
    ends = not _passes(state)
    if ends or hooked(node):
        why = state.why
        if not ends and hooked(node):
            why = "the loss was computed under saved-tensor hooks, as in activation checkpointing"
        for at, gradient in state.gradients.items():
            known = None if why else gradient
            yield Arrived(node, known, state.path, state.factors, at, state.product, why)
        return
    inputs = graphs(node)
    product = name in ("Mul", "Div", "Dot") and len(inputs) > 1
    factors = state.factors if product else state.factors + _factor(node, name)
    flows = _flows(node, state.gradients)
    for position in inputs:
        below, output = node.next_functions[position]
        why, flow = state.why, None if flows is None else flows[position]
        if name == "Div" and position == 1:
            why = why or "it divides the loss"
        if flow is None:
            why = why or "a tensor of the loss was changed in place since its forward"
            flow = torch.zeros(())
        branch = f"{state.path}/{name}" + (str(position) if len(inputs) > 1 else "")
        origin = _Waiting(None, {}, branch, factors, state.product or product, why)
        _deliver(waiting, order, below, output, flow, origin)


def _passes(state: _Waiting) -> bool:
    """Whether the factor goes through the node unchanged in kind, to losses below it."""
    node, name = state.node, short(state.node)
    if name in ("Mean", "Sum") or name in PICKS:
        inputs = graphs(node)
        few = name in PICKS or numel(node) <= _FEW
        return few and len(inputs) == 1 and stacked(node.next_functions[inputs[0]][0])
    if name == "Expand" and numel(node) != 1:
        return False
    return name in _LINEAR and _scalar(state)


def _scalar(state: _Waiting) -> bool:
    """Whether the walk is still above all reductions: few values, each a loss of its own."""
    if short(state.node) in RESHAPES:
        return all(gradient.numel() <= _FEW for gradient in state.gradients.values())
    return all(gradient.numel() == 1 for gradient in state.gradients.values())


def _factor(node: Any, name: str) -> tuple[Factor, ...]:
    if name not in ("Mul", "Div"):
        return ()
    value = const(node)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return ()
        value = value.item()
    if value is None or isinstance(value, complex):
        return ()
    return (Factor("div" if name == "Div" else "mul", float(value)),)


def _flows(node: Any, gradients: dict[int, torch.Tensor]) -> tuple[Any, ...] | None:
    """What the node's own backward makes of the factors: bit for bit what autograd will."""
    outputs = []
    for at, one in enumerate(node._input_metadata):
        gradient = gradients.get(at)
        if gradient is None:
            gradient = torch.zeros(tuple(one.shape), dtype=one.dtype, device=one.device)
        outputs.append(gradient)
    if len(outputs) == 1 and not outputs_alike(node, outputs[0]):
        return None
    try:
        flows = node(*outputs)
    except RuntimeError:  # a saved tensor was changed in place since, or is freed
        return None
    return flows if isinstance(flows, tuple) else (flows,)
