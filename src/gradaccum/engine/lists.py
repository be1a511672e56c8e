"""What is done to lists of gradients, wherever they are kept."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradaccum.engine.loss import Count, is_one
from gradaccum.engine.wide import Sums, plain

__all__ = [
    "clip_norm_",
    "multiply_",
    "plain_sums",
    "scale_",
    "scaled_add",
    "values_of",
    "versions",
]


def plain_sums(sums: Sums) -> list[Tensor | None]:
    """Sums as tensors; packed ones as float32."""
    return [None if total is None else plain(total) for total in sums]


def scaled_add(new: Tensor | None, grad: Tensor, factor: Count) -> Tensor:
    """`new + factor · grad`, in one pass, into `grad`'s memory."""
    if new is None:
        multiply_([grad], factor)
        return grad
    if grad.is_sparse or new.is_sparse:
        multiply_([grad], factor)
        return new + grad if grad.is_sparse else grad + new
    if isinstance(factor, Tensor):
        return torch.addcmul(new, grad, factor.to(grad.device), out=grad)
    return torch.add(new, grad, alpha=factor, out=grad)


def multiply_(grads: list[Tensor], factor: Count) -> None:
    """Multiply in place, in one pass."""
    if is_one(factor) or not grads:
        return
    if isinstance(factor, Tensor):
        factor = factor.to(device=grads[0].device, non_blocking=True)
    with torch.no_grad():
        if any(grad.is_sparse for grad in grads):
            for grad in grads:
                grad.mul_(factor)
        else:
            torch._foreach_mul_(grads, factor)


def scale_(grads: Iterable[Tensor | None], factor: Count) -> None:
    """Multiply every gradient in place: one pass."""
    groups: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad is not None:
            groups.setdefault(grad.device, []).append(grad)
    for group in groups.values():
        multiply_(group, factor)


def clip_norm_(grads: list[Tensor | None], max_norm: float, factor: Count) -> Tensor:
    """Scale by `factor` and clip to a total norm in the one pass that clipping makes.

    Returns:
        The total norm of the scaled gradients before clipping; shape `()`.
    """
    norm = torch.nn.utils.get_total_norm([values_of(grad) for grad in grads if grad is not None])
    norm = norm if is_one(factor) else norm * factor
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale_(grads, scale if is_one(factor) else scale * factor)
    return norm


def values_of(grad: Tensor | None) -> Tensor:
    """The numbers of a dense or sparse gradient."""
    assert grad is not None
    return grad._values() if grad.is_sparse else grad


def versions(grads: list[Tensor | None]) -> list[int]:
    """Version counters; -1 where there is no gradient."""
    return [-1 if grad is None else grad._version for grad in grads]
