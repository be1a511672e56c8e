"""Makes the update of a window whose micro-batches are in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradaccum.engine.finite import as_known
from gradaccum.engine.grads import Gradients
from gradaccum.engine.loss import Count, is_one
from gradaccum.engine.precision import Scaling
from gradaccum.engine.window import Window, ratio
from gradaccum.records import Update

__all__ = ["Settings", "Updater"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What an update does besides stepping; the same for every window."""

    clip_norm: float | None
    clip_value: float | None
    schedulers: tuple[Any, ...]
    on_update: Callable[[Update], object] | None
    on_nonfinite: Literal["raise", "drop", "skip"] | None


class Updater:
    """Unscales, clips, steps and zeroes, once for each window.

    Args:
        optimizers: stepped together.
        gradients: of the parameters that the optimizers own.
        scaling: the scaler's part.
        settings: what an update does besides stepping.
    """

    def __init__(
        self,
        optimizers: tuple[Optimizer, ...],
        gradients: Gradients,
        scaling: Scaling,
        settings: Settings,
    ) -> None:
        self._optimizers = optimizers
        self._gradients = gradients
        self._scaling = scaling
        self._settings = settings
        self.folds = _folds(optimizers, settings, scaled=scaling.scaler is not None)
        self._skips_on_device = scaling.scaler is None and all(map(_is_fused, optimizers))

    @property
    def takes_factor(self) -> bool:
        """Whether a last factor costs no pass here: in the clip, the optimizer, or the rounding."""
        clips = self._settings.clip_norm is not None
        return self.folds or clips or self._gradients.outside

    def make(self, window: Window, factor: Count, index: int) -> Update:
        """Step with the window's gradients, and drop them.

        Args:
            window: all of its micro-batches are in.
            factor: what the gradients are still to be multiplied by.
            index: number of the update.
        """
        unscales = self._scaling.scaler is not None and not self.folds
        self._gradients.release(unscales)
        settings = self._settings
        if unscales:
            self._scaling.unscale(self._gradients.stand_in)
        norm = None
        if settings.clip_norm is not None:
            norm = self._gradients.clip_norm_(settings.clip_norm, factor)
        elif not is_one(factor):
            if self.folds:
                self._set_grad_scale(ratio(1, factor))
            else:
                self._gradients.scale_(factor)
        if settings.clip_value is not None:
            self._gradients.clip_value_(settings.clip_value)
        self._gradients.settle()
        if unscales:
            self._scaling.look_again(self._gradients.rounded)
        if settings.on_nonfinite == "raise" and self._scaling.scaler is None:
            self._gradients.refuse_nonfinite()
        lr = self._optimizers[0].param_groups[0].get("lr", math.nan)
        try:
            skipped = self._step(self._gives_up(window, norm))
        finally:
            for optimizer in self._optimizers:
                vars(optimizer).pop("grad_scale", None)
                vars(optimizer).pop("found_inf", None)
        # An autocast region around several updates would go on with copies of the old weights.
        torch.clear_autocast_cache()
        self._gradients.zero()
        if isinstance(skipped, Tensor) and (settings.schedulers or settings.on_update):
            skipped = bool(skipped)  # only what it decides is worth the wait for the device
        return _record(window, index, norm, lr.clone() if isinstance(lr, Tensor) else lr, skipped)

    def give_up(self, window: Window, index: int) -> Update:
        """Say of a window of which nothing is left that it made no step."""
        lr = self._optimizers[0].param_groups[0].get("lr", math.nan)
        return Update(
            index=index,
            loss=torch.full((), math.nan, dtype=torch.float64, device="cpu"),
            count=0,
            microbatches=0,
            grad_norm=None,
            lr=lr.clone() if isinstance(lr, Tensor) else lr,
            skipped=True,
            dropped=window.dropped,
            dropped_at=window.dropped_at,
            dropped_samples=window.dropped_samples,
        )

    def _gives_up(self, window: Window, norm: Tensor | None) -> bool | Tensor:
        """Whether the step must not be made; a tensor of shape `()` where only the device knows."""
        how = self._settings.on_nonfinite
        if how == "drop" and window.flags:
            return torch.stack(window.flags).all()
        if how != "skip" or self._scaling.scaler is not None:
            return False
        losses = [term.loss for term in window.terms.values()]
        if not all(math.isfinite(loss) for loss in losses if not isinstance(loss, Tensor)):
            return True
        if norm is not None:
            finite = as_known(torch.isfinite(norm))
        else:
            finite = self._gradients.all_finite()
        if isinstance(finite, bool):
            return not finite
        sums = [torch.isfinite(loss) for loss in losses if isinstance(loss, Tensor)]
        return ~torch.stack([finite, *(one.to(finite.device) for one in sums)]).all()

    def _step(self, gives_up: bool | Tensor) -> bool | Tensor:
        if isinstance(gives_up, Tensor) and self._skips_on_device:
            found = gives_up.to(torch.float32)
            for optimizer in self._optimizers:
                vars(optimizer)["found_inf"] = found
                if getattr(optimizer, "grad_scale", None) is None:
                    vars(optimizer)["grad_scale"] = torch.ones_like(found)
            self._scaling.step()
            return gives_up
        # An optimizer that is not fused can only be left out by the host, which waits to know.
        if bool(gives_up):
            return True
        return self._scaling.step()

    def _set_grad_scale(self, scale: Count) -> None:
        for optimizer in self._optimizers:
            device = next(p.device for group in optimizer.param_groups for p in group["params"])
            vars(optimizer)["grad_scale"] = (
                scale.to(device=device, dtype=torch.float32)
                if isinstance(scale, Tensor)
                else torch.full((), scale, dtype=torch.float32, device=device)
            )

    def announce(self, update: Update | None) -> Update | None:
        """Tell the schedulers and `on_update` of an update that was made.

        It comes last, when the window is closed: an error in a callback leaves nothing half done.
        """
        if update is not None and update.skipped is False:
            for scheduler in self._settings.schedulers:
                scheduler.step()
            if self._settings.on_update is not None:
                self._settings.on_update(update)
        return update


def _folds(optimizers: tuple[Optimizer, ...], settings: Settings, *, scaled: bool) -> bool:
    """Whether the optimizers can divide by a scale of ours while they step."""
    clips = settings.clip_norm is not None or settings.clip_value is not None
    fused = all(map(_is_fused, optimizers))
    # Their kernels take the scale in float32, too coarse for wider gradients.
    wide = any(
        p.dtype in (torch.float64, torch.complex128)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    )
    return fused and not wide and not clips and (len(optimizers) == 1 or not scaled)


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether its kernels take `grad_scale` and `found_inf`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _record(
    window: Window, index: int, norm: Tensor | None, lr: float | Tensor, skipped: bool | Tensor
) -> Update:
    means = {name: term.mean for name, term in window.terms.items()}
    counts = {name: term.count for name, term in window.terms.items()}
    single = list(means) == [""]
    return Update(
        index=index,
        loss=means[""] if single else torch.stack(list(means.values())).sum(),
        count=counts[""] if single else counts,
        microbatches=window.microbatches,
        grad_norm=norm,
        lr=lr,
        skipped=skipped,
        dropped=window.dropped + torch.stack(window.flags).sum()
        if window.flags
        else window.dropped,
        dropped_at=torch.stack(window.flags) if window.flags else window.dropped_at,
        dropped_samples=window.dropped_samples,
        padding=window.padding,
        terms={} if single else means,
    )
