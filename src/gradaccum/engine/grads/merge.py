"""The last factor's way into the last accumulation: parameter by parameter, in autograd's pass."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradaccum.engine.grads.slots import GradientSum, clear
from gradaccum.engine.lists import scaled_add
from gradaccum.engine.loss import Count

__all__ = ["Merge", "Share"]

Share: TypeAlias = tuple[GradientSum, Count]
"""Gradients and the factor they enter the update with."""


class Merge:
    """Adds `Σ factor · gradient` to each gradient that arrives."""

    def __init__(self) -> None:
        # Kept where `forget` finds it: an interrupt may come between any two lines, and a hook that
        # is left behind must find nothing to add.
        self._waiting: dict[int, list[tuple[Tensor | None, Count]]] = {}
        self._hooks: list[RemovableHandle] = []

    @property
    def waiting(self) -> int:
        """How many parameters wait for their gradient to arrive."""
        return len(self._waiting)

    @contextmanager
    def into(self, parameters: Sequence[nn.Parameter], shares: list[Share]) -> Generator[None]:
        """Within it, a gradient that arrives is added to `Σ factor · gradient` of `shares`.

        The sum is scaled in the same pass that adds the new gradient, which autograd would make
        anyhow, parameter by parameter: the factor costs no pass and no memory.
        """
        self._wait(parameters, shares)
        clear(parameters)
        try:
            for parameter in parameters:
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._merge)
                    self._hooks.append(hook)
            yield
        finally:
            self._remove_hooks()
        for parameter in parameters:
            self._merge(parameter)

    def now(self, parameters: Sequence[nn.Parameter], shares: list[Share]) -> None:
        """Add `Σ factor · gradient` of `shares` to gradients that have all arrived."""
        self._wait(parameters, shares)
        for parameter in parameters:
            self._merge(parameter)

    def forget(self) -> None:
        """Add nothing to what is still to arrive."""
        self._waiting = {}

    def stop(self) -> None:
        """Leave no hook behind."""
        self._waiting = {}
        self._remove_hooks()

    def _wait(self, parameters: Sequence[nn.Parameter], shares: list[Share]) -> None:
        self._waiting = {
            id(parameter): [(grads[i], factor) for grads, factor in shares]
            for i, parameter in enumerate(parameters)
        }

    def _merge(self, parameter: Tensor) -> None:
        # A re-entrant checkpoint may bring a parameter's gradient in several pieces.
        for grad, factor in self._waiting.pop(id(parameter), ()):
            if grad is not None:
                parameter.grad = scaled_add(parameter.grad, grad, factor)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
