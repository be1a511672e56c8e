"""A window's sums where they stand outside of `.grad`.

Only a micro-batch's own gradients land in `.grad` then, and are committed to the sums of `wide.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradaccum.engine.grads.slots import GradientSum, clear, grad_of, put, separate, take
from gradaccum.engine.lists import plain_sums
from gradaccum.engine.loss import Count
from gradaccum.engine.wide import Sums, Wide, narrowed, plain

__all__ = ["Outside"]

_SMALL = 1 << 17
"""Bytes of gradients that wait for one another: code that is not in a cache takes longer to add a
small one than its addition does. A larger one does not wait."""


class _Waiting:
    """Positions of gradients that have arrived on a device, and how large they are together."""

    def __init__(self) -> None:
        self.positions: dict[int, None] = {}
        self.bytes = 0


class Outside:
    """The sums of an open window, and what has landed beside them.

    Args:
        parameters: whose gradients are summed.
        wide: the sums; of all terms, or of the first.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], wide: Wide) -> None:
        self._parameters = parameters
        self._wide = wide
        self._terms: dict[str, Sums] = {}
        self._landed: dict[str, GradientSum] = {}
        self.standing = False
        """Whether the sums are plain tensors by now, and wider than their parameters."""

    @property
    def sums(self) -> Sums:
        """The sums as they are kept; of all terms, or of the first."""
        return self._wide.sums

    @contextmanager
    def at_once(self, name: str | None) -> Generator[None]:
        """Within it, gradients are added to their sums as they arrive, and dropped.

        So no more than a few small ones, or one large, are there at a time. Where some have been
        added already, an error cannot be undone. The first gradient of a parameter stays in
        `.grad`, to be committed with the others.

        Args:
            name: of the term that it is a gradient of; `None` for all, or the first.
        """
        sums = self._wide.sums if name is None else self._terms.get(name, [])
        indices = {id(p): i for i, p in enumerate(self._parameters)}
        # Apart by device, since each has a thread of its own that brings its gradients.
        waiting: dict[torch.device, _Waiting] = {}

        def add(parameter: Tensor) -> None:
            grad = parameter.grad
            if grad is not None:
                few = waiting.setdefault(parameter.device, _Waiting())
                few.positions[indices[id(parameter)]] = None
                few.bytes += _SMALL if grad.is_sparse else grad.nbytes
                if few.bytes >= _SMALL:
                    flush(few)

        def flush(few: _Waiting) -> None:
            arrived = {i: self._parameters[i].grad for i in few.positions}
            few.positions, few.bytes = {}, 0
            self._wide.add_some(sums, {i: g for i, g in arrived.items() if g is not None})
            for i in arrived:
                self._parameters[i].grad = None

        hooks = []
        try:
            for parameter, total in zip(self._parameters, sums, strict=False):
                if total is not None and parameter.requires_grad:
                    hooks.append(parameter.register_post_accumulate_grad_hook(add))
            yield
            for few in waiting.values():
                flush(few)
        finally:
            self._wide.forget_room()
            for hook in hooks:
                hook.remove()

    def land(self, name: str) -> None:
        """Set aside what has landed, to be committed to the sums of a term of its own."""
        self._landed[name] = take(self._parameters)

    def landed(self) -> GradientSum:
        """What the micro-batch at hand has brought."""
        more = (grad for grads in self._landed.values() for grad in grads)
        return [*map(grad_of, self._parameters), *more]

    def commit(self, seeds: Iterable[Tensor | None] = ()) -> None:
        """Add the micro-batch that has landed to the sums.

        An error, such as a want of memory, comes before any sum has changed: it can be undone.

        Args:
            seeds: they entered the backward, and are kept for the next one.
        """
        wide = self._wide
        arrived = list(map(grad_of, self._parameters))
        new = (a is not None and b is None for a, b in zip(arrived, wide.sums, strict=True))
        if any(new):  # only a gradient that is kept as it is may share its memory
            separate(self._parameters, seeds)
            arrived = list(map(grad_of, self._parameters))
        for name in self._landed.keys() - self._terms.keys():
            self._terms[name] = [None] * len(arrived)
        others = [(self._terms[name], grads) for name, grads in self._landed.items()]
        wide.add([(wide.sums, arrived), *others])
        self._landed = {}
        clear(self._parameters)

    def undo(self) -> bool:
        """Drop what has landed; return whether the sums are what they were."""
        self._landed = {}
        clear(self._parameters)
        return not self._wide.changing

    def combine(self, factors: dict[str, Count]) -> None:
        """Make one sum of those of all terms.

        Args:
            factors: of each term; the first one's sums are the window's own.
        """
        first, *others = factors
        shares = [(self._wide.sums, factors[first])]
        shares += [(self._terms[name], factors[name]) for name in others if name in self._terms]
        self._wide.combine(shares)
        self._terms = {}

    def stand(self, *, widen: bool) -> bool:
        """Make plain tensors of the sums; where none is wide, move them into `.grad`.

        Args:
            widen: let wide sums stand also where every parameter had one gradient at most.

        Returns:
            Whether they stand outside still.
        """
        self.standing = self._wide.stand(widen=widen)
        if not self.standing:
            put(self._parameters, plain_sums(self._wide.sums))
            self._wide.sums = []
        return self.standing

    def settle(self) -> None:
        """Put the sums into `.grad`, each rounded once; one at a time."""
        sums, self.standing = self._wide.sums, False
        for i, parameter in enumerate(self._parameters):
            total, sums[i] = sums[i], None
            if total is not None:
                parameter.grad = narrowed(plain(total), parameter.dtype)

    def adopt(self, grads: GradientSum, terms: dict[str, GradientSum]) -> None:
        """Take sums from elsewhere as those of the window's micro-batches so far."""
        self._wide.sums = self._wide.adopt(grads)
        self._terms = {name: self._wide.adopt(sums) for name, sums in terms.items()}

    def plain(self) -> GradientSum:
        """The sums as tensors."""
        return plain_sums(self._wide.sums)

    def terms(self) -> dict[str, GradientSum]:
        """The sums of further terms, as tensors."""
        return {name: plain_sums(sums) for name, sums in self._terms.items()}

    def coalesce(self) -> None:
        """List each row of a sparse sum once."""
        self._wide.coalesce()
