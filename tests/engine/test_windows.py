"""A window is one mean: of how many micro-batches, skipped ones, flushed or discarded ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradaccum as ga
from probe import SAMPLES, Probe, add, exactly, loss_fn, rows, run, singles


def test_the_probe_tells_a_mean_of_means_from_a_mean() -> None:
    probe = Probe()
    for batch in (rows(0, 1, 2), rows(3)):
        (probe(batch).mean() / 2).backward()
    probe.sgd.step()
    assert probe.weights() == exactly(1 / 6, 1 / 6, 1 / 6, 1 / 2)
    assert probe.weights() != exactly(1 / 4, 1 / 4, 1 / 4, 1 / 4)


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


def test_discard_with_nothing_to_drop_costs_no_micro_batch() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    for micro in acc.microbatches(singles(0, 4)):
        if micro.index == 0:
            acc.discard()
        add(micro, probe)
    assert probe.weights() == exactly(*[1 / 4] * 4)


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
