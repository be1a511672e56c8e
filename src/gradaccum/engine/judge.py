"""Whether a micro-batch is finite, and what becomes of one that is not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradaccum.engine.finite import all_finite, loss_flag
from gradaccum.engine.grads import Gradients
from gradaccum.engine.loss import Part
from gradaccum.engine.window import Window
from gradaccum.errors import NonFiniteError

__all__ = ["Judge", "Rejected"]


class Rejected(Exception):
    """A micro-batch that is not finite and is to be dropped: nothing of it is in the window."""


class Judge:
    """Looks at losses before a backward, and at the gradients that it has brought.

    Args:
        gradients: where they land.
        drops: whether a bad micro-batch is dropped; else it is an error.
        scaled: whether a scaler looks at gradients itself, for a scale that is not too large.
    """

    def __init__(self, gradients: Gradients, *, drops: bool, scaled: bool) -> None:
        self._gradients = gradients
        self._drops = drops
        self._scaled = scaled

    def losses(self, window: Window, parts: list[Part]) -> bool | Tensor:
        """Whether a loss is not finite, as far as the host knows without waiting.

        Raises:
            Rejected: if it is and is to be dropped.
            NonFiniteError: if it is and is not.
        """
        return self._judge(loss_flag(parts), lambda: _bad_loss(window, parts))

    def landed(self, window: Window, parts: list[Part], bad: bool | Tensor) -> list[Part]:
        """Look at what a backward has brought; return what is to be counted of it.

        Args:
            window: it is noted there what only the device knows.
            parts: the micro-batch.
            bad: what is known of its losses.
        """
        if self._scaled:
            return parts
        finite = all_finite(self._gradients.landed())
        if isinstance(finite, bool) and isinstance(bad, bool):
            self._judge(not finite, lambda: self._bad_gradient(window))
            return parts
        flag = torch.as_tensor(bad).to(parts[0].loss.device) | ~torch.as_tensor(finite)
        if not self._drops:
            self._judge(bool(flag), lambda: self._bad_gradient(window))
            return parts
        window.flags.append(flag)
        self._gradients.void(flag)
        return [
            part._replace(
                loss=torch.where(flag, 0, part.loss.detach()),
                count=torch.where(flag, 0, torch.as_tensor(part.count, device=flag.device)),
            )
            for part in parts
        ]

    def _judge(self, bad: bool | Tensor, error: Callable[[], NonFiniteError]) -> bool | Tensor:
        """Raise if a micro-batch is known to be bad; what only the device knows is passed on."""
        if isinstance(bad, Tensor) and not self._drops:
            bad = bool(bad)
        if bad is True:
            raise Rejected if self._drops else error()
        return bad

    def _bad_gradient(self, window: Window) -> NonFiniteError:
        return NonFiniteError(
            "non-finite",
            f"The gradient of {self._gradients.first_bad()} is not finite.",
            got=f"NaN or infinity in micro-batch {_position(window)}, whose loss is finite",
            expected="finite gradients; the window is as it was before this micro-batch",
            do="micro.skip() leaves it out; or look for sqrt(0), norm(0) or a power below 1",
        )


def _bad_loss(window: Window, parts: list[Part]) -> NonFiniteError:
    part = next(part for part in parts if loss_flag([part]) is not False)
    term = f" of term {part.name!r}" if part.name else ""
    return NonFiniteError(
        "non-finite",
        f"The loss{term} is not finite.",
        got=f"{part.loss.item()} in micro-batch {_position(window)}",
        expected="a finite loss; the window is as it was before this micro-batch",
        do="micro.skip() leaves it out; or look for log(0), 0/0 or too high a learning rate",
    )


def _position(window: Window) -> str:
    return f"{window.microbatches + window.dropped + 1} of {window.expected}"
