"""Whatever the loader gives, or fails to give, each sample has the weight of its window."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import gradaccum as ga
from probe import SAMPLES, Probe, add, exactly, leave, rows, run, singles


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
