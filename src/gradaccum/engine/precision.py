"""What a `GradScaler` adds to a window: one unscale, one step, one update of the scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradaccum.errors import InterferenceError

__all__ = ["Scaling", "StandIn"]


class Scaling:
    """A scaler's part in an update; without a scaler, plain steps.

    Args:
        scaler: `torch.amp.GradScaler`, or `None`; a disabled one counts as none.
        optimizers: those that serve the accumulator's loss.
    """

    def __init__(self, scaler: GradScaler | None, optimizers: Sequence[Optimizer]) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizers = optimizers
        self._version = 0

    def seed(self, seed: Tensor) -> Tensor:
        """The gradient that enters a loss, times the scale."""
        if self.scaler is None:
            return seed
        if self.scaler._growth_tracker is None:
            # It makes two tensors with its first loss, and takes the first for both: memory may
            # have run out between them.
            self.scaler._scale = None
        scaled = self.scaler.scale(seed)
        self.mark()
        return scaled.to(seed.dtype)

    def mark(self) -> None:
        """Remember the scale as the open window's own."""
        self._version = self._scale_version()

    def refuse_rescaled(self) -> None:
        """Within a window the scale must not change: its gradients would not add up."""
        if self.scaler is not None and self._scale_version() != self._version:
            raise InterferenceError(
                "scaler-updated",
                "The scaler's scale changed in the middle of a window, so its gradients are "
                "scaled by different factors.",
                got="`scaler.update()` or `scaler.load_state_dict()` since the last micro-batch",
                expected="one scaler.update() per window, by the accumulator; accumulators whose "
                "windows overlap have one scaler each",
                do="remove `scaler.update()` and `scaler.step()` from the loop; or acc.discard()",
            )

    def unscale(self, stand_in: Callable[[Optimizer], Any]) -> None:
        """Divide the gradients by the scale, and look for infinities.

        Args:
            stand_in: what has an optimizer's gradients while they are not in its parameters, else
                `None`.
        """
        if self.scaler is None:
            return
        states = self.scaler._per_optimizer_states
        for optimizer in self._optimizers:
            other = stand_in(optimizer)
            if other is None:
                self.scaler.unscale_(optimizer)
                continue
            states[id(other)] = states[id(optimizer)]
            try:
                self.scaler.unscale_(other)
            finally:
                del states[id(other)]
        self._share_flags()

    def look_again(self, rounded: Callable[[Optimizer], list[Tensor]]) -> None:
        """Look for infinities that came of rounding to a type of a smaller range.

        Args:
            rounded: an optimizer's gradients that were unscaled before they were rounded.
        """
        if self.scaler is None:
            return
        for optimizer in self._optimizers:
            flags: dict[Any, Tensor] = self.scaler._found_inf_per_device(optimizer)
            groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for grad in rounded(optimizer):
                groups.setdefault((grad.device, grad.dtype), []).append(grad)
            for (device, _), grads in groups.items():
                one = torch.ones((), device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, flags[device], one)
        self._share_flags()

    def _share_flags(self) -> None:
        if len(self._optimizers) > 1:
            # They serve one loss: an infinity in one's gradients makes all of them skip.
            flags = self._flags()
            found = torch.stack([flag.to(flags[0].device) for flag in flags]).amax()
            for flag in flags:
                flag.copy_(found)

    def step(self) -> bool | Tensor:
        """Step every optimizer; return whether that was skipped, unread if only a device knows."""
        if self.scaler is None:
            for optimizer in self._optimizers:
                optimizer.step()
            return False
        for optimizer in self._optimizers:
            self.scaler.step(optimizer)
        flags = self._flags()
        self.scaler.update()
        return torch.stack([flag.to(flags[0].device) for flag in flags]).any()

    def reset(self) -> None:
        """Forget that gradients were unscaled: their window is dropped, and will not be stepped."""
        if self.scaler is not None:
            for optimizer in self._optimizers:
                self.scaler._per_optimizer_states.pop(id(optimizer), None)

    def _flags(self) -> list[Tensor]:
        assert self.scaler is not None
        return [
            flag
            for optimizer in self._optimizers
            for flag in self.scaler._found_inf_per_device(optimizer).values()
        ]

    def _scale_version(self) -> int:
        # The scaler makes its scale with the first loss, and changes it in place from then on.
        scale = self.scaler._scale if self.scaler is not None else None
        return -1 if scale is None else scale._version


class StandIn:
    """Sums as the gradients of parameters of their own dtype, in one group.

    Args:
        sums: what the parameters have as their gradients.
    """

    def __init__(self, sums: list[Tensor]) -> None:
        self.param_groups = [{"params": list(map(_bearer, sums))}]


def _bearer(total: Tensor) -> Tensor:
    """A tensor of one element's memory that has `total` as its gradient."""
    bearer = torch.empty((), dtype=total.dtype, device=total.device).expand(total.shape)
    bearer.grad = total
    return bearer
