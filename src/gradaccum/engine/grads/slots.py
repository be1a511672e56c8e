"""Moves gradients in and out of parameters' `.grad`, without a copy."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = [
    "GradientSum",
    "apart",
    "clear",
    "coalesce",
    "fill",
    "grad_of",
    "put",
    "separate",
    "take",
]

GradientSum: TypeAlias = list[Tensor | None]
"""One gradient for each parameter, in the optimizers' order; `None` where none arrived."""

grad_of = operator.attrgetter("grad")


def clear(parameters: Iterable[nn.Parameter]) -> None:
    """Let no parameter have a gradient."""
    for parameter in parameters:
        parameter.grad = None


def take(parameters: Sequence[nn.Parameter]) -> GradientSum:
    """Move all gradients out of the parameters."""
    taken = list(map(grad_of, parameters))
    clear(parameters)
    return taken


def put(parameters: Sequence[nn.Parameter], grads: GradientSum) -> None:
    """Move gradients into the parameters."""
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def separate(parameters: Iterable[nn.Parameter], seeds: Iterable[Tensor | None] = ()) -> None:
    """Give every gradient memory of its own.

    Parameters that meet through views get one gradient tensor between them (pytorch#34082), and one
    that is a view away from the loss gets the seed itself: what is added to, or scaled in, one
    would be in the other too.
    """
    seen = {seed.untyped_storage().data_ptr() for seed in seeds if seed is not None}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None or grad.layout is not torch.strided:
            continue
        memory = grad.untyped_storage().data_ptr()
        if memory in seen:
            parameter.grad = grad.clone()
        seen.add(memory)


def coalesce(parameters: Iterable[nn.Parameter]) -> None:
    """List each row of a sparse gradient once: its size is that of the rows' sums."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


@contextmanager
def apart(parameters: Sequence[nn.Parameter]) -> Generator[None]:
    """Within it, no parameter has a gradient at first; afterwards each has its own again."""
    grads = take(parameters)
    try:
        yield
    finally:
        put(parameters, grads)


def fill(parameters: Iterable[nn.Parameter]) -> int:
    """Zeros in the gradients that are there, as in mid-window; returns what a window keeps of them.

    A sparse gradient is taken away, since the next would be appended to it; over a window it may
    grow to all rows of its parameter.
    """
    size = 0
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            parameter.grad = None
        else:
            grad.zero_()
        size += grad.numel() * grad.element_size()
    return size
