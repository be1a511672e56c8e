"""What belongs to an update and follows it: schedulers, `on_update`, the scaler, clipping."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, OneCycleLR

import gradaccum as ga
from probe import Probe, add, exactly, leave, loss_fn, rows, run, singles

EPS32 = torch.finfo(torch.float32).eps


def test_a_scheduler_steps_once_per_update() -> None:
    probe = Probe()
    scheduler = LambdaLR(probe.sgd, lambda step: 0.5**step)
    acc = ga.Accumulator(probe, probe.sgd, every=3, scheduler=scheduler)
    updates = run(acc, probe, singles(0, 7))
    assert [update.lr for update in updates] == [1.0, 0.5, 0.25]
    assert scheduler.last_epoch == 3
    assert probe.weights() == exactly(*[1 / 3] * 3, *[1 / 6] * 3, 1 / 4)


def test_a_scheduler_that_counts_its_steps_gets_exactly_those() -> None:
    probe = Probe()
    scheduler = OneCycleLR(probe.sgd, max_lr=1.0, total_steps=4)
    acc = ga.Accumulator(probe, probe.sgd, every=2, scheduler=scheduler)
    run(acc, probe, singles())
    with pytest.raises(ValueError, match="total steps is 4"):
        scheduler.step()


def test_several_schedulers_and_chains_of_them_all_step() -> None:
    probe = Probe()
    ones = [ExponentialLR(probe.sgd, 0.5), ChainedScheduler([ExponentialLR(probe.sgd, 0.5)])]
    acc = ga.Accumulator(probe, probe.sgd, every=2, scheduler=ones)
    assert [update.lr for update in run(acc, probe, singles())] == [1, 1 / 4, 1 / 16, 1 / 64]


@pytest.mark.parametrize("how", ["loop", "step", "flush", "skip"])
def test_on_update_is_called_once_per_update_after_the_step(how: str) -> None:
    probe = Probe()
    calls: list[tuple[int, list[float], int]] = []
    acc = ga.Accumulator(
        probe,
        probe.sgd,
        every=2,
        on_update=lambda update: calls.append((update.index, probe.weights(), acc.pending)),
    )
    if how == "step":
        acc.step(rows(0, 1), loss_fn)
    elif how == "flush":
        with pytest.warns(ga.OpenWindowWarning):
            leave(acc, probe, [rows(0, 1), rows(2)], after=1)
        acc.flush()
    else:
        for micro in acc.microbatches([rows(0, 1), rows(2)][: 1 if how == "loop" else 2]):
            if how == "skip" and micro.index:
                micro.skip()
            else:
                add(micro, probe)
    assert calls == [(0, exactly(1 / 2, 1 / 2), 0)]


def test_an_exception_in_on_update_leaves_an_update_that_was_made_once() -> None:
    probe = Probe()

    class Stop(Exception):
        pass

    def stop(update: ga.Update) -> None:
        if update.index == 0:
            raise Stop

    acc = ga.Accumulator(probe, probe.sgd, every=2, on_update=stop)
    made = []
    for i, micro in enumerate(acc.microbatches(singles(0, 4))):
        with pytest.raises(Stop) if i == 1 else nullcontext():
            add(micro, probe)
        made.append(micro.update is not None)
    assert made == [False, True, False, True]
    assert acc.updates == 2
    assert probe.weights() == exactly(*[1 / 2] * 4)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 10.0}], ids=["no clip", "clip"])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=["even", "ragged"])
def test_an_infinity_skips_the_update_and_all_that_follows_it(
    sizes: tuple[int, int], clip: dict[str, float], fused: bool
) -> None:
    probe = Probe().float()
    probe.sgd = SGD(probe.parameters(), lr=1.0, momentum=0.5, fused=fused)
    scheduler = LambdaLR(probe.sgd, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    seen: list[int] = []
    acc = ga.Accumulator(
        probe,
        probe.sgd,
        every=2,
        scheduler=scheduler,
        scaler=scaler,
        on_update=lambda update: seen.append(update.index),
        **clip,
    )
    good = list(rows(0, 1, 2, 3).float().split(sizes))
    bad = [good[0], good[1] * float("inf")]
    later = list(rows(4, 5, 6, 7).float().split(sizes))

    updates = run(acc, probe, good)
    after_good = probe.weights()
    state = {k: v.clone() for k, v in probe.sgd.state[probe.layer.weight].items()}
    updates += run(acc, probe, bad)
    assert probe.weights() == after_good == [1 / 4] * 4 + [0.0] * 4
    left = probe.sgd.state[probe.layer.weight]
    assert all(torch.equal(state[name], left[name]) for name in state)
    assert scaler.get_scale() == 4.0
    assert probe.layer.weight.grad is None
    updates += run(acc, probe, later)

    assert [bool(update.skipped) for update in updates] == [False, True, False]
    assert [update.index for update in updates] == [0, 1, 2]
    assert seen == [0, 2]
    assert scheduler.last_epoch == 2
    assert probe.weights() == [1 / 4 + 1 / 8] * 4 + [1 / 4] * 4  # momentum moves the first four


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_of_one_loss_skip_together(fused: bool) -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    acc = ga.Accumulator(
        model,
        [SGD(part.parameters(), lr=1.0, fused=fused) for part in model],
        every=1,
        scaler=scaler,
    )
    x = torch.ones(1, 2)
    for micro in acc.microbatches([x]):
        micro.backward((model[0](x) + model[1](x * float("inf"))).sum(), 1)
    assert micro.update is not None
    assert bool(micro.update.skipped)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_disabled_scaler_is_no_scaler() -> None:
    probe = Probe()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    acc = ga.Accumulator(probe, probe.sgd, every=2, scaler=scaler)
    (update,) = run(acc, probe, [rows(0, 1, 2), rows(3)])
    assert update.skipped is False
    assert probe.weights() == exactly(*[1 / 4] * 4)


def clipping(fused: bool, scaled: bool, **clip: float) -> tuple[ga.Accumulator, Probe]:
    probe = Probe().float()
    probe.sgd = SGD(probe.parameters(), lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    return ga.Accumulator(probe, probe.sgd, every=4, scaler=scaler, **clip), probe


KERNELS = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
SCALED = pytest.mark.parametrize("scaled", [False, True], ids=["no scaler", "scaler"])


@KERNELS
@SCALED
def test_grad_norm_is_the_norm_before_clipping_and_the_clip_is_of_the_whole(
    fused: bool, scaled: bool
) -> None:
    acc, probe = clipping(fused, scaled, clip_norm=0.25)
    (update,) = run(acc, probe, [rows(0, 1).float(), rows(2).float(), rows(3).float()])
    assert update.grad_norm is not None
    assert float(update.grad_norm) == 0.5  # four times 1/4
    # torch adds 1e-6 to the norm, and so do we; a division and two products round
    clipped = 0.25 * 0.25 / (0.5 + 1e-6)
    assert probe.weights()[:4] == pytest.approx([clipped] * 4, rel=4 * EPS32)
    assert probe.weights()[4:] == [0.0] * 4


@KERNELS
@SCALED
def test_clip_value_clips_the_mean_and_not_its_parts(fused: bool, scaled: bool) -> None:
    acc, probe = clipping(fused, scaled, clip_value=0.625)
    # sample 0 in both: 0.75 of the mean, clipped to 0.625; sample 1: 0.25, left as it is
    run(acc, probe, [rows(0, 0).float(), rows(0, 1).float()])
    assert probe.weights() == [0.625, 0.25] + [0.0] * 6


def test_a_fused_optimizer_divides_float64_as_exactly_as_any() -> None:
    probe = Probe()
    probe.sgd = SGD(probe.parameters(), lr=1.0, fused=True)
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    # alike at first, so that the second window starts from 6 and ends with a factor of 6/5,
    # which fused kernels would take in float32
    run(acc, probe, [rows(0, 1, 2), rows(3, 4, 5), rows(0, 1, 2), rows(6, 7)])
    assert probe.weights() == exactly(*[1 / 6 + 1 / 5] * 3, *[1 / 6] * 3, *[1 / 5] * 2)
