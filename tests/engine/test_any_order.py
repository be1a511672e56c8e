"""Any order of calls and any mixture of terms: a plain list knows what each window holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradaccum as ga
from probe import EPS, SAMPLES, Exploding, Probe, rows
from terms import Terms, term_weights

ACTIONS = ["add", "add", "add", "skip", "flush", "discard", "break", "refused", "failed"]


def probed(wide: bool) -> tuple[Probe, float, dict[str, Any]]:
    """A probe, its last place, and what sums its gradients in float64."""
    if wide:
        eps = torch.finfo(torch.float32).eps
        return Probe(torch.float32), eps, {"accumulate_dtype": torch.float64}
    return Probe(), EPS, {}


@given(
    script=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 3)), max_size=14),
    every=st.integers(1, 4),
    on_stale=st.sampled_from(["raise", "zero"]),
    clip_norm=st.sampled_from([None, 1e6]),
    wide=st.booleans(),
)
def test_any_order_of_calls_gives_each_sample_the_weight_of_its_window(
    script: list[tuple[str, int]],
    every: int,
    on_stale: Any,
    clip_norm: float | None,
    wide: bool,
) -> None:
    """Each micro-batch has an action and a size; a plain list knows what its window holds."""
    probe, eps, options = probed(wide)
    options |= {"on_stale": on_stale, "clip_norm": clip_norm}
    acc = ga.Accumulator(probe, probe.sgd, every=every, **options)
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
    assert probe.weights() == pytest.approx(expected.tolist(), rel=4 * len(script) * eps, abs=0)


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
    wide=st.booleans(),
)
def test_any_mixture_of_terms_is_divided_by_its_own_totals(
    script: list[tuple[str, Terms]],
    every: int,
    known: bool,
    mean: bool,
    on_stale: Any,
    wide: bool,
) -> None:
    probe, eps, options = probed(wide)
    acc = ga.Accumulator(probe, probe.sgd, every=every, on_stale=on_stale, **options)
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
    bound = 8 * (len(script) + 1) * eps
    assert probe.weights() == pytest.approx(expected, rel=bound, abs=0)
