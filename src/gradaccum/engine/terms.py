"""Runs autograd for a micro-batch whose terms may need sums of their own.

Terms with own denominators mix by factors that only the window's end knows. Until then their
gradients are sums of their own, the first term's in place.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradaccum.engine.grads import Gradients, GradientSum, Share
from gradaccum.engine.loss import Count, Part, is_one
from gradaccum.engine.precision import Scaling
from gradaccum.engine.window import Term, Window, ratio
from gradaccum.errors import LoopError

__all__ = ["Terms"]


class Terms:
    """The backwards of a window's micro-batches, and the sums of further terms.

    Args:
        gradients: where they land.
        scaling: scales the seeds.
    """

    def __init__(self, gradients: Gradients, scaling: Scaling) -> None:
        self._gradients = gradients
        self._scaling = scaling
        self.apart: dict[str, GradientSum] = {}
        """Sums of all terms but the first, where they stand beside `.grad`."""

    def backward(
        self,
        window: Window,
        parts: list[Part],
        factors: dict[str, Count] | None,
        retain_graph: bool,
        *,
        merges: bool,
    ) -> bool:
        """Run autograd; return whether the factors have been applied to the gradients.

        Args:
            window: its terms are open.
            parts: the micro-batch.
            factors: the last factor of each term, where this is the last micro-batch.
            retain_graph: as in `torch.autograd.backward`.
            merges: whether factors that are not 1 are to be applied here.
        """
        # The gradient of a mean of no terms is NaN, and it stands for nothing.
        parts = [p for p in parts if not p.mean or isinstance(p.count, Tensor) or p.count]
        if factors is None and not window.joint:
            for part in parts:
                self._backward_apart(window, part, retain_graph or part is not parts[-1])
            return False
        if factors is not None and self._must_merge(window, factors, merges):
            totals = window.totals(parts)
            seeds = [self._seed_over(p, totals[p.name]) for p in parts]
            with self.merging(factors):  # sums are scaled before anything is added to them
                self._run(parts, seeds, retain_graph, lands=True)
            return True
        self._run(parts, [self._seed(p, window.terms[p.name]) for p in parts], retain_graph)
        return False

    @contextmanager
    def merging(self, factors: dict[str, Count]) -> Generator[None]:
        """Within it, what arrives is added to `Σ factor · sum`."""
        if self._gradients.outside:
            with self._gradients.combining(factors):
                yield
            return
        before = self.apart
        try:
            with self._gradients.merging(self._take_sums(factors)):
                yield
        except BaseException:
            self.apart = before
            raise

    def _run(
        self,
        parts: list[Part],
        seeds: list[Tensor],
        retain_graph: bool,
        *,
        name: str | None = None,
        lands: bool = False,
    ) -> None:
        losses = [part.loss for part in parts]
        if not losses:
            return
        try:
            self._gradients.backward(
                losses, seeds, retain_graph=retain_graph, name=name, lands=lands
            )
        except RuntimeError as error:
            if "donated buffers" not in str(error):
                raise
            raise LoopError(
                "terms-compiled",
                "torch.compile frees this graph in its first backward, and several terms whose "
                "denominators are not known ahead need one backward each.",
                got=f"terms {', '.join(repr(part.name) for part in parts)} on a compiled graph",
                expected="counts that are known ahead, or a graph that may be kept",
                do="pass `counts=`; or set torch._functorch.config.donated_buffer = False",
            ) from error

    def _backward_apart(self, window: Window, part: Part, retain_graph: bool) -> None:
        seed = self._seed(part, window.terms[part.name])
        if part.name == next(iter(window.terms)):
            self._run([part], [seed], retain_graph)
            return
        others = self._gradients.take()
        if self._gradients.lands:
            self._run([part], [seed], retain_graph, name=part.name)
            self._gradients.separate([seed])
            self._gradients.land(part.name)
            self._gradients.set(others)
            return
        if part.name in self.apart:
            self._gradients.set(self.apart[part.name])
        self._run([part], [seed], retain_graph)
        self._gradients.separate([seed])
        self.apart[part.name] = self._gradients.take()
        self._gradients.set(others)

    def _must_merge(self, window: Window, factors: dict[str, Count], merges: bool) -> bool:
        if window.microbatches == 0:
            return False
        apart = self.apart or self._gradients.held_apart()
        if all(is_one(factor) for factor in factors.values()) and not apart:
            return False
        return len(factors) > 1 or merges

    def _take_sums(self, factors: dict[str, Count]) -> list[Share]:
        first, *others = factors
        sums: list[Share] = [(self._gradients.take_sums(), factors[first])]
        sums.extend((self.apart[name], factors[name]) for name in others if name in self.apart)
        self.apart = {}
        return sums

    def _seed(self, part: Part, term: Term) -> Tensor:
        """The seed over the term's provisional denominator, kept: most micro-batches share it."""
        if not term.fits(part):
            term.seed = self._seed_over(part, term.provisional)
            term.seed_for = part.count if part.mean else None
        assert term.seed is not None
        return term.seed

    def _seed_over(self, part: Part, denominator: Count) -> Tensor:
        """The gradient that enters the part's loss: 1, or a mean's count, over `denominator`."""
        loss = part.loss
        share = ratio(part.count if part.mean else 1, denominator)
        if isinstance(share, Tensor):
            return self._scaling.seed(share.to(device=loss.device, dtype=loss.dtype))
        return self._scaling.seed(torch.full((), share, dtype=loss.dtype, device=loss.device))
