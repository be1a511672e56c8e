"""Windows whose losses have several terms, and the weights that are right for them."""

from __future__ import annotations

import math

import gradaccum as ga
from probe import SAMPLES, Probe, rows

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
