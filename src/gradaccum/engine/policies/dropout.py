"""Dropout whose masks do not depend on how a batch is split.

A mask is keyed by the update, the place in the model and the sample, not by the order of calls.
Where a tensor of random numbers has its samples is found by experiment: the loss is computed on two
and on three copies of a sample, and the dimension that grows is theirs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from gradaccum.engine.memory.untouched import plain_attributes, restore_attributes
from gradaccum.engine.policies.counter import Layout, keep, key_of, normal, uniform
from gradaccum.engine.policies.keyed import Keyed
from gradaccum.engine.policies.sites import Names, Site
from gradaccum.engine.state import load_random, save_random
from gradaccum.errors import InputError, LoopError, SplitWarning, users_level

__all__ = ["Draws", "PerSample", "is_compiled", "read_dropout", "undisturbed"]

T = TypeVar("T")
Trial = Callable[[Sequence[int]], object]
_TWO, _THREE = (0, 0), (0, 0, 0)
_CHECKPOINT = checkpoint.__file__


def read_dropout(model: nn.Module, choice: str | None) -> PerSample | None:
    """What carries out the choice; refuse a model in which it cannot hold."""
    if choice is None:
        return None
    if is_compiled(model):
        raise InputError(
            "dropout-compiled",
            'dropout="per-sample" cannot reach into compiled code.',
            got="a model of which torch.compile runs a part",
            expected="a model that runs eagerly",
            do="leave out torch.compile, or dropout=",
        )
    # Drawn once, so that two runs from one seed have the same masks however they split.
    return PerSample(model, int(torch.randint(1 << 62, (), device="cpu")))


class UnknownSite(Exception):
    """Random numbers are asked for at a place that no trial has seen."""


class PerSample:
    """Random numbers by sample, for the forwards of one model.

    Args:
        model: its modules name the places.
        base: distinguishes accumulators and runs; 64 bits.
    """

    def __init__(self, model: nn.Module, base: int) -> None:
        self._model = model
        self.base = base
        self.layouts: dict[Site, int | None] = {}
        self.drawn: dict[Site, str] = {}
        self._learned = False
        self.warned = False

    def update(self, number: int, *, from_end: bool = False) -> Draws:
        """The random numbers of one update.

        Args:
            number: of the update.
            from_end: whether samples are padded on the left: positions then count from the right.
        """
        return Draws(self, Names(self._model), key_of(self.base, number), from_end)

    def learn(
        self, trial: Trial, small: Sequence[int], large: Sequence[int]
    ) -> dict[Site, tuple[int, ...]]:
        """Find where the samples are: run a trial on some samples and on some more of them."""
        few, many = self._shapes(trial, small), self._shapes(trial, large)
        for site in few.keys() & many.keys():
            self.layouts[site] = _grown(site, few[site], many[site], len(small), len(large))
        self._learned = True
        return few

    def learn_once(self, trial: Trial, peers: Sequence[int]) -> None:
        """`learn` from two and three copies of the first sample, if nothing has been learned.

        Args:
            trial: as in `learn`.
            peers: other samples, of other lengths if there are any.
        """
        if self._learned:
            return
        few = self.learn(trial, _TWO, _THREE)
        runs = {s: d for s, d in self.layouts.items() if d is not None and few[s][d] > len(_TWO)}
        for peer in peers if runs else ():
            own, both = self._shapes(trial, (peer, peer)), self._shapes(trial, (0, peer))
            for site, dim in runs.items():
                if site in own and site in both:
                    _refuse_packed(site, few[site][dim], own[site][dim], both[site][dim])

    def _shapes(self, trial: Trial, indices: Sequence[int]) -> dict[Site, tuple[int, ...]]:
        seen = Seen(Names(self._model))
        # with gradients, as code that asks for them would take another way without
        with Keyed(seen):
            trial(indices)
        return seen.shapes


class Draws:
    """Random numbers of one update; within `over`, those of some of its samples."""

    def __init__(self, owner: PerSample, names: Names, key: int, from_end: bool) -> None:
        self._owner = owner
        self._from_end = from_end
        self._names = names
        self._key = key
        self._samples: Sequence[int] = ()
        self._on: dict[torch.device, Tensor] = {}
        self._sites: dict[int, Site] = {}
        self._running = False
        self._watching = not owner.warned
        self.mode = Keyed(self)

    def forward(
        self, samples: Sequence[int], run: Callable[[], T], trial: Trial, peers: Sequence[int]
    ) -> T:
        """Run a forward over the samples with these numbers.

        Args:
            samples: their numbers in the update's batch.
            run: the forward.
            trial: the forward of other samples, by their numbers.
            peers: samples that are not like the first.
        """
        self._owner.learn_once(trial, peers)
        try:
            return self._run(samples, run)
        except UnknownSite:
            # the trial took another way through the model than these samples do
            self._owner.learn(trial, samples, [*samples, samples[0]])
        try:
            return self._run(samples, run)
        except UnknownSite as unknown:
            raise InputError(
                "dropout-layout",
                "The forward takes another way each time it runs, so dropout cannot be keyed.",
                got=f"random numbers at {unknown.args[0]}, where two trials had none",
                expected="the same calls for the same samples",
                do='leave out dropout="per-sample"',
            ) from None

    def _run(self, samples: Sequence[int], run: Callable[[], T]) -> T:
        self._samples = samples
        self._on.clear()
        self._sites.clear()
        self._names.begin()
        before = _generators() if self._watching else []
        self._running = True
        try:
            with self.mode:
                result = run()
        finally:
            self._running = False
        if self._watching:
            self._watching = False
            self._warn_others(before)
        return result

    def _warn_others(self, before: list[Tensor]) -> None:
        """Whether anything but the tokens was drawn from torch's generators."""
        replay = torch.Generator()
        replay.set_state(before[0])
        for _ in self._sites:
            torch.randint(1 << 62, (), generator=replay, device="cpu")
        expected = [replay.get_state(), *before[1:]]
        if all(torch.equal(a, b) for a, b in zip(expected, _generators(), strict=True)):
            return
        self._owner.warned = True
        warnings.warn(
            "The forward draws random numbers of a kind that cannot be keyed by sample, so the "
            'update still depends on how the batch is split in spite of dropout="per-sample". '
            "More: docs/messages.md#split-dropout",
            SplitWarning,
            stacklevel=users_level(),
        )

    # --- the source that `Keyed` asks ---

    @property
    def active(self) -> bool:
        """See `Source`: in a forward, and where a checkpoint runs it again.

        Gradient hooks and optimizers may draw numbers of their own.
        """
        return _in_checkpoint() if _in_backward() else self._running

    def keep(self, kind: str, shape: tuple[int, ...], like: Tensor, probability: float) -> Tensor:
        """See `Source`."""
        site, layout = self._place(kind, shape)
        return keep(self._of(site), self._numbers(like.device), shape, layout, probability)

    def uniform(
        self, kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """See `Source`."""
        site, layout = self._place(kind, shape)
        return uniform(self._of(site), self._numbers(device), shape, layout, dtype)

    def normal(
        self, kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """See `Source`."""
        site, layout = self._place(kind, shape)
        return normal(self._of(site), self._numbers(device), shape, layout, dtype)

    def _of(self, site: Site) -> int:
        return key_of(self._key, *site)

    def _numbers(self, device: torch.device) -> Tensor:
        if device not in self._on:
            # a copy that does not wait for the device
            numbers = torch.tensor(self._samples, dtype=torch.int64, device="cpu")
            self._on[device] = numbers.to(device, non_blocking=True)
        return self._on[device]

    def _place(self, kind: str, shape: tuple[int, ...]) -> tuple[Site, Layout]:
        site = self._site(kind)
        self._owner.drawn.setdefault(site, kind)
        layouts = self._owner.layouts
        if site not in layouts:
            raise UnknownSite(site)
        dim = layouts[site]
        n = len(self._samples)
        if dim is not None and (dim >= len(shape) or shape[dim] % n):
            raise InputError(
                "dropout-layout",
                "Dropout cannot be keyed by sample: here the samples are not equal shares of a "
                "dimension.",
                got=f"random numbers of shape {shape} for {n} samples at {site}",
                expected=f"a multiple of {n} along dimension {dim}",
                do='pad instead of packing samples; or leave out dropout="per-sample"',
            )
        return site, Layout(dim, self._from_end)

    def _site(self, kind: str) -> Site:
        # Activation checkpointing runs part of a forward again, in backward, and first puts torch's
        # generator back where that part found it: what is drawn from it tells the calls apart.
        token = int(torch.randint(1 << 62, (), device="cpu"))
        if not _in_backward():
            site = self._sites[token] = self._names.site(kind)
            return site
        if token not in self._sites:
            raise LoopError(
                "dropout-checkpoint",
                "Activation checkpointing runs a forward again without the random state of the "
                "first time, so its dropout masks are other ones.",
                got="checkpoint(..., preserve_rng_state=False), and dropout in it",
                expected="the random state kept, as checkpoint does by default",
                do="leave out preserve_rng_state=False",
            )
        return self._sites[token]


class Seen:
    """A source that draws as torch does, and notes where and in which shapes."""

    active = True

    def __init__(self, names: Names) -> None:
        self._names = names
        self.shapes: dict[Site, tuple[int, ...]] = {}

    def keep(self, kind: str, shape: tuple[int, ...], like: Tensor, probability: float) -> Tensor:
        """See `Source`."""
        self.shapes[self._names.site(kind)] = shape
        return torch.rand(shape, device=like.device) < probability

    def uniform(
        self, kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """See `Source`."""
        self.shapes[self._names.site(kind)] = shape
        return torch.rand(shape, device=device, dtype=dtype)

    def normal(
        self, kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """See `Source`."""
        self.shapes[self._names.site(kind)] = shape
        return torch.randn(shape, device=device, dtype=dtype)


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """Within it, a forward leaves buffers, plain attributes and random generators as they were."""
    random, numpy = save_random(), sys.modules.get("numpy.random")
    state = None if numpy is None else numpy.get_state()
    modules = list(model.modules())
    attributes = [(module, plain_attributes(module)) for module in modules]
    kept = [(m, name, b) for m in modules for name, b in m._buffers.items()]
    for module, name, buffer in kept:
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer
        for module, plain in attributes:
            restore_attributes(module, plain)
        load_random(random)
        if numpy is not None:
            numpy.set_state(state)


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` runs a part of the model, where no hook or mode sees inside."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _generators() -> list[Tensor]:
    # On a GPU this is a seed and an offset that the host holds; nothing waits.
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _in_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _refuse_packed(site: Site, one: int, other: int, both: int) -> None:
    """Samples of unlike sizes that lie in one row are a longer row together than padded ones."""
    if one != other and both != max(one, other):
        raise InputError(
            "dropout-layout",
            "Dropout cannot be keyed by sample: the samples are packed into one dimension without "
            "padding.",
            got=f"{one // 2} and {other // 2} random numbers for two samples, and {both} for both "
            f"together, at {site}",
            expected="samples that are equal shares of a dimension",
            do='pad instead of packing samples; or leave out dropout="per-sample"',
        )


def _grown(
    site: Site, few: tuple[int, ...], many: tuple[int, ...], small: int, large: int
) -> int | None:
    if few == many:
        return None
    grown = [d for d, (a, b) in enumerate(zip(few, many, strict=False)) if a != b]
    if len(few) != len(many) or len(grown) > 1 or few[grown[0]] * large != many[grown[0]] * small:
        raise InputError(
            "dropout-layout",
            f"Dropout cannot be keyed by sample at {site}: no dimension there is the samples'.",
            got=f"random numbers of shape {few} for {small} samples, and {many} for {large}",
            expected="one dimension that grows with the samples",
            do='leave out dropout="per-sample" for a loss of pairs of samples',
        )
    return grown[0]
