"""Loops inside one another and side by side, over one accumulator and over several."""

from __future__ import annotations

import gc
import re

import pytest
import torch

import gradaccum as ga
from probe import Probe, add, exactly, rows, run, singles


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
