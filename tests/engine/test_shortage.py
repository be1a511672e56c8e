"""A micro-batch that runs out of memory, anywhere, leaves no trace and is run in smaller parts."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from gradaccum.engine.grouping import Group
from gradaccum.errors import ShortageError
from shortage import SAYINGS, Countdown, FailingForward, failing_arrivals

SAMPLES = 16


@pytest.fixture(autouse=True)
def _no_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among a test suite's objects a collection takes longer than all else here."""
    monkeypatch.setattr("gradaccum.engine.memory.shortage.gc.collect", lambda: 0)


BATCH = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pooled": {"batchnorm": "pooled"},
    "frozen": {"batchnorm": "frozen"},
    "per-sample": {"dropout": "per-sample"},
    "wide": {"accumulate_dtype": torch.float64},
    "dropping": {"on_nonfinite": "drop"},
}


class Model(nn.Module):
    """Everything that a forward may change: dropout's generator, Python's, buffers, a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 1)
        )
        self.register_buffer("rebound", torch.zeros(()))
        self.register_buffer("table", torch.ones(20_000))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rebound = self.rebound * 0.5 + x.detach().mean()
        self.calls += 1
        return self.layers(x) * (self.calls + random.random())


class Training:
    """A model in training whose every micro-batch is written down."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any):
        self.model = Model()
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.acc = ga.Accumulator(
            self.model, self.optimizer, **{"batchnorm": "microbatch", **options}
        )
        self.sizes: list[int] = []
        self.used: list[int] = []
        core = self.acc._core
        opens, adds = core.open, core.add

        def open_window(*arguments: Any) -> Any:
            self.used = []
            return opens(*arguments)

        def add(*arguments: Any, **options: Any) -> Any:
            update = adds(*arguments, **options)
            self.used.append(self.sizes[-1])
            return update

        core.open, core.add = open_window, add  # type: ignore[method-assign]
        torch.manual_seed(2)
        random.seed(3)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        self.sizes.append(len(batch))
        return model(batch).square().sum(), len(batch)

    def photograph(self) -> list[Any]:
        found: list[Any] = [torch.get_rng_state(), random.getstate(), self.acc.updates]
        found += [value.clone() for value in self.model.state_dict().values()]
        found += [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        for state in self.optimizer.state_dict()["state"].values():
            found += [v.clone() if isinstance(v, Tensor) else v for v in state.values()]
        return found

    def with_sizes(self, sizes: list[int]) -> list[Any]:
        """What the update is if these sizes are right from the start."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        groups = [Group(range(s, s + n), None, 0) for s, n in zip(starts, sizes, strict=True)]
        self.acc._grouping.groups = lambda *_: groups  # type: ignore[method-assign]
        self.acc.step(BATCH, self.loss)
        assert self.used == sizes
        return self.photograph()


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def places(kind: str, options: dict[str, Any]) -> range:
    """How many operations or arrivals a window has."""
    countdown = Countdown(at=-1)
    training = Training(**options)
    with failing(kind, training, countdown):
        training.acc.step(BATCH, training.loss)
    return range(1, countdown.seen + 1)


def failing(kind: str, training: Training, countdown: Countdown) -> Any:
    if kind == "arrivals":
        return failing_arrivals(training.model, countdown)
    loss = training.loss

    def watched(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        with FailingForward(countdown):
            return loss(model, batch)

    training.loss = watched  # type: ignore[method-assign]
    return nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("kind", ["operations", "arrivals"])
@pytest.mark.parametrize("policy", POLICIES)
def test_running_out_at_any_place_gives_the_update_of_the_sizes_that_were_used(
    policy: str, kind: str, every: int
) -> None:
    options = {"every": every, "clip_norm": 1.0, **POLICIES[policy]}
    # under a policy every third place will do
    tried = places(kind, options)[:: 1 if policy == "plain" else 3]
    assert len(tried) > every
    for place in tried:
        countdown = Countdown(at=place)
        training = Training(**options)
        with failing(kind, training, countdown):
            training.acc.step(BATCH, training.loss)
        assert countdown.raised == 1
        used = training.used
        assert sum(used) == SAMPLES
        assert len(used) > every
        assert same(training.photograph(), Training(**options).with_sizes(used))


@pytest.mark.parametrize("error", SAYINGS, ids=lambda error: str(error)[:40])
def test_every_allocators_words_are_understood(error: BaseException) -> None:
    training = Training()
    with failing("operations", training, Countdown(at=3, error=error)):
        update = training.acc.step(BATCH, training.loss)
    assert update.microbatches == 2


def test_another_error_is_not_taken_for_it() -> None:
    training = Training()
    before = training.photograph()
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x4 and 5x6)")
    with (
        failing("operations", training, Countdown(at=9, error=error)),
        pytest.raises(RuntimeError, match="mat1 and mat2"),
    ):
        training.acc.step(BATCH, training.loss)
    assert training.sizes == [16]
    assert same(before, training.photograph())


def too_small(training: Training, most: int) -> None:
    """Make every micro-batch of more than `most` samples fail."""
    loss = training.loss

    def limited(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        result = loss(model, batch)
        if len(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 MiB.")
        return result

    training.loss = limited  # type: ignore[method-assign]


def test_a_single_sample_that_does_not_fit_is_named_and_nothing_is_kept() -> None:
    training = Training()
    training.model.layers[1].eval()  # batch norm itself refuses a single sample
    before = training.photograph()
    too_small(training, 0)
    with pytest.raises(ShortageError) as caught:
        training.acc.step(BATCH, training.loss)
    assert caught.value.slug == "memory-sample"
    assert "Sample 0 of the batch does not fit" in str(caught.value)
    assert "Tried to allocate 3.00 MiB" in caught.value.got
    assert same(before, training.photograph())


def test_a_size_is_remembered_and_grows_back_when_there_is_room() -> None:
    training = Training()
    loss = training.loss
    too_small(training, 2)
    training.acc.step(BATCH, training.loss)
    training.sizes.clear()
    training.acc.step(BATCH, training.loss)
    assert training.sizes == [2] * 8
    training.loss = loss  # type: ignore[method-assign]
    for _ in range(80):
        training.sizes.clear()
        training.acc.step(BATCH, training.loss)
    assert training.sizes == [16]


def test_running_out_in_the_optimizers_step_is_not_tried_again() -> None:
    training = Training()
    tries: list[int] = []

    def fail(*_: object) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    hook = training.optimizer.register_step_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        training.acc.step(BATCH, training.loss)
    assert isinstance(caught.value, ShortageError)
    assert caught.value.slug == "memory-step"
    assert tries == [1]
    assert training.sizes == [16]
    hook.remove()
    assert training.acc.pending == 0
    assert training.acc.step(BATCH, training.loss).index == 0


@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_what_several_terms_had_is_taken_back_too(on_stale: Any) -> None:
    def terms(model: nn.Module, batch: Tensor) -> Any:
        out = model(batch)
        return {"a": (out.square().sum(), len(batch)), "b": (out.sum(), 3 * len(batch))}

    for place in range(1, 60):
        countdown = Countdown(at=place)
        training, plain = Training(every=4, on_stale=on_stale), Training(every=4, on_stale=on_stale)
        for one, times in ((training, countdown), (plain, Countdown(at=-1))):
            one.sizes.append(0)
            with failing_arrivals(one.model, times):
                one.acc.step(BATCH, terms)
        if not countdown.raised:
            break
        assert training.acc._core.window is None
        # other sizes draw other masks: what must agree is that no part is in it twice or missing
        assert all(torch.isfinite(p).all() for p in training.model.parameters())
    assert place > 20


def test_batch_norm_that_is_left_with_a_single_sample_is_out_of_memory() -> None:
    training = Training()
    before = training.photograph()
    too_small(training, 0)
    with pytest.raises(ShortageError, match="does not fit") as caught:
        training.acc.step(BATCH, training.loss)
    assert "or more, and" in caught.value.got
    assert same(before, training.photograph())
