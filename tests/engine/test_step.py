"""`acc.step`: a batch of one's own is one update, in and outside of a loop."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from probe import Probe, add, exactly, leave, loss_fn, rows, run, singles


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
