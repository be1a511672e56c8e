"""A loss of several terms: each is divided by its own total."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum as ga
from probe import EPS, SAMPLES, Probe, exactly, rows, singles
from terms import TERM_WINDOWS, Terms, backward_terms, term_weights


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
