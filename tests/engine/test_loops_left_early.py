"""A loop that ends in mid-window: what is said, what is kept, and how one goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from probe import SAMPLES, Exploding, Probe, add, exactly, rows, run, singles


# Not the shared one: the warning names the file of the loop, and a test looks for it.
def leave(acc: ga.Accumulator, probe: Probe, batches: Iterable[Tensor], after: int) -> None:
    """Break out of a loop once `after` micro-batches have been added."""
    for i, micro in enumerate(acc.microbatches(batches)):
        add(micro, probe)
        if i + 1 == after:
            break


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


@pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "within", "last, where sums are merged"])
@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_a_backward_that_fails_before_anything_arrived_leaves_the_window_as_it_was(
    bad: int, on_stale: Any
) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=3, on_stale=on_stale)
    batches = [rows(0, 1), rows(2), rows(3)]
    kept = [row for i, batch in enumerate(batches) if i != bad for row in batch.nonzero()[:, 1]]
    for i, micro in enumerate(acc.microbatches(batches)):
        out = probe(micro.batch).sum()
        if i != bad:
            micro.backward(out, len(micro.batch))
            continue
        before = acc.pending, acc.state_dict()["gradients"]
        with pytest.raises(MemoryError, match="The window is as it was before it"):
            micro.backward(out + Exploding.apply(out), len(micro.batch))
        assert str((acc.pending, acc.state_dict()["gradients"])) == str(before)
        micro.skip()
    expected = [1 / len(kept) if i in kept else 0.0 for i in range(SAMPLES)]
    assert probe.weights() == exactly(*expected)
    assert not probe.layer.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "within", "last, where sums are merged"])
@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_a_backward_that_fails_half_way_can_be_taken_back_only_where_nothing_stood(
    bad: int, on_stale: Any
) -> None:
    model = nn.Linear(2, 1).double()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    acc = ga.Accumulator(model, sgd, every=3, on_stale=on_stale)
    for i, micro in enumerate(acc.microbatches([1, 2, 3])):
        weight, bias = model.weight.sum() * micro.batch, model.bias.sum() * micro.batch
        if i != bad:
            micro.backward(weight + bias, 1)
            continue
        late = Exploding.apply(weight)
        arrivals: list[Tensor] = []
        hook = model.bias.register_post_accumulate_grad_hook(arrivals.append)
        with pytest.raises(MemoryError) as raised:
            # what was computed last arrives first: the bias
            micro.backward(late + model.bias.sum() * micro.batch, 1)
        hook.remove()
        assert len(arrivals) == 1
        if bad == 0:
            assert "The window is as it was before it" in str(raised.value)
            micro.skip()
            continue
        assert "some of its gradients had been added" in str(raised.value)
        for attempt in (micro.skip, acc.flush, acc.state_dict):
            with pytest.raises(ga.GradaccumError) as caught:
                attempt()
            assert caught.value.slug == "window-broken"
            assert "acc.discard()" in caught.value.do
        acc.discard()
    assert all(p.grad is None for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert acc.updates == (bad < 2)


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


def test_an_empty_loader_after_a_break_does_not_hide_the_open_window() -> None:
    """What the loop promises is that no gradient outlives the iterable in silence."""
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=4)
    with pytest.warns(ga.OpenWindowWarning):
        leave(acc, probe, singles(), after=2)
    with pytest.warns(ga.OpenWindowWarning):
        run(acc, probe, [])
    acc.discard()
