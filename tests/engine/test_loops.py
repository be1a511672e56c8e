"""Loops as people write them: which weight each sample had in the updates they make.

The model is one row of weights and sample `i` is the `i`-th unit vector, so that with SGD at a
learning rate of 1 the `i`-th weight moves by exactly the weight that sample `i` had. A mean over a
window of `n` samples is `1/n` for each of them and 0 for all others.
"""

from __future__ import annotations

import gc
import math
import re
import warnings
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

import gradaccum as ga
from gradaccum.engine import loss as loss_module

EPS = torch.finfo(torch.float64).eps
EPS32 = torch.finfo(torch.float32).eps
SAMPLES = 8


class Probe(nn.Module):
    """A weight for each sample, none of them moved yet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SAMPLES, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.layer.weight)
        self.sgd = SGD(self.parameters(), lr=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def weights(self) -> list[float]:
        return (0.0 - self.layer.weight[0]).tolist()


def rows(*samples: int) -> Tensor:
    return torch.eye(SAMPLES, dtype=torch.float64)[list(samples)]


def singles(first: int = 0, last: int = SAMPLES) -> list[Tensor]:
    return [rows(i) for i in range(first, last)]


def add(micro: ga.Microbatch[Tensor], probe: Probe) -> None:
    micro.backward(probe(micro.batch).sum(), len(micro.batch))


def run(acc: ga.Accumulator, probe: Probe, batches: Iterable[Tensor]) -> list[ga.Update]:
    updates = []
    for micro in acc.microbatches(batches):
        add(micro, probe)
        if micro.update:
            updates.append(micro.update)
    return updates


def leave(acc: ga.Accumulator, probe: Probe, batches: Iterable[Tensor], after: int) -> None:
    """Break out of a loop once `after` micro-batches have been added."""
    for i, micro in enumerate(acc.microbatches(batches)):
        add(micro, probe)
        if i + 1 == after:
            break


def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).sum(), len(batch)


def exactly(*weights: float) -> Any:
    """Weights in order, 0 for the samples not named.

    A weight is rounded at most three times: the seed, the last factor and their product, by half
    an eps each.
    """
    padded = [*weights, *[0.0] * (SAMPLES - len(weights))]
    return pytest.approx(padded, rel=2 * EPS, abs=0)


def test_the_probe_tells_a_mean_of_means_from_a_mean() -> None:
    probe = Probe()
    for batch in (rows(0, 1, 2), rows(3)):
        (probe(batch).mean() / 2).backward()
    probe.sgd.step()
    assert probe.weights() == exactly(1 / 6, 1 / 6, 1 / 6, 1 / 2)
    assert probe.weights() != exactly(1 / 4, 1 / 4, 1 / 4, 1 / 4)


# --- leaving a loop ---------------------------------------------------------------------------


def test_break_in_mid_window_says_so_at_the_users_line_and_keeps_the_gradients() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.warns(ga.OpenWindowWarning) as caught:
        leave(acc, probe, singles(), after=3)
    (warning,) = caught
    assert "3 of 4 micro-batches" in str(warning.message)
    assert "acc.flush()" in str(warning.message)
    assert "acc.discard()" in str(warning.message)
    assert warning.filename == __file__
    assert acc.pending == 3
    assert acc.updates == 0
    assert probe.weights() == exactly()
    assert probe.layer.weight.grad is not None


def test_flush_steps_what_a_break_left() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.warns(ga.OpenWindowWarning):
        leave(acc, probe, singles(), after=3)
    update = acc.flush()
    assert update is not None
    assert (update.index, update.microbatches, update.count) == (0, 3, 3)
    assert probe.weights() == exactly(1 / 3, 1 / 3, 1 / 3)
    assert probe.layer.weight.grad is None
    assert acc.flush() is None
    assert (acc.pending, acc.updates) == (0, 1)


def test_discard_drops_what_a_break_left() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.warns(ga.OpenWindowWarning):
        leave(acc, probe, singles(), after=3)
    acc.discard()
    assert probe.layer.weight.grad is None
    assert (acc.pending, acc.updates) == (0, 0)
    assert acc.flush() is None
    run(acc, probe, singles(4, 8))
    assert probe.weights() == exactly(0, 0, 0, 0, *[1 / 4] * 4)


def test_the_next_loop_goes_on_with_the_open_window() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.warns(ga.OpenWindowWarning):
        leave(acc, probe, singles(), after=3)
    first, second = run(acc, probe, singles(3))
    assert (first.microbatches, second.microbatches) == (4, 4)
    assert probe.weights() == exactly(*[1 / 4] * 8)


def test_break_right_after_an_update_is_silent() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    leave(acc, probe, singles(), after=4)
    assert acc.pending == 0
    assert probe.weights() == exactly(*[1 / 4] * 4)


def test_a_break_before_the_first_backward_of_a_window_is_silent() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    for _ in acc.microbatches(singles()):
        break
    assert acc.pending == 0
    run(acc, probe, singles(0, 4))
    assert probe.weights() == exactly(*[1 / 4] * 4)


def test_an_exception_in_the_body_keeps_the_window_for_the_next_loop() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)

    def fail(batches: Iterable[Tensor]) -> None:
        for i, micro in enumerate(acc.microbatches(batches)):
            if i == 2:
                raise KeyError("mine")
            add(micro, probe)

    with pytest.warns(ga.OpenWindowWarning, match="2 of 4"), pytest.raises(KeyError, match="mine"):
        fail(singles())
    assert acc.pending == 2
    run(acc, probe, singles(2, 4))
    assert probe.weights() == exactly(*[1 / 4] * 4)


class Exploding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise MemoryError("out of it")


@pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "within", "last, where sums are merged"])
@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_a_backward_that_fails_breaks_the_window_until_it_is_discarded(
    bad: int, on_stale: Any
) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=3, on_stale=on_stale)
    batches = [rows(0, 1), rows(2), rows(3)]

    def fail() -> None:
        for i, micro in enumerate(acc.microbatches(batches)):
            out = probe(micro.batch).sum()
            # half of it arrives, half of it does not
            micro.backward(out + Exploding.apply(out) if i == bad else out, len(micro.batch))

    warns = pytest.warns(ga.OpenWindowWarning) if bad else nullcontext()
    with warns, pytest.raises(MemoryError):
        fail()
    for attempt in (acc.flush, acc.state_dict):
        with pytest.raises(ga.GradaccumError) as caught:
            attempt()
        assert caught.value.slug == "window-broken"
        assert "acc.discard()" in caught.value.do
    assert probe.weights() == exactly()

    acc.discard()
    assert probe.layer.weight.grad is None
    assert not probe.layer.weight._post_accumulate_grad_hooks
    run(acc, probe, batches)
    assert probe.weights() == exactly(*[1 / 4] * 4)


@pytest.mark.parametrize("bad", [0, 1, 2, 3, 4])
def test_a_loop_may_go_on_after_a_failed_backward_was_discarded_inside_it(bad: int) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    for i, micro in enumerate(acc.microbatches(singles(0, 5))):
        out = probe(micro.batch).sum()
        if i == bad:
            with pytest.raises(MemoryError):
                micro.backward(Exploding.apply(out), 1)
            acc.discard()
        else:
            micro.backward(out, 1)
    windows = [[1, 2], [2, 3], [0, 1], [0, 1], [0, 1]][bad], [[3, 4], [4], [3, 4], [4], [2, 3]][bad]
    expected = [0.0] * SAMPLES
    for window in windows:
        for sample in window:
            expected[sample] = 1 / len(window)
    assert probe.weights() == exactly(*expected)


def test_discard_with_nothing_to_drop_costs_no_micro_batch() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    for micro in acc.microbatches(singles(0, 4)):
        if micro.index == 0:
            acc.discard()
        add(micro, probe)
    assert probe.weights() == exactly(*[1 / 4] * 4)


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


def test_a_loop_that_was_left_and_is_closed_late_does_not_disturb_the_next() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    old = acc.microbatches(singles())
    add(next(old), probe)
    for i, micro in enumerate(acc.microbatches(singles(1, 4))):
        add(micro, probe)
        if i == 0:
            with pytest.warns(ga.OpenWindowWarning):
                old.close()
    assert probe.weights() == exactly(*[1 / 4] * 4)


# --- loaders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(7))
@pytest.mark.parametrize("sized", [True, False], ids=["list", "generator"])
def test_every_length_of_loader_ends_in_a_rightly_scaled_tail(length: int, sized: bool) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=3)
    batches: Any = singles(0, length) if sized else (one for one in singles(0, length))
    updates = run(acc, probe, batches)
    tail = length % 3
    assert [u.microbatches for u in updates] == [3] * (length // 3) + [tail] * bool(tail)
    assert probe.weights() == exactly(*[1 / 3] * (length - tail), *[1 / max(tail, 1)] * tail)
    assert acc.pending == 0


def test_an_epoch_shorter_than_the_window_is_one_update() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=100)
    (update,) = run(acc, probe, [rows(0, 1, 2), rows(3)])
    assert (update.microbatches, update.count) == (2, 4)
    assert probe.weights() == exactly(*[1 / 4] * 4)


def test_two_epochs_with_a_tail_each_do_not_leak_into_each_other() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    made = []
    for _ in range(2):
        made += [update.microbatches for update in run(acc, probe, singles(0, 6))]
        assert probe.layer.weight.grad is None
    assert made == [4, 2, 4, 2]
    assert probe.weights() == exactly(*[2 / 4] * 4, *[2 / 2] * 2)
    assert probe.weights() != exactly(*[2 / 4] * 6)  # as with a tail divided by N


def test_a_loop_knows_its_window_and_its_end() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    seen = []
    for micro in acc.microbatches(singles(0, 3)):
        add(micro, probe)
        seen.append((micro.index, micro.size, micro.last, micro.update is not None))
    assert seen == [(0, 2, False, False), (1, 2, True, True), (0, 2, True, True)]


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return rows(index)[0]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (row[0] for row in singles())


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Samples(), batch_size=3, shuffle=True),
        DataLoader(Stream(), batch_size=3),
    ],
    ids=["shuffled", "iterable dataset"],
)
def test_a_data_loader_is_an_iterable_like_any_other(loader: DataLoader[Tensor]) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=3)
    (update,) = run(acc, probe, loader)  # batches of 3, 3 and 2
    assert (update.microbatches, update.count) == (3, 8)
    assert probe.weights() == exactly(*[1 / 8] * 8)


class Lying:
    """A loader whose length is not the number of its batches."""

    def __init__(self, batches: list[Tensor], length: Callable[[], int]) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


def _no_length() -> int:
    raise TypeError("this loader has no length")


@pytest.mark.parametrize(
    "length", [lambda: 100, lambda: 1, lambda: 0, _no_length], ids=["long", "short", "0", "none"]
)
def test_a_loaders_length_is_not_believed(length: Callable[[], int]) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    updates = run(acc, probe, Lying(singles(0, 6), length))
    assert [u.microbatches for u in updates] == [4, 2]
    assert probe.weights() == exactly(*[1 / 4] * 4, *[1 / 2] * 2)


def failing(after: int) -> Iterator[Tensor]:
    yield from singles(0, after)
    raise OSError("disk")


def test_a_loader_that_fails_midway_gives_out_the_batch_at_hand_first() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.warns(ga.OpenWindowWarning, match="3 of 4"), pytest.raises(OSError, match="disk"):
        run(acc, probe, failing(after=3))
    assert acc.pending == 3
    assert acc.updates == 0
    acc.flush()
    assert probe.weights() == exactly(*[1 / 3] * 3)


def test_a_loader_that_fails_between_windows_leaves_none_open() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.raises(OSError, match="disk"):
        run(acc, probe, failing(after=4))
    assert (acc.pending, acc.updates) == (0, 1)
    assert probe.weights() == exactly(*[1 / 4] * 4)


def test_a_loader_that_fails_at_once_changes_nothing() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.raises(OSError, match="disk"):
        run(acc, probe, failing(after=0))
    assert (acc.pending, acc.updates) == (0, 0)


def test_a_loader_that_fails_midway_gives_out_what_a_window_had_gathered() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    seen = []

    def train() -> None:
        for micro in acc.microbatches(failing(after=6), counts=len):
            seen.append(int(micro.batch.argmax()))
            add(micro, probe)

    with pytest.raises(OSError, match="disk"):
        train()
    assert seen == list(range(6))
    acc.discard()


def test_a_loader_that_fills_one_buffer_again_and_again_trains_no_wrong_update() -> None:
    """A batch that the look-ahead overwrites is refused, or avoided; it is never trained on."""
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    buffer = rows(0)

    def refilled() -> Iterator[Tensor]:
        for row in singles(0, 4):
            yield buffer.copy_(row)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ga.OpenWindowWarning)
        try:
            run(acc, probe, refilled())
        except ga.GradaccumError as error:
            assert error.do  # noqa: PT017 - either outcome is right
            acc.discard()
            assert probe.weights() == exactly()
        else:
            assert probe.weights() == exactly(*[1 / 2] * 4)


def test_the_same_batch_again_and_again_is_nobodys_mistake() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    run(acc, probe, [rows(0)] * 4)
    assert probe.weights() == exactly(2)


def test_a_batch_made_by_the_model_of_the_moment_is_made_after_the_update_before_it() -> None:
    """As in reinforcement learning: nothing is fetched ahead of an update that it depends on."""
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    seen = []

    def rollouts() -> Iterator[Tensor]:
        for row in singles(0, 6):
            seen.append(sum(probe.weights()))
            yield row

    run(acc, probe, rollouts())
    assert seen == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_a_break_after_an_update_takes_no_batch_from_the_next_loop() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    stream = iter(singles(0, 4))
    leave(acc, probe, stream, after=2)
    run(acc, probe, stream)
    assert probe.weights() == exactly(*[1 / 2] * 4)


def test_an_empty_loader_after_a_break_does_not_hide_the_open_window() -> None:
    """What the loop promises is that no gradient outlives the iterable in silence."""
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.warns(ga.OpenWindowWarning):
        leave(acc, probe, singles(), after=2)
    with pytest.warns(ga.OpenWindowWarning):
        run(acc, probe, [])
    acc.discard()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (1, 6, 1), (7, 1), (3, 2, 3)], ids=str)
def test_a_total_that_is_a_power_of_two_rounds_nothing_however_it_is_split(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    probe = Probe().to(dtype)
    acc = ga.Accumulator(probe, probe.sgd, every=len(sizes))
    for _ in range(2):
        run(acc, probe, list((7 * torch.eye(SAMPLES, dtype=dtype)).split(list(sizes))))
    # 7 · (1/3) · (3/8) would not be 7/8
    assert probe.weights() == [2 * 7 / SAMPLES] * SAMPLES


@pytest.mark.parametrize("options", [{}, {"clip_norm": 100.0}, {"on_stale": "zero"}], ids=str)
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_mean_of_no_terms_is_nan_and_adds_nothing(empty: int, options: dict[str, Any]) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=3, **options)
    for i, micro in enumerate(acc.microbatches(singles(0, 3))):
        mean = probe(micro.batch).mean()
        if i == empty:
            micro.backward(mean * math.nan, 0, reduction="mean")
        else:
            micro.backward(mean, 1, reduction="mean")
    assert micro.update is not None
    assert float(micro.update.loss) == 0.0
    assert probe.weights() == exactly(*[(i != empty) / 2 for i in range(3)])


def test_a_thousand_micro_batches_in_one_window_are_one_mean() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=1024)
    (update,) = run(acc, probe, singles() * 128)
    assert (update.microbatches, update.count) == (1024, 1024)
    assert probe.weights() == [1 / 8] * 8


# --- several loops and accumulators -----------------------------------------------------------


def test_loops_over_different_accumulators_may_be_nested() -> None:
    outer, inner = Probe(), Probe()
    acc_outer = ga.Accumulator(outer, outer.sgd, every=2)
    acc_inner = ga.Accumulator(inner, inner.sgd, every=3)
    for micro in acc_outer.microbatches(singles(0, 2)):
        run(acc_inner, inner, singles(0, 4))
        add(micro, outer)
    assert outer.weights() == exactly(1 / 2, 1 / 2)
    assert inner.weights() == exactly(2 / 3, 2 / 3, 2 / 3, 2)


def test_a_loop_inside_a_loop_over_the_same_accumulator_is_refused() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=1)
    outer = acc.microbatches(singles(0, 2))
    micro = next(outer)
    run(acc, probe, singles(2, 3))
    with pytest.raises(ga.GradaccumError) as caught:
        add(micro, probe)
    assert caught.value.slug == "loop-over"
    with pytest.raises(ga.GradaccumError, match=re.escape("Another loop over this accumulator")):
        next(outer)
    assert probe.weights() == exactly(0, 0, 1)


def test_a_loop_inside_a_window_of_the_same_accumulator_is_refused() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    outer = acc.microbatches(singles(0, 3))
    add(next(outer), probe)
    run(acc, probe, singles(3, 4))
    with pytest.raises(ga.GradaccumError, match=re.escape("Another loop over this accumulator")):
        next(outer)


def test_zipped_loops_of_two_accumulators_end_together() -> None:
    one, other = Probe(), Probe()
    acc_one = ga.Accumulator(one, one.sgd, every=2)
    acc_other = ga.Accumulator(other, other.sgd, every=4)
    pairs = zip(
        acc_one.microbatches(singles(0, 5)), acc_other.microbatches(singles(0, 5)), strict=False
    )
    for left, right in pairs:
        add(left, one)
        add(right, other)
    gc.collect()
    assert one.weights() == exactly(*[1 / 2] * 4, 1)
    assert other.weights() == exactly(*[1 / 4] * 4, 1)


def test_evaluating_in_mid_window_disturbs_nothing() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    losses = []
    for micro in acc.microbatches(singles(0, 4)):
        probe.eval()
        with torch.no_grad():
            losses.append(float(probe(rows(*range(8))).sum()))
        probe.train()
        add(micro, probe)
    assert losses == [0.0] * 4
    assert probe.weights() == exactly(*[1 / 4] * 4)


# --- skip, flush and discard inside the loop --------------------------------------------------


@pytest.mark.parametrize("counts", [None, len], ids=["counted as they come", "counts known ahead"])
@pytest.mark.parametrize("skipped", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}])
def test_a_skipped_micro_batch_is_as_if_it_had_never_been(
    skipped: set[int], counts: Callable[[Tensor], int] | None
) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=3)
    batches = [rows(0, 1), rows(2), rows(3, 4, 5)]
    updates = []
    for i, micro in enumerate(acc.microbatches(batches, counts=counts)):
        if i in skipped:
            micro.skip()
        else:
            add(micro, probe)
        if micro.update:
            updates.append(micro.update)
    kept = [
        int(one) for i, batch in enumerate(batches) if i not in skipped for one in batch.argmax(1)
    ]
    (update,) = updates
    assert (update.microbatches, update.dropped) == (3 - len(skipped), len(skipped))
    assert update.count == len(kept)
    assert probe.weights() == exactly(*[(i in kept) / len(kept) for i in range(8)])


@pytest.mark.parametrize("counts", [None, len], ids=["counted as they come", "counts known ahead"])
def test_a_window_of_skipped_micro_batches_makes_no_update(
    counts: Callable[[Tensor], int] | None,
) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    updates = []
    for i, micro in enumerate(acc.microbatches(singles(0, 4), counts=counts)):
        if i < 2:
            micro.skip()
        else:
            add(micro, probe)
        updates.append(micro.update)
    assert [update is not None for update in updates] == [False, False, False, True]
    assert acc.updates == 1
    assert probe.weights() == exactly(0, 0, 1 / 2, 1 / 2)


def test_flush_inside_the_body_ends_the_window_there() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    for i, micro in enumerate(acc.microbatches(singles(0, 6))):
        add(micro, probe)
        if i == 2:
            update = acc.flush()
            assert update is not None
            assert update.microbatches == 3
    assert probe.weights() == exactly(*[1 / 3] * 6)


def test_discard_inside_the_body_drops_what_was_added() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    for i, micro in enumerate(acc.microbatches(singles(0, 6))):
        add(micro, probe)
        if i == 2:
            acc.discard()
    assert probe.weights() == exactly(0, 0, 0, *[1 / 3] * 3)


@pytest.mark.parametrize("counts", [None, len], ids=["counted as they come", "counts known ahead"])
def test_discard_before_the_backward_takes_the_micro_batch_along(
    counts: Callable[[Tensor], int] | None,
) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    for i, micro in enumerate(acc.microbatches(singles(0, 4), counts=counts)):
        if i == 1:
            acc.discard()
            with pytest.raises(ga.GradaccumError) as caught:
                add(micro, probe)
            assert caught.value.slug == "loop-over"
        else:
            add(micro, probe)
    assert probe.weights() == exactly(0, 0, 1 / 2, 1 / 2)


def test_flush_with_nothing_to_step_costs_no_micro_batch() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    for micro in acc.microbatches(singles(0, 4)):
        if micro.index == 0:
            assert acc.flush() is None
        add(micro, probe)
    assert probe.weights() == exactly(*[1 / 4] * 4)


def test_a_gathered_loop_left_by_break_does_not_promise_what_it_cannot_keep() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)

    def leave_gathered() -> None:
        for micro in acc.microbatches(singles(), counts=len):
            add(micro, probe)
            if micro.index == 1:
                break

    with pytest.warns(ga.OpenWindowWarning) as caught:
        leave_gathered()
    assert "next loop" not in str(caught[0].message)
    for counts in (len, None):
        with pytest.raises(ga.GradaccumError) as refused:
            next(acc.microbatches(singles(), counts=counts))
        assert refused.value.slug == "window-open"
    update = acc.flush()
    assert update is not None
    assert (update.microbatches, update.count) == (2, 2)
    assert probe.weights() == exactly(1 / 2, 1 / 2)


# --- a schedule of N --------------------------------------------------------------------------


def test_every_may_be_a_function_of_the_update_index() -> None:
    probe = Probe()
    asked = []

    def every(update: int) -> int:
        asked.append(update)
        return update + 1

    acc = ga.Accumulator(probe, probe.sgd, every=every)
    updates = run(acc, probe, singles(0, 8))
    assert [u.microbatches for u in updates] == [1, 2, 3, 2]
    assert probe.weights() == exactly(1, *[1 / 2] * 2, *[1 / 3] * 3, *[1 / 2] * 2)
    assert sorted(set(asked)) == [0, 1, 2, 3]


def test_every_may_be_a_function_where_counts_are_known_ahead_and_in_step() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=lambda update: update + 1)
    for micro in acc.microbatches(singles(0, 6), counts=len):
        add(micro, probe)
    assert probe.weights() == exactly(1, *[1 / 2] * 2, *[1 / 3] * 3)
    update = acc.step(rows(6, 7), loss_fn)
    assert (update.index, update.microbatches) == (3, 2)


# --- a batch of one's own ---------------------------------------------------------------------


@dataclass
class Record:
    x: Tensor
    name: str


Named = namedtuple("Named", ["x", "y"])


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (rows(*range(6)), lambda b: b),
        ({"x": rows(*range(6)), "id": torch.arange(6)}, lambda b: b["x"]),
        (UserDict({"x": rows(*range(6))}), lambda b: b["x"]),
        ((rows(*range(6)), torch.arange(6)), lambda b: b[0]),
        ([rows(*range(6)), {"y": torch.arange(6)}], lambda b: b[0]),
        (Named(rows(*range(6)), torch.arange(6)), lambda b: b.x),
        (Record(rows(*range(6)), "all"), lambda b: b.x),
        ({"x": rows(*range(6)), "scale": torch.tensor(1.0), "note": None}, lambda b: b["x"]),
    ],
    ids=["tensor", "dict", "UserDict", "tuple", "list", "namedtuple", "dataclass", "shared items"],
)
def test_step_takes_batches_of_many_shapes(batch: Any, read: Callable[[Any], Tensor]) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    types, sizes = [], []

    def loss(model: nn.Module, micro: Any) -> tuple[Tensor, int]:
        types.append(type(micro))
        sizes.append(len(read(micro)))
        return loss_fn(model, read(micro))

    update = acc.step(batch, loss)
    assert (update.microbatches, update.count) == (4, 6)
    assert sorted(sizes) == [1, 1, 2, 2]
    assert set(types) == {type(batch)}
    assert probe.weights() == exactly(*[1 / 6] * 6)


def test_step_takes_fewer_samples_than_every() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=100)
    assert acc.step(rows(0, 1, 2), loss_fn).microbatches == 3
    assert probe.weights() == exactly(*[1 / 3] * 3)


def test_step_with_a_budget_of_samples_and_with_lengths() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    assert acc.step(rows(0, 1, 2, 3, 4), loss_fn, budget=2).microbatches == 3
    assert probe.weights() == exactly(*[1 / 5] * 5)

    samples = [(rows(5), 3), (rows(6), 1), (rows(7), 2)]
    update = acc.step(
        samples,
        loss_fn,
        lengths=lambda sample: sample[1],
        budget=4,
        collate=lambda chosen: torch.cat([x for x, _ in chosen]),
    )
    assert update.microbatches == 2
    assert update.padding == 1
    assert probe.weights() == exactly(*[1 / 5] * 5, *[1 / 3] * 3)


def test_step_with_lengths_makes_as_many_micro_batches_as_every_says() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    update = acc.step(rows(0, 1, 2, 3), loss_fn, lengths=[8, 1, 8, 1], trim=None)
    assert (update.microbatches, update.count, update.padding) == (2, 4, 0)
    assert probe.weights() == exactly(*[1 / 4] * 4)


def test_a_stream_regrouped_by_length_keeps_each_window_to_its_own_samples() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    stream = [[(0, 5), (1, 1)], [(2, 5), (3, 1)], [(4, 2)]]
    updates = []
    for micro in acc.microbatches(
        stream,
        lengths=lambda sample: sample[1],
        budget=10,
        collate=lambda chosen: rows(*[i for i, _ in chosen]),
    ):
        add(micro, probe)
        if micro.update:
            updates.append(micro.update)
    assert [update.count for update in updates] == [4, 1]
    assert probe.weights() == exactly(*[1 / 4] * 4, 1)


def test_step_while_a_window_is_open_is_refused_and_harms_neither() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.warns(ga.OpenWindowWarning):
        leave(acc, probe, singles(), after=2)
    with pytest.raises(ga.GradaccumError) as caught:
        acc.step(rows(4, 5), loss_fn)
    assert caught.value.slug == "window-open"
    assert acc.pending == 2
    acc.flush()
    acc.step(rows(4, 5), loss_fn)
    assert probe.weights() == exactly(1 / 2, 1 / 2, 0, 0, 1 / 2, 1 / 2)


def test_step_between_the_windows_of_a_loop_is_an_update_of_its_own() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    for micro in acc.microbatches(singles(0, 4)):
        add(micro, probe)
        if micro.update and micro.update.index == 0:
            assert acc.step(rows(6, 7), loss_fn).index == 1
    assert acc.updates == 3
    assert probe.weights() == exactly(*[1 / 2] * 4, 0, 0, 1 / 2, 1 / 2)


def test_step_before_the_backward_takes_the_micro_batch_along() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    for i, micro in enumerate(acc.microbatches(singles(0, 5))):
        if i == 2:
            acc.step(rows(7), loss_fn)
            with pytest.raises(ga.GradaccumError) as caught:
                add(micro, probe)
            assert caught.value.slug == "loop-over"
        else:
            add(micro, probe)
    assert probe.weights() == exactly(1 / 2, 1 / 2, 0, 1 / 2, 1 / 2, 0, 0, 1)


def test_on_update_may_make_an_update_of_its_own() -> None:
    probe = Probe()
    made: list[int] = []

    def once_more(update: ga.Update) -> None:
        made.append(update.index)
        if update.index == 0:
            acc.step(rows(6, 7), loss_fn)

    acc = ga.Accumulator(probe, probe.sgd, every=2, on_update=once_more)
    run(acc, probe, singles(0, 4))
    assert made == [0, 1, 2]
    assert probe.weights() == exactly(*[1 / 2] * 4, 0, 0, 1 / 2, 1 / 2)


def test_step_after_an_error_in_the_loss_leaves_nothing_behind() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    calls = []

    def failing_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("mine")
        return loss_fn(model, batch)

    with pytest.raises(KeyError, match="mine"):
        acc.step(rows(0, 1, 2, 3), failing_loss)
    assert probe.layer.weight.grad is None
    assert (acc.pending, acc.updates) == (0, 0)
    acc.step(rows(4, 5), loss_fn)
    assert probe.weights() == exactly(0, 0, 0, 0, 1 / 2, 1 / 2)


# --- several terms ----------------------------------------------------------------------------

Terms = dict[str, tuple[list[int], int]]
"""By name of term: the samples in it, and the count to divide by."""


def term_weights(window: list[Terms]) -> list[float]:
    """Σ over terms of (how often a sample is in it) / (the term's total count)."""
    weights = [0.0] * SAMPLES
    for name in {name for terms in window for name in terms}:
        total = sum(terms[name][1] for terms in window if name in terms)
        for terms in window:
            for sample in terms.get(name, ([], 0))[0]:
                weights[sample] += 1 / total
    return weights


TERM_WINDOWS: dict[str, list[Terms]] = {
    "two denominators": [
        {"ce": ([0, 1], 2), "aux": ([0], 3)},
        {"ce": ([2], 1), "aux": ([2], 5)},
        {"ce": ([3, 4, 5], 3), "aux": ([5], 1)},
    ],
    "one micro-batch": [{"ce": ([0, 1], 2), "aux": ([0], 3)}],
    "first lacks a term": [{"ce": ([0, 1], 2)}, {"ce": ([2], 1), "aux": ([3], 7)}],
    "last lacks a term": [{"ce": ([0, 1], 2), "aux": ([2], 7)}, {"ce": ([3], 1)}],
    "terms take turns": [{"a": ([0], 1)}, {"b": ([1, 2], 2)}, {"a": ([3], 1)}, {"c": ([4], 9)}],
    "first term only at the end": [
        {"b": ([0], 1), "a": ([1], 2)},
        {"a": ([2], 2), "b": ([3], 4)},
    ],
    "three terms": [
        {"a": ([0], 1), "b": ([1], 2), "c": ([2], 3)},
        {"c": ([3], 3), "a": ([4], 4)},
        {"b": ([5], 1), "c": ([6, 7], 2)},
    ],
    "a count of 0 first": [{"ce": ([0], 1), "aux": ([], 0)}, {"ce": ([1], 1), "aux": ([2], 3)}],
    "a count of 0 last": [{"ce": ([0], 1), "aux": ([2], 3)}, {"ce": ([1], 1), "aux": ([], 0)}],
    "a count of 0 throughout": [
        {"ce": ([0, 1], 2), "aux": ([], 0)},
        {"ce": ([2], 1), "aux": ([], 0)},
    ],
    "one and the same count": [{"a": ([0], 2), "b": ([1], 2)}, {"a": ([2], 2), "b": ([3], 2)}],
}


def backward_terms(micro: ga.Microbatch[Terms], probe: Probe, *, mean: bool) -> None:
    terms = {}
    for name, (samples, count) in micro.batch.items():
        total = probe(rows(*samples)).sum()
        if mean:
            # the mean of no terms is NaN and so is its gradient, as with labels all ignored
            total = total / count if count else probe(rows(SAMPLES - 1)).sum() * math.nan
        terms[name] = (total, count)
    micro.backward(terms, reduction="mean" if mean else "sum")


@pytest.mark.parametrize("mean", [False, True], ids=["sums", "means"])
@pytest.mark.parametrize("known", ["as they come", "counts ahead", "flushed"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 100.0}, {"on_stale": "zero"}], ids=str)
@pytest.mark.parametrize("name", TERM_WINDOWS)
def test_every_term_is_divided_by_its_own_total(
    name: str, options: dict[str, Any], known: str, mean: bool
) -> None:
    window = TERM_WINDOWS[name]
    probe = Probe()
    every = len(window) + (1 if known == "flushed" else 0)
    acc = ga.Accumulator(probe, probe.sgd, every=every, **options)

    def counts(terms: Terms) -> dict[str, int]:
        return {name: count for name, (_, count) in terms.items()}

    batches = window if known != "flushed" else [*window, {}]
    update = None
    ahead = counts if known == "counts ahead" else None
    for micro in acc.microbatches(batches, counts=ahead):
        if micro.batch:
            backward_terms(micro, probe, mean=mean)
            update = micro.update
        else:
            micro.skip()
            update = micro.update
    assert update is not None
    totals: dict[str, int] = {}
    for terms in window:
        for term, (_, count) in terms.items():
            totals[term] = totals.get(term, 0) + count
    assert update.count == totals
    assert set(update.terms) == set(totals)
    assert acc.pending == 0
    # each weight is a sum of at most two terms' weights
    assert probe.weights() == pytest.approx(term_weights(window), rel=4 * EPS, abs=0)


@pytest.mark.parametrize("name", TERM_WINDOWS)
def test_a_term_whose_count_is_not_known_ahead_may_stand_beside_one_whose_is(name: str) -> None:
    window = TERM_WINDOWS[name]
    declared = next(iter(window[-1]))
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=len(window))

    def counts(terms: Terms) -> dict[str, int]:
        return {declared: terms[declared][1]} if declared in terms else {}

    for micro in acc.microbatches(window, counts=counts):
        backward_terms(micro, probe, mean=False)
    assert probe.weights() == pytest.approx(term_weights(window), rel=4 * EPS, abs=0)


@pytest.mark.parametrize("how", ["skip the first", "skip one", "skip the last", "flush"])
def test_terms_known_ahead_are_never_divided_by_one_anothers_totals(how: str) -> None:
    """Their gradients share one sum, which a skip or a flush would leave without a right factor.

    So that is refused, or it is exact.
    """
    window: list[Terms] = [
        {"a": ([0], 1), "b": ([1], 1)},
        {"a": ([2], 1), "b": ([3], 5)},
        {"a": ([4], 6), "b": ([5], 2)},
    ]
    skipped = {"skip the first": 0, "skip one": 1, "skip the last": 2}.get(how)
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=3)

    def counts(terms: Terms) -> dict[str, int]:
        return {name: count for name, (_, count) in terms.items()}

    def train() -> list[Terms]:
        for i, micro in enumerate(acc.microbatches(window, counts=counts)):
            if i == skipped:
                micro.skip()
            else:
                backward_terms(micro, probe, mean=False)
            if how == "flush" and i == 1:
                acc.flush()
                return window[:2]
        return [terms for i, terms in enumerate(window) if i != skipped]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ga.OpenWindowWarning)
        try:
            kept = train()
        except ga.GradaccumError as error:
            assert error.do  # noqa: PT017 - one of two right outcomes
            acc.discard()
            kept = []
    expected = term_weights(kept) if kept else [0.0] * SAMPLES
    assert probe.weights() == pytest.approx(expected, rel=4 * EPS, abs=0)


def test_terms_divided_by_one_common_total_would_be_seen() -> None:
    window = TERM_WINDOWS["two denominators"]
    assert term_weights(window)[:2] == [1 / 6 + 1 / 9, 1 / 6]
    assert term_weights(window)[0] != pytest.approx(2 / 15)


def test_the_loss_of_an_update_is_the_sum_of_its_terms_means() -> None:
    probe = Probe()
    nn.init.ones_(probe.layer.weight)
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    loop = acc.microbatches([{"a": ([0, 1], 1), "b": ([2], 4)}, {"a": ([3], 2)}])
    for micro in loop:
        backward_terms(micro, probe, mean=False)
    assert micro.update is not None
    assert {name: float(mean) for name, mean in micro.update.terms.items()} == {"a": 1, "b": 0.25}
    assert float(micro.update.loss) == 1.25


def test_a_loss_that_the_user_changes_in_place_afterwards_is_not_the_one_that_was_optimised() -> (
    None
):
    probe = Probe()
    nn.init.ones_(probe.layer.weight)
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    for micro in acc.microbatches([rows(0, 1), rows(2, 3)]):
        loss = probe(micro.batch).sum()
        micro.backward(loss, 2)
        logged = loss.detach()
        logged /= 1000
    assert micro.update is not None
    assert float(micro.update.loss) == 1.0


def test_a_loss_may_be_in_two_terms_at_once() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    for micro in acc.microbatches([rows(0, 1), rows(2)]):
        loss = probe(micro.batch).sum()
        micro.backward({"a": (loss, len(micro.batch)), "b": (loss, 2)})
    assert probe.weights() == exactly(*[1 / 3 + 1 / 4] * 3)


def test_retain_graph_lets_the_user_go_backward_again() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=1)
    for micro in acc.microbatches(singles(0, 1)):
        hidden = probe(micro.batch) ** 2
        micro.backward(hidden.sum(), 1, retain_graph=True)
        torch.autograd.grad(hidden.sum(), probe.layer.weight)


# --- counts that only a device knows ----------------------------------------------------------


@pytest.fixture
def _unread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave counts on the CPU unread, as those on a GPU are: the arithmetic is then torch's."""
    read = loss_module.read_count

    def unread(count: Any, where: str) -> Any:
        return count if isinstance(count, Tensor) else read(count, where)

    monkeypatch.setattr(loss_module, "read_count", unread)


def on_device(count: int) -> Tensor:
    return torch.tensor(count)


@pytest.mark.usefixtures("_unread_counts")
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 100.0}, {"clip_value": 100.0}, {"on_stale": "zero"}],
    ids=["plain", "clip norm", "clip value", "kept apart"],
)
@pytest.mark.parametrize("mean", [False, True], ids=["sums", "means"])
def test_counts_that_only_a_device_knows_divide_as_exactly(
    options: dict[str, Any], mean: bool
) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=3, **options)
    for _ in range(2):  # the second window has a usual count to start from
        for micro in acc.microbatches([rows(0, 1, 2), rows(3), rows(4, 5)]):
            loss = probe(micro.batch).sum() / (len(micro.batch) if mean else 1)
            micro.backward(loss, on_device(len(micro.batch)), reduction="mean" if mean else "sum")
    assert micro.update is not None
    assert isinstance(micro.update.count, Tensor)
    assert int(micro.update.count) == 6
    assert probe.weights() == pytest.approx([2 / 6] * 6 + [0.0] * 2, rel=4 * EPS, abs=0)


@pytest.mark.usefixtures("_unread_counts")
@pytest.mark.parametrize("name", [name for name in TERM_WINDOWS if "throughout" not in name])
def test_terms_whose_counts_only_a_device_knows_divide_as_exactly(name: str) -> None:
    window = TERM_WINDOWS[name]
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=len(window))
    for micro in acc.microbatches(window):
        micro.backward(
            {
                term: (probe(rows(*samples)).sum(), on_device(count))
                for term, (samples, count) in micro.batch.items()
            }
        )
    assert probe.weights() == pytest.approx(term_weights(window), rel=4 * EPS, abs=0)


@pytest.mark.usefixtures("_unread_counts")
def test_a_window_that_only_the_device_knows_to_be_empty_moves_nothing() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    for micro in acc.microbatches(singles(0, 2)):
        micro.backward(probe(micro.batch).sum() * 0, on_device(0))
    assert micro.update is not None
    assert float(micro.update.loss) == 0.0
    assert probe.weights() == exactly()


@pytest.mark.usefixtures("_unread_counts")
@pytest.mark.parametrize("fused", [False, True])
def test_sparse_and_fused_updates_take_a_factor_from_the_device(fused: bool) -> None:
    embedding = nn.Embedding(SAMPLES, 1, sparse=not fused)
    nn.init.zeros_(embedding.weight)
    optimizer = SGD(embedding.parameters(), lr=1.0, fused=fused)
    acc = ga.Accumulator(embedding, optimizer, every=2)
    for micro in acc.microbatches([torch.tensor([0, 1, 2]), torch.tensor([3])]):
        micro.backward(embedding(micro.batch).sum(), on_device(len(micro.batch)))
    assert embedding.weight[:, 0].tolist() == [-1 / 4] * 4 + [0.0] * 4


# --- any order of calls -----------------------------------------------------------------------

ACTIONS = ["add", "add", "add", "skip", "flush", "discard", "break", "refused", "failed"]


@given(
    script=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 3)), max_size=14),
    every=st.integers(1, 4),
    on_stale=st.sampled_from(["raise", "zero"]),
    clip_norm=st.sampled_from([None, 1e6]),
)
def test_any_order_of_calls_gives_each_sample_the_weight_of_its_window(
    script: list[tuple[str, int]], every: int, on_stale: Any, clip_norm: float | None
) -> None:
    """Each micro-batch has an action and a size; a plain list knows what its window holds."""
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=every, on_stale=on_stale, clip_norm=clip_norm)
    batches = [
        (action, rows(*[(i + j) % SAMPLES for j in range(size)]))
        for i, (action, size) in enumerate(script)
    ]
    expected = torch.zeros(SAMPLES, dtype=torch.float64)
    window: list[Tensor] = []

    def close() -> bool:
        if not window:
            return False
        samples = torch.cat(window)
        expected.add_(samples.sum(0) / len(samples))
        window.clear()
        return True

    def loop() -> Iterator[None]:
        for micro in acc.microbatches(list(batches)):
            action, batch = batches.pop(0)
            loss = probe(batch).sum()
            if action == "failed":
                with pytest.raises(MemoryError):
                    micro.backward(Exploding.apply(loss), len(batch))
                acc.discard()
                window.clear()
                continue
            if action == "refused":
                with pytest.raises(ga.GradaccumError):
                    micro.backward(loss, -1)
            if action == "skip":
                micro.skip()
            else:
                micro.backward(loss, len(batch))
                window.append(batch)
            if micro.last:
                assert close() == (micro.update is not None)
            if action == "flush":
                assert close() == (acc.flush() is not None)
            elif action == "discard":
                acc.discard()
                window.clear()
            elif action == "break":
                break
            assert acc.pending == len(window)
            yield

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ga.OpenWindowWarning)
        while batches:
            for _ in loop():
                pass
    acc.discard()
    assert probe.layer.weight.grad is None
    # each update rounds three times, and once more where it is added to the weight
    assert probe.weights() == pytest.approx(expected.tolist(), rel=4 * len(script) * EPS, abs=0)


TERMS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.tuples(st.lists(st.integers(0, SAMPLES - 1), max_size=3), st.integers(0, 4)),
    min_size=1,
)


@given(
    script=st.lists(
        st.tuples(st.sampled_from(["add", "add", "add", "skip", "flush"]), TERMS), max_size=8
    ),
    every=st.integers(1, 4),
    known=st.booleans(),
    mean=st.booleans(),
    on_stale=st.sampled_from(["raise", "zero"]),
)
def test_any_mixture_of_terms_is_divided_by_its_own_totals(
    script: list[tuple[str, Terms]], every: int, known: bool, mean: bool, on_stale: Any
) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=every, on_stale=on_stale)
    # where nothing is counted there is nothing, as with labels that are all ignored
    script = [
        (
            action,
            {name: (samples if count else [], count) for name, (samples, count) in terms.items()},
        )
        for action, terms in script
    ]
    expected = [0.0] * SAMPLES
    window: list[Terms] = []

    def counts(item: tuple[str, Terms]) -> dict[str, int]:
        return {name: count for name, (_, count) in item[1].items()}

    def close(act: Callable[[], object]) -> None:
        """Do what ends the window; it may refuse where no denominator is right."""
        counted = any(count for terms in window for _, count in terms.values())
        begun = acc.pending
        try:
            act()
        except ga.GradaccumError as error:
            assert not counted or (known and error.slug != "declared-count")  # noqa: PT017
            acc.discard()
            if not begun:
                micro.skip()
        else:
            assert counted or not window
            for sample, weight in enumerate(term_weights(window)):
                expected[sample] += weight
        window.clear()

    for micro in acc.microbatches(script, counts=counts if known else None):
        action, terms = micro.batch
        if action == "skip":
            close(micro.skip) if micro.last else micro.skip()
        else:
            window.append(terms)
            losses = {
                name: (probe(rows(*samples)).sum() / (max(count, 1) if mean else 1), count)
                for name, (samples, count) in terms.items()
            }
            add_losses = partial(micro.backward, losses, reduction="mean" if mean else "sum")
            close(add_losses) if micro.last else add_losses()
            if action == "flush" and not micro.last:
                close(acc.flush)
    assert acc.pending == 0
    # a weight is a sum of at most 3 terms' in each update, rounded a few times each
    bound = 8 * (len(script) + 1) * EPS
    assert probe.weights() == pytest.approx(expected, rel=bound, abs=0)


# --- what follows an update -------------------------------------------------------------------


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
    acc = ga.Accumulator(probe, probe.sgd, every=3)
    run(acc, probe, [rows(0, 1, 2), rows(3), rows(4, 5)])
    assert probe.weights() == exactly(*[1 / 6] * 6)
