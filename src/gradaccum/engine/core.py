"""One window after another: adds micro-batches, and makes an update of each window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch.optim import Optimizer

from gradaccum.engine.factors import last_factors, only
from gradaccum.engine.grads import Gradients
from gradaccum.engine.judge import Judge, Rejected
from gradaccum.engine.loss import Count, Number, Part
from gradaccum.engine.memory.shortage import first_line, is_shortage, kind_of
from gradaccum.engine.policies.batchnorm import Normalisation
from gradaccum.engine.precision import Scaling
from gradaccum.engine.terms import Terms
from gradaccum.engine.update import Settings, Updater
from gradaccum.engine.window import Usual, Window
from gradaccum.errors import GradaccumError, InputError, LoopError
from gradaccum.records import Update

__all__ = ["Core", "Rejected"]


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
        self._judge: Judge | None = None
        if settings.on_nonfinite in ("raise", "drop"):
            scaled = scaling.scaler is not None
            self._judge = Judge(gradients, drops=self.drops, scaled=scaled)
        self.must_arrive = False
        self.updates = 0
        self.window: Window | None = None
        self.terms = Terms(gradients, scaling)
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
        judge = self._judge
        if judge is None:  # the short way
            return self._add(window, parts, last, padding, retain_graph, None)
        bad = judge.losses(window, parts)
        look = partial(judge.landed, window, parts, bad)
        self._add(window, parts, False, padding, retain_graph, look)
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
                self.gradients.backward(part.loss, term.seed, retain_graph=retain_graph)
                merged = False
            else:
                merged = self.terms.backward(
                    window,
                    parts,
                    factors,
                    retain_graph,
                    merges=not self._updater.takes_factor,
                )
            if factors is not None:
                self.normalisation.keep()
                self.gradients.join(self.terms.apart)
                self.gradients.commit()
        except BaseException:
            self._undo(window, new)
            raise
        if first:
            self.gradients.refuse_stepped()
        if factors is not None:
            window.add(parts, padding)
            return self._make_update(window, 1 if merged else only(factors))
        try:
            if look is not None:
                parts = look()
            if self.normalisation.choice is not None:
                self.normalisation.keep()
            if self.gradients.restores:
                seeds = [term.seed for term in window.terms.values()]
                self.gradients.join(self.terms.apart, seeds)
            self.gradients.seal(window.terms.values())
        except BaseException:
            self._undo(window, new)
            raise
        window.add(parts, padding)
        window.broken = False
        return None

    def _ready(
        self, window: Window, parts: list[Part], last: bool, new: list[str]
    ) -> dict[str, Count] | None:
        """Make sure that a backward may be run; return the last factors, if it is the last."""
        try:
            whole = not window.dropped
            factors = last_factors(window, parts, whole=whole) if last else None
            if window.microbatches == 0:
                self.gradients.open(self.updates)
            else:
                self.gradients.resume(last)
                if self.scaling.scaler is not None:
                    self.scaling.refuse_rescaled()
                if self.gradients.restores:
                    self.gradients.make_room()
        except GradaccumError:
            for name in new:
                del window.terms[name]
            raise
        return factors

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
            self.terms.apart = {}
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
        factors = last_factors(window, [], whole=whole)
        self.gradients.resume(last=True)
        self.scaling.refuse_rescaled()
        if len(factors) == 1:
            return self._make_update(window, only(factors))
        window.broken = True
        with self.terms.merging(factors):
            pass
        return self._make_update(window, 1)

    def discard(self) -> None:
        """Forget the open window: its counts and its gradients."""
        if self.begun:
            self.gradients.zero()
            self.scaling.reset()
        self.normalisation.drop()
        self.window = None
        self.terms.apart = {}

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
        self.terms.apart = {}
        return update
