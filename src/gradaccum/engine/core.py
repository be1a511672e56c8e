"""One window after another: adds micro-batches, and makes an update of each window.

Where the window's last factor goes, so that it costs no pass over the gradients:

1. nowhere, where every count was known ahead or all are equal: it is 1;
2. into the coefficient of `clip_norm`, which multiplies the gradients anyhow;
3. into `optimizer.grad_scale`, which a fused optimizer divides by while it steps;
4. else into the last micro-batch: its gradient is added to `factor · gradient` in the one pass
   that adding takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradaccum.engine.finite import all_finite, loss_flag
from gradaccum.engine.grads import Gradients, GradientSum, Share
from gradaccum.engine.loss import Count, Number, Part, is_one, is_zero
from gradaccum.engine.memory.shortage import first_line, is_shortage, kind_of
from gradaccum.engine.policies.batchnorm import Normalisation
from gradaccum.engine.precision import Scaling
from gradaccum.engine.update import Settings, Updater
from gradaccum.engine.window import Term, Usual, Window, ratio
from gradaccum.errors import (
    GradaccumError,
    InputError,
    LoopError,
    NonFiniteError,
)
from gradaccum.records import Update

__all__ = ["Core", "Rejected"]


class Rejected(Exception):
    """A micro-batch that is not finite and is to be dropped: nothing of it is in the window."""


class Core:
    """The open window and what surrounds it.

    Args:
        optimizers: stepped together, once per window.
        gradients: of the parameters that the optimizers own.
        scaling: the scaler's part.
        settings: what an update does besides stepping.
        normalisation: the policy for BatchNorm, told of all that becomes of a micro-batch.
    """

    def __init__(
        self,
        optimizers: tuple[Optimizer, ...],
        gradients: Gradients,
        scaling: Scaling,
        settings: Settings,
        normalisation: Normalisation,
    ) -> None:
        self.optimizers = optimizers
        self.gradients = gradients
        self.scaling = scaling
        self.normalisation = normalisation
        self.drops = settings.on_nonfinite == "drop"
        self._looks = settings.on_nonfinite in ("raise", "drop")
        self.must_arrive = False
        self.updates = 0
        self.window: Window | None = None
        self.apart: dict[str, GradientSum] = {}
        self.usual: dict[str, Usual] = {}
        self._updater = Updater(optimizers, gradients, scaling, settings)

    def open(
        self,
        expected: int,
        declared: dict[str, Number] | None = None,
        contents: tuple[int | float, ...] = (),
    ) -> Window:
        """Start a window; its gradients are looked at with its first micro-batch."""
        self.window = Window(expected, bool(contents), contents, declared or {})
        if self.drops:
            # A total that was known ahead holds for the whole of the window only.
            self.window.uniform, self.window.declared = True, {}
        return self.window

    def add(
        self, parts: list[Part], *, last: bool, padding: int, retain_graph: bool
    ) -> Update | None:
        """Add a micro-batch to the open window; with the last one, make the update.

        Raises:
            Rejected: if it is to be dropped; the window is as it was, and `drop` goes on.
        """
        window = self.window
        if window is None or window.broken:
            window = self.sound_window()
        if not self._looks:  # the short way
            return self._add(window, parts, last, padding, retain_graph, None)
        bad = self._judge(loss_flag(parts), lambda: self._bad_loss(parts))
        self._add(window, parts, False, padding, retain_graph, partial(self._look, parts, bad))
        return self.finish(whole=not window.dropped) if last else None

    def _add(
        self,
        window: Window,
        parts: list[Part],
        last: bool,
        padding: int,
        retain_graph: bool,
        look: Callable[[], list[Part]] | None,
    ) -> Update | None:
        """Run a backward and count it.

        Args:
            window: the open one.
            parts: the micro-batch.
            last: whether it ends the window.
            padding: its padded elements.
            retain_graph: as in `torch.autograd.backward`.
            look: looks at the gradients that have landed; returns what is to be counted.
        """
        first = window.microbatches == 0
        new: list[str] = []
        if len(parts) > 1 or parts[0].name not in window.terms:
            new = window.open_terms(parts, last, self.usual)
        factors = self._ready(window, parts, last, new)
        window.broken = True
        part, term = parts[0], window.terms[parts[0].name]
        try:
            if factors is None and term.fits(part) and len(window.terms) == 1:
                # the short way, which most micro-batches go
                torch.autograd.backward(part.loss, term.seed, retain_graph=retain_graph)
                merged = False
            else:
                merged = self._backward(window, parts, factors, retain_graph)
        except BaseException:
            self._undo(window, new)
            raise
        if first:
            self.gradients.refuse_stepped()
        if factors is not None:
            window.add(parts, padding)
            self.normalisation.keep()
            return self._make_update(window, 1 if merged else _only(factors))
        try:
            if look is not None:
                parts = look()
            self.gradients.seal(window.terms.values())
        except BaseException:
            self._undo(window, new)
            raise
        window.add(parts, padding)
        if self.normalisation.choice is not None:
            self.normalisation.keep()
        window.broken = False
        return None

    def _ready(
        self, window: Window, parts: list[Part], last: bool, new: list[str]
    ) -> dict[str, Count] | None:
        """Make sure that a backward may be run; return the last factors, if it is the last."""
        try:
            whole = not window.dropped
            factors = self._last_factors(window, parts, whole=whole) if last else None
            if window.microbatches == 0:
                self.gradients.open(self.updates)
            else:
                self.gradients.resume(last)
                if self.scaling.scaler is not None:
                    self.scaling.refuse_rescaled()
        except GradaccumError:
            for name in new:
                del window.terms[name]
            raise
        return factors

    def _look(self, parts: list[Part], bad: bool | Tensor) -> list[Part]:
        """Look at what a backward has brought; return what is to be counted of it."""
        if self.scaling.scaler is not None:
            return parts  # it looks itself, for a scale that is not too large
        finite = all_finite(self.gradients.landed())
        if isinstance(finite, bool) and isinstance(bad, bool):
            self._judge(not finite, self._bad_gradient)
            return parts
        flag = torch.as_tensor(bad).to(parts[0].loss.device) | ~torch.as_tensor(finite)
        if not self.drops:
            self._judge(bool(flag), self._bad_gradient)
            return parts
        assert self.window is not None
        self.window.flags.append(flag)
        self.gradients.void(flag)
        return [
            part._replace(
                loss=torch.where(flag, 0, part.loss.detach()),
                count=torch.where(flag, 0, torch.as_tensor(part.count, device=flag.device)),
            )
            for part in parts
        ]

    def _judge(self, bad: bool | Tensor, error: Callable[[], NonFiniteError]) -> bool | Tensor:
        """Raise if a micro-batch is known to be bad; what only the device knows is passed on."""
        if isinstance(bad, Tensor) and not self.drops:
            bad = bool(bad)
        if bad is True:
            raise Rejected if self.drops else error()
        return bad

    def drop(self, last: bool, samples: Sequence[int] = ()) -> Update | None:
        """Leave out a micro-batch that was rejected; with the last one, make the update.

        Args:
            last: whether it ends the window.
            samples: positions of its samples in their batch, where that is known.
        """
        window = self.sound_window()
        window.dropped_at += (window.microbatches + window.dropped,)
        window.dropped_samples += tuple(samples)
        window.dropped += 1
        self.normalisation.undo()
        return self.finish() if last else None

    def _undo(self, window: Window, new: list[str]) -> None:
        """Leave no trace of a micro-batch whose backward failed, or leave the window broken."""
        first = window.microbatches == 0
        if first:
            self.apart = {}
        self.normalisation.undo()
        whole = first or window.joint or self.gradients.lands
        if self.gradients.undo(first) and whole:
            for name in new:
                del window.terms[name]
            window.broken = False

    def finish(self, *, whole: bool = False) -> Update | None:
        """Make the update of what the open window has; `None` if it has nothing.

        Args:
            whole: whether it has all that it was opened for.
        """
        window = self.sound_window()
        if window.microbatches == 0:
            update = self._updater.give_up(window, self.updates) if window.dropped_at else None
            self.updates += update is not None
            self.discard()
            return update
        factors = self._last_factors(window, [], whole=whole)
        self.gradients.resume(last=True)
        self.scaling.refuse_rescaled()
        if len(factors) == 1:
            return self._make_update(window, _only(factors))
        window.broken = True
        with self._merging(factors):
            pass
        return self._make_update(window, 1)

    def discard(self) -> None:
        """Forget the open window: its counts and its gradients."""
        if self.begun:
            self.gradients.zero()
            self.scaling.reset()
        self.normalisation.drop()
        self.window = None
        self.apart = {}

    @property
    def begun(self) -> bool:
        """Whether a window is open that gradients have gone into."""
        return self.window is not None and (self.window.microbatches > 0 or self.window.broken)

    def sound_window(self) -> Window:
        """The open window, if its gradients are whole."""
        assert self.window is not None
        if self.window.broken:
            raise LoopError(
                "window-broken",
                "A backward or an update of this window was cut short by an error, so its "
                "gradients hold part of a micro-batch.",
                got=f"{self.window.microbatches} whole micro-batches and part of another",
                expected="a window whose micro-batches all arrived",
                do="acc.discard() drops the window; then go on with the next",
            )
        return self.window

    def _backward(
        self,
        window: Window,
        parts: list[Part],
        factors: dict[str, Count] | None,
        retain_graph: bool,
    ) -> bool:
        """Run autograd; return whether the factors have been applied to the gradients.

        Args:
            window: its terms are open.
            parts: the micro-batch.
            factors: the last factor of each term, where this is the last micro-batch.
            retain_graph: as in `torch.autograd.backward`.
        """
        # The gradient of a mean of no terms is NaN, and it stands for nothing.
        parts = [p for p in parts if not p.mean or isinstance(p.count, Tensor) or p.count]
        if factors is None and not window.joint:
            for part in parts:
                self._backward_apart(window, part, retain_graph or part is not parts[-1])
            return False
        if factors is not None and self._must_merge(window, factors):
            totals = window.totals(parts)
            with self._merging(factors):
                self._run(parts, [self._seed_over(p, totals[p.name]) for p in parts], retain_graph)
            return True
        self._run(parts, [self._seed(p, window.terms[p.name]) for p in parts], retain_graph)
        return False

    def _run(self, parts: list[Part], seeds: list[Tensor], retain_graph: bool) -> None:
        losses = [part.loss for part in parts]
        if not losses:
            return
        try:
            torch.autograd.backward(losses, seeds, retain_graph=retain_graph)
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
        # Only at the end is it known how terms with own denominators mix; until then their
        # gradients are sums of their own, the first term's in place.
        seed = self._seed(part, window.terms[part.name])
        if part.name == next(iter(window.terms)):
            self._run([part], [seed], retain_graph)
            return
        others = self.gradients.take()
        if self.gradients.lands:
            self._run([part], [seed], retain_graph)
            self.gradients.separate([seed])
            self.gradients.land(part.name)
            self.gradients.set(others)
            return
        if part.name in self.apart:
            self.gradients.set(self.apart[part.name])
        self._run([part], [seed], retain_graph)
        self.gradients.separate([seed])
        self.apart[part.name] = self.gradients.take()
        self.gradients.set(others)

    def _must_merge(self, window: Window, factors: dict[str, Count]) -> bool:
        if window.microbatches == 0:
            return False
        apart = self.apart or self.gradients.held_apart()
        if all(is_one(factor) for factor in factors.values()) and not apart:
            return False
        return len(factors) > 1 or not self._updater.takes_factor

    def _merging(self, factors: dict[str, Count]) -> AbstractContextManager[None]:
        if self.gradients.lands:
            return self.gradients.combining(factors)
        return self.gradients.merging(self._take_sums(factors))

    def _take_sums(self, factors: dict[str, Count]) -> list[Share]:
        first, *others = factors
        sums: list[Share] = [(self.gradients.take(), factors[first])]
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
            return self.scaling.seed(share.to(device=loss.device, dtype=loss.dtype))
        return self.scaling.seed(torch.full((), share, dtype=loss.dtype, device=loss.device))

    def skip(self, last: bool) -> Update | None:
        """Leave a micro-batch out; with the window's last one, make the update of the others."""
        self.sound_window().dropped += 1
        self.normalisation.undo()
        return self.finish() if last else None

    def announce(self, update: Update | None) -> Update | None:
        """Tell schedulers and callbacks, when the window is closed and nothing is half done."""
        return self._updater.announce(update)

    def _make_update(self, window: Window, factor: Count) -> Update:
        window.broken = True  # until the step is done, nothing but discard() would be right
        if self.must_arrive and not self.gradients.arrived():
            raise InputError(
                "loss-without-graph",
                "No gradient arrived at any parameter that the optimizer owns, so the update would "
                "be none.",
                got=f"{window.microbatches} micro-batches whose losses reach none of them",
                expected="losses that depend on the parameters of this accumulator's optimizer",
                do="compute the loss with the model that was given to Accumulator",
            )
        try:
            update = self._updater.make(window, factor, self.updates)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            raise kind_of(error)(
                "memory-step",
                "Memory ran out in the update itself, where a smaller micro-batch cannot help. "
                "Parameters may have been stepped in part.",
                got=first_line(error),
                expected="room for the optimizer's state and its temporaries beside the gradients",
                do="load the last checkpoint; then fused=True or foreach=False, which need less, "
                "an optimizer with less state, or a smaller model",
            ) from error
        self.normalisation.commit()
        self.usual = window.usual()
        self.updates += 1
        self.window = None
        self.apart = {}
        return update

    def _bad_loss(self, parts: list[Part]) -> NonFiniteError:
        part = next(part for part in parts if loss_flag([part]) is not False)
        term = f" of term {part.name!r}" if part.name else ""
        return NonFiniteError(
            "non-finite",
            f"The loss{term} is not finite.",
            got=f"{part.loss.item()} in micro-batch {self._position()}",
            expected="a finite loss; the window is as it was before this micro-batch",
            do="micro.skip() leaves it out; or look for log(0), 0/0 or too high a learning rate",
        )

    def _bad_gradient(self) -> NonFiniteError:
        return NonFiniteError(
            "non-finite",
            f"The gradient of {self.gradients.first_bad()} is not finite.",
            got=f"NaN or infinity in micro-batch {self._position()}, whose loss is finite",
            expected="finite gradients; the window is as it was before this micro-batch",
            do="micro.skip() leaves it out; or look for sqrt(0), norm(0) or a power below 1",
        )

    def _last_factors(self, window: Window, parts: list[Part], *, whole: bool) -> dict[str, Count]:
        """Each term's last factor, once it is sure that the denominators are usable."""
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
        for name, declared in window.declared.items() if whole else ():
            total = totals.get(name, 0)
            if not isinstance(total, Tensor) and not math.isclose(total, declared, rel_tol=1e-9):
                raise InputError(
                    "declared-count",
                    "The counts that came with the losses do not add up to the count known ahead.",
                    got=f"{total} terms{f' of {name!r}' if name else ''}, {declared} declared",
                    expected="`counts` that count the same terms as your loss",
                    do="count with the same mask in both places, or leave `counts` out",
                )
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

    def _position(self) -> str:
        window = self.window
        assert window is not None
        return f"{window.microbatches + window.dropped + 1} of {window.expected}"


def _only(factors: dict[str, Count]) -> Count:
    # Terms with different factors have been merged.
    return next(iter(factors.values()))
