"""A look over a whole graph: its leaves, and layers that no split is equal over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gradaccum.doctor.ledger.nodes import hooked, short

__all__ = ["Survey", "survey"]

_BATCHNORM = {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "BatchNormWithUpdate"}


@dataclass(slots=True)
class Survey:
    """What a whole graph holds, as far as it was walked."""

    leaves: list[Any] = field(default_factory=list)
    """Tensors that gradients will arrive at, each once."""
    nodes: int = 0
    complete: bool = True
    """Whether all of the graph was walked."""
    batchnorm: int = 0
    """BatchNorm calls in training mode."""


def survey(tensors: Iterable[Any], *, most: int = 20_000) -> Survey:
    """Walk the graphs of some tensors, each node once.

    Args:
        tensors: what is about to be differentiated.
        most: nodes after which the walk stops, so that its time is bounded.
    """
    seen = Survey()
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    known = set(stack)
    while stack:
        node = stack.pop()
        seen.nodes += 1
        if seen.nodes > most:
            seen.complete = False
            break
        variable = getattr(node, "variable", None)
        if variable is not None:
            seen.leaves.append(variable)
        name = short(node)
        if name in _BATCHNORM and not hooked(node) and getattr(node, "_saved_training", True):
            seen.batchnorm += 1
        for below, _ in node.next_functions:
            if below is not None and below not in known:
                known.add(below)
                stack.append(below)
    return seen
