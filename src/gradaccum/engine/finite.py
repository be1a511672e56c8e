"""Losses and gradients that are NaN or infinite: whether there are any, and where from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradaccum.engine.loss import Part, is_zero

__all__ = ["all_finite", "as_known", "loss_flag", "source_of"]


def as_known(flag: Tensor) -> bool | Tensor:
    """A flag as the bool that the host holds, without an operator; as it is on a device."""
    return bool(flag.tolist()) if flag.is_cpu else flag


def loss_flag(parts: Sequence[Part]) -> bool | Tensor:
    """Whether a loss is NaN or infinite: a bool on the CPU, else a tensor that nobody waits for.

    A mean over no terms is NaN by nature, and stands for nothing.
    """
    losses = [part.loss.detach() for part in parts if not (part.mean and is_zero(part.count))]
    if not losses:
        return False
    finite = as_known(torch.isfinite(losses[0] if len(losses) == 1 else torch.stack(losses)).all())
    return not finite if isinstance(finite, bool) else ~finite


def all_finite(grads: Iterable[Tensor | None]) -> bool | Tensor:
    """Whether all elements are finite: a bool on the CPU, else a tensor that nobody waits for."""
    values = [_values(grad) for grad in grads if grad is not None and grad.numel()]
    if not values:
        return True
    # One pass that only reads: the largest magnitude is NaN or infinite where any element is.
    real = [torch.view_as_real(v) if v.is_complex() else v for v in values]
    largest = torch._foreach_norm(real, float("inf"))
    device = largest[0].device
    finite = torch.isfinite(torch.stack([one.to(device, torch.float32) for one in largest])).all()
    return as_known(finite)


def source_of(model: nn.Module, run: Callable[[], Any]) -> str:
    """The module whose output is the first to hold NaN or infinity while `run` runs.

    Returns:
        Its name and kind, or an empty string if every module's output is finite.
    """
    found: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, inputs: object, output: object) -> None:
        if not found and not all(_is_finite(leaf) for leaf in _tensors(output)):
            fed = all(_is_finite(leaf) for leaf in _tensors(inputs))
            what = "" if fed else ", whose input was not finite either"
            found.append(f"`{names[module] or 'the model'}` ({type(module).__name__}{what})")

    hooks = [module.register_forward_hook(look) for module in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ""


def _tensors(tree: object) -> list[Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.detach()).all())


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad
