"""What one optimizer step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Update"]


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did.

    Tensors are on the parameters' device and nothing was read from it to make this record: reading
    a tensor (printing it, `float()`, `if`) is what costs a host sync.
    """

    index: int
    """Number of this update; the first is 0. Skipped ones count."""

    loss: Tensor
    """The objective that was optimised, over the whole window; shape `()`. With several terms,
    the sum of the terms' own means."""

    count: int | float | Tensor | Mapping[str, int | float | Tensor]
    """Loss terms in the window, the denominator of `loss`; a number where the host knows it, a
    tensor of shape `()` where only the device does; with several terms, one for each name."""

    microbatches: int
    """Micro-batches in the window."""

    grad_norm: Tensor | None
    """Total norm of the update's gradient before it was clipped, shape `()`; `None` without
    `clip_norm`, since a norm costs a pass over the gradients (`clip_norm=math.inf` asks for it)."""

    lr: float | Tensor
    """Learning rate of the first parameter group in this step."""

    skipped: bool | Tensor
    """Whether the scaler found an infinity, so that no parameter changed; a tensor of shape `()`
    where only the device knows."""

    dropped: int | Tensor = 0
    """Micro-batches left out of the window (`micro.skip()`, `on_nonfinite="drop"`); a tensor of
    shape `()` where only the device knows."""

    dropped_at: tuple[int, ...] | Tensor = ()
    """Positions in the window of micro-batches that `on_nonfinite="drop"` left out; where only the
    device knows, a tensor of bools, one for each micro-batch."""

    dropped_samples: tuple[int, ...] = ()
    """Positions in the batch of samples that `on_nonfinite="drop"` left out of `acc.step`."""

    padding: int = 0
    """Padded elements in the window beyond the samples' lengths; 0 where no lengths were given."""

    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """Each term's own mean by name, shape `()`; empty for a loss of one term."""
