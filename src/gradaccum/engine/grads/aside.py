"""A window's sums, out of `.grad` while a micro-batch lands there: so it can be undone.

The additions are those that autograd would make, in the same order: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradaccum.engine.grads.slots import GradientSum, clear, put, take

__all__ = ["Aside"]


class Aside:
    """The sums of a window while one micro-batch is on its way.

    Args:
        parameters: whose gradients are summed; their `.grad` is empty meanwhile.
        sums: of all terms, or of the first.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sums: GradientSum) -> None:
        self._parameters = parameters
        self._landed: dict[str, GradientSum] = {}
        self.sums = sums
        self.changing = False
        """Whether sums are being added to: from here on nothing can be undone."""
        clear(parameters)

    def land(self, name: str) -> None:
        """Set aside what has landed, to be added to the sums of a term of its own."""
        self._landed[name] = take(self._parameters)

    def join(self, terms: dict[str, GradientSum]) -> None:
        """Add what has landed to the sums, and put those back into `.grad`.

        What may fail for want of memory comes first and changes no value.

        Args:
            terms: the sums of further terms.
        """
        none: GradientSum = [None] * len(self.sums)
        pairs = [(self.sums, take(self._parameters))]
        pairs += [(terms.get(name, none), grads) for name, grads in self._landed.items()]
        dense: list[tuple[Tensor, Tensor]] = []
        joined: list[GradientSum] = []
        for sums, grads in pairs:
            both = zip(sums, grads, strict=True)
            joined.append([_joined(total, grad, dense) for total, grad in both])
        self.changing = True
        with torch.no_grad():
            for total, grad in dense:
                total.add_(grad)
        own, *others = joined
        terms.update(zip(self._landed, others, strict=True))
        put(self._parameters, own)
        self.changing = False

    def undo(self) -> bool:
        """Drop what has landed and put the sums back; return whether they are what they were."""
        put(self._parameters, self.sums)
        return not self.changing


def _joined(
    total: Tensor | None, grad: Tensor | None, dense: list[tuple[Tensor, Tensor]]
) -> Tensor | None:
    """The sum of both; dense ones are added later, in place."""
    if total is None or grad is None:
        return grad if total is None else total
    if not total.is_sparse and not grad.is_sparse:
        dense.append((total, grad))
        return total
    with torch.no_grad():
        both = grad + total if total.is_sparse and not grad.is_sparse else total + grad
        if both.is_sparse and both._nnz() > 2 * both.shape[0]:  # as where sums stay in `.grad`
            return both.coalesce()
        return both
