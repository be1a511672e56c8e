"""The last factors of a window: what its gradients are multiplied by, once its counts are known.

Where they go, so that they cost no pass over the gradients:

1. nowhere, where every count was known ahead or all are equal: they are 1;
2. into the coefficient of `clip_norm`, which multiplies the gradients anyhow;
3. into `optimizer.grad_scale`, which a fused optimizer divides by while it steps;
4. else into the last micro-batch: its gradient is added to `factor · gradient` in the one pass
   that adding takes.
"""

from __future__ import annotations

import math

from torch import Tensor

from gradaccum.engine.loss import Count, Part, is_one, is_zero
from gradaccum.engine.window import Window
from gradaccum.errors import InputError, LoopError

__all__ = ["last_factors", "only"]


def last_factors(window: Window, parts: list[Part], *, whole: bool) -> dict[str, Count]:
    """Each term's last factor, once it is sure that the denominators are usable.

    Args:
        window: what is in it.
        parts: the micro-batch that is about to be added, if one is.
        whole: whether with it the window has all that it was opened for.

    Raises:
        InputError: if no term has a count, or the counts are not those that were declared.
        LoopError: if terms that share one sum of gradients need different factors.
    """
    totals = window.totals(parts)
    if all(is_zero(total) for total in totals.values()):
        raise InputError(
            "window-without-count",
            "The window holds no loss term, so its mean is undefined.",
            got=f"a total count of 0 over {window.microbatches + bool(parts)} micro-batches",
            expected="at least one term that is not ignored",
            do="acc.discard() and micro.skip() leave it out; look for ignored labels",
        )
    if not window.declared and len(totals) == 1:
        return window.factors(totals, whole=whole)
    if whole:
        _refuse_other_counts(window, totals)
    factors = window.factors(totals, whole=whole)
    alike = len(factors) == 1 or all(map(is_one, factors.values()))
    if window.joint and not alike and len({float(f) for f in factors.values()}) > 1:
        raise LoopError(
            "terms-left-out",
            "With counts that were known ahead all terms share one sum of gradients, and what "
            "was left out of the window changed their counts by different factors.",
            got=f"totals {totals} where {window.declared} were declared",
            expected="all micro-batches of the window, or a share of it that is the same for "
            "every term",
            do="acc.discard() and micro.skip() leave the window out; without `counts=` any "
            "micro-batch may be skipped",
        )
    return factors


def _refuse_other_counts(window: Window, totals: dict[str, Count]) -> None:
    for name, declared in window.declared.items():
        total = totals.get(name, 0)
        if not isinstance(total, Tensor) and not math.isclose(total, declared, rel_tol=1e-9):
            raise InputError(
                "declared-count",
                "The counts that came with the losses do not add up to the count known ahead.",
                got=f"{total} terms{f' of {name!r}' if name else ''}, {declared} declared",
                expected="`counts` that count the same terms as your loss",
                do="count with the same mask in both places, or leave `counts` out",
            )


def only(factors: dict[str, Count]) -> Count:
    """The one factor of all terms: terms with different ones have been merged."""
    return next(iter(factors.values()))
