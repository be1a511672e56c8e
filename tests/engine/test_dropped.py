"""`on_nonfinite="drop"`: the update is, to the bit, the one without the bad micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradaccum as ga
from gradaccum.engine import finite

MICROS = 5
BATCHES = [torch.randn(3 + i, 4, generator=torch.Generator().manual_seed(i)) for i in range(MICROS)]


class BadGradient(torch.autograd.Function):
    """A loss that is finite and a gradient that is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * math.nan


def in_loss(x: Tensor) -> Tensor:
    return x * math.nan


def in_gradient(x: Tensor) -> Tensor:
    return BadGradient.apply(x)


PLANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan loss": in_loss,
    "infinite loss": lambda x: x * math.inf,
    "gradient": in_gradient,
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": torch.optim.AdamW,
    "fused": partial(torch.optim.AdamW, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip_norm": 0.1},
    "zero": {"on_stale": "zero"},
    "wide": {"accumulate_dtype": torch.float64},
}


class Training:
    def __init__(self, optimizer: str, options: dict[str, Any], **more: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 1)
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr=0.1)
        self.acc = ga.Accumulator(
            self.model,
            self.optimizer,
            **{"on_nonfinite": "drop", "batchnorm": "microbatch", **options, **more},
        )

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().sum()

    def photograph(self) -> list[Tensor]:
        values = [v.clone() for v in self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            values += [v.clone() for v in state.values() if isinstance(v, Tensor)]
        return [*values, torch.get_rng_state()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("bad", range(MICROS))
def test_a_loop_makes_the_update_without_the_bad_micro_batch(
    bad: int, plant: str, optimizer: str, options: str
) -> None:
    found = Training(optimizer, OPTIONS[options], every=MICROS)
    truth = Training(optimizer, OPTIONS[options], every=lambda i: MICROS - (i == 0))
    updates = []
    torch.manual_seed(1)
    for micro in found.acc.microbatches([*BATCHES, *BATCHES]):
        loss = found.loss(micro.batch)
        if not updates and micro.index == bad:
            loss = PLANTS[plant](loss)
        micro.backward(loss, len(micro.batch))
        if micro.update:
            updates.append(micro.update)
    after = found.photograph()
    without = [*BATCHES[:bad], *BATCHES[bad + 1 :], *BATCHES]
    torch.manual_seed(1)
    for micro in truth.acc.microbatches(without):
        micro.backward(truth.loss(micro.batch), len(micro.batch))
    assert same(after, truth.photograph())
    first, second = updates
    assert (first.dropped, first.dropped_at, first.microbatches) == (1, (bad,), MICROS - 1)
    assert (second.dropped, second.dropped_at, second.microbatches) == (0, (), MICROS)
    assert first.count == sum(len(b) for b in BATCHES) - len(BATCHES[bad])


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("bad", range(MICROS))
def test_several_terms_are_dropped_together(bad: int, plant: str) -> None:
    def terms(training: Training, batch: Tensor) -> dict[str, tuple[Tensor, int]]:
        out = training.model(batch)
        return {"a": (out.square().sum(), len(batch)), "b": (out.abs().sum(), 2)}

    found = Training("adamw", {}, every=MICROS)
    truth = Training("adamw", {}, every=MICROS - 1)
    torch.manual_seed(1)
    for micro in found.acc.microbatches(BATCHES):
        losses = terms(found, micro.batch)
        if micro.index == bad:
            losses["b"] = (PLANTS[plant](losses["b"][0]), 2)
        micro.backward(losses)
    after = found.photograph()
    torch.manual_seed(1)
    for micro in truth.acc.microbatches([*BATCHES[:bad], *BATCHES[bad + 1 :]]):
        micro.backward(terms(truth, micro.batch))
    assert same(after, truth.photograph())


SAMPLES = torch.randn(12, 4, generator=torch.Generator().manual_seed(9))


def step(training: Training, batch: Tensor, plant: Callable[[Tensor], Tensor] | None) -> ga.Update:
    """One update; samples whose first feature is 99 are bad."""

    def loss_fn(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
        per_sample = model(rows).square().sum(1)
        if plant is not None and bool((rows[:, 0] == 99).any()):
            where = rows[:, 0] == 99
            per_sample = torch.where(where, plant(per_sample), per_sample)
        return per_sample.sum(), len(rows)

    return training.acc.step(batch, loss_fn)


def grown(bad: list[int]) -> Tensor:
    """The batch with one more sample at each of these places, which is bad."""
    batch = SAMPLES
    for place in bad:
        batch = torch.cat([batch[:place], torch.full((1, 4), 99.0), batch[place:]])
    return batch


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("place", range(12))
def test_a_bad_sample_at_any_place_is_as_if_it_had_never_been(place: int, plant: str) -> None:
    found = Training("adamw", {"isolate": "sample"}, every=1)
    truth = Training("adamw", {"isolate": "sample"}, every=1)
    torch.manual_seed(1)
    update = step(found, grown([place]), PLANTS[plant])
    after = found.photograph()
    torch.manual_seed(1)
    step(truth, SAMPLES, None)
    assert same(after, truth.photograph())
    assert update.dropped_samples == (place,)
    assert (update.dropped, update.microbatches, update.count) == (0, 1, 12)


def test_several_bad_samples_are_found_in_every_micro_batch() -> None:
    found = Training("sgd", {"isolate": "sample", "clip_norm": 1.0}, every=3)
    update = step(found, grown([1, 2, 9]), in_gradient)
    assert update.dropped_samples == (1, 2, 9)
    assert update.count == 12
    assert all(torch.isfinite(p).all() for p in found.model.parameters())


@pytest.mark.parametrize("batchnorm", ["microbatch", "pooled", "frozen"])
def test_bad_samples_are_found_though_batch_norm_refuses_a_sample_on_its_own(
    batchnorm: Any,
) -> None:
    found = Training("sgd", {"isolate": "sample", "batchnorm": batchnorm}, every=1)
    batch = torch.full((4, 4), 99.0)
    batch[0], batch[3] = SAMPLES[0], SAMPLES[3]
    update = step(found, batch, in_loss)
    assert update.dropped_samples == (1, 2)
    assert update.count == 2


def test_a_step_reports_the_samples_of_a_dropped_micro_batch() -> None:
    found = Training("sgd", {}, every=4)
    update = step(found, grown([0]), in_loss)
    assert (update.dropped, update.dropped_at, update.dropped_samples) == (1, (0,), (0, 1, 2, 3))
    assert (update.microbatches, update.count) == (3, 9)


@pytest.mark.parametrize("way", ["loop", "step"])
def test_a_window_of_which_nothing_is_left_makes_no_step(way: str) -> None:
    found = Training("adamw", {}, every=2)
    before = found.photograph()
    if way == "step":
        update = step(found, torch.full((4, 4), 99.0), in_loss)
    else:
        for micro in found.acc.microbatches(BATCHES[:2]):
            micro.backward(found.loss(micro.batch) * math.nan, 1)
        assert micro.update is not None
        update = micro.update
    assert same(before, found.photograph())
    assert (update.skipped, update.dropped, update.microbatches) == (True, 2, 0)
    assert (update.dropped_at, found.acc.updates, found.acc.pending) == ((0, 1), 1, 0)


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.count += name in {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", [False, True], ids=["cpu", "as on a device"])
@pytest.mark.parametrize("how", ["drop", "skip"])
def test_in_the_good_case_nobody_waits(
    how: Any, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device:
        monkeypatch.setattr(finite, "as_known", lambda flag: flag)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    acc = ga.Accumulator(model, optimizer, every=MICROS, on_nonfinite=how)
    for micro in acc.microbatches(BATCHES):
        loss, reads = model(micro.batch).square().sum(), Reads()
        with reads:
            micro.backward(loss, len(micro.batch))
        assert reads.count == 0
    assert micro.update is not None


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("bad", [*range(MICROS), None])
def test_on_a_device_a_bad_micro_batch_is_dropped_without_the_hosts_knowing(
    bad: int | None, plant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(batches: list[Tensor], bad: int | None) -> tuple[list[Tensor], ga.Update]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        acc = ga.Accumulator(model, optimizer, every=len(batches), on_nonfinite="drop")
        for micro in acc.microbatches(batches):
            loss = model(micro.batch).square().sum()
            loss = PLANTS[plant](loss) if micro.index == bad or bad == -1 else loss
            micro.backward(loss, len(micro.batch))
        assert micro.update is not None
        return [p.detach().clone() for p in model.parameters()], micro.update

    monkeypatch.setattr(finite, "as_known", lambda flag: flag)
    found, update = train(BATCHES, bad)
    assert isinstance(update.dropped, Tensor)
    assert isinstance(update.dropped_at, Tensor)
    assert update.dropped_at.tolist() == [i == bad for i in range(MICROS)]
    without = BATCHES if bad is None else [*BATCHES[:bad], *BATCHES[bad + 1 :]]
    assert same(found, train(without, None)[0])
    # nothing left: the fused step is told so, and leaves parameters and state alone
    nothing, update = train(BATCHES, -1)
    assert bool(update.skipped)
    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    assert same(nothing, [p.detach() for p in fresh.parameters()])


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["plain", "clip"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plant", PLANTS)
def test_skip_gives_up_the_window(plant: str, optimizer: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    made = OPTIMIZERS[optimizer](model.parameters(), lr=0.1)
    seen: list[int] = []
    acc = ga.Accumulator(
        model,
        made,
        every=2,
        on_nonfinite="skip",
        on_update=lambda update: seen.append(update.index),
        **options,
    )
    before = [p.detach().clone() for p in model.parameters()]
    updates = []
    for i, micro in enumerate(acc.microbatches(BATCHES[:4])):
        loss = model(micro.batch).square().sum()
        micro.backward(PLANTS[plant](loss) if i == 1 else loss, len(micro.batch))
        if micro.update:
            updates.append(micro.update)
        if i == 1:
            assert same(before, [p.detach() for p in model.parameters()])
            assert made.state_dict()["state"] == {}
    assert [bool(update.skipped) for update in updates] == [True, False]
    assert seen == [1]


def test_raise_names_sample_module_and_parameter() -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), Log(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = ga.Accumulator(model, optimizer, every=2, on_nonfinite="raise")
    batch = torch.ones(8, 2)
    batch[5, 0] = -1.0
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ArithmeticError) as caught:
        acc.step(batch, lambda model, rows: (model(rows).sum(), len(rows)))
    assert "sample 5 of the batch" in str(caught.value)
    assert "`1` (Log)" in str(caught.value)
    batch[5, 0] = 0.0  # log(0) times 0 is no number only in the gradient
    with torch.no_grad():
        model[2].weight.zero_()

    def clamped(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
        return (rows[:, 0] * model[0].weight[0, 0]).sqrt().sum(), len(rows)

    with pytest.raises(ArithmeticError) as caught:
        acc.step(batch, clamped)
    assert "sample 5 of the batch" in str(caught.value)
    assert "`0.weight`" in str(caught.value)
    with torch.no_grad():
        model[2].weight.copy_(before[2])
    assert same(before, [p.detach() for p in model.parameters()])
