"""Random bits by counter: the published function, and what independent bits must look like."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gradaccum.engine.policies import counter
from gradaccum.engine.policies.counter import Layout, keep, key_of, normal, uniform

ROWS = Layout(0)
SAMPLES = torch.arange(64)
SHAPE = (64, 1000)
MANY = 64 * 1000
FAR = 5.0
"""Standard deviations: one test in a million is farther out by chance, and the seeds are fixed."""


def splitmix64(z: int) -> int:
    """The finaliser as published, in Python's own integers."""
    wrap = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return z ^ (z >> 31)


def signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def test_the_mixing_is_the_published_one() -> None:
    values = [key_of("value", i) for i in range(1000)] + [0, 1, (1 << 63), (1 << 64) - 1]
    mixed = counter._mix_(torch.tensor([signed(v) for v in values]))
    assert mixed.tolist() == [signed(splitmix64(v)) for v in values]


def correlation(one: Tensor, other: Tensor) -> float:
    """Of two masks of the same probability, in standard deviations of independent ones."""
    a, b = one.double().flatten(), other.double().flatten()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm())) * math.sqrt(a.numel())


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_each_element_is_kept_with_its_probability(probability: float) -> None:
    mask = keep(7, SAMPLES, SHAPE, ROWS, probability)
    spread = math.sqrt(probability * (1 - probability))
    assert abs(float(mask.double().mean()) - probability) < FAR * spread / math.sqrt(MANY)
    by_row = (mask.double().mean(1) - probability) * math.sqrt(SHAPE[1]) / spread
    by_column = (mask.double().mean(0) - probability) * math.sqrt(SHAPE[0]) / spread
    # the mean of squares of standard normal numbers, whose own deviation is √(2/n)
    for found in (by_row, by_column):
        n = len(found)
        assert abs(float(found.square().mean()) - 1) < FAR * math.sqrt(2 / n) + 1 / spread**2 / n


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_neighbours_samples_places_and_updates_are_independent(probability: float) -> None:
    mask = keep(7, SAMPLES, SHAPE, ROWS, probability)
    others = {
        "the next place": keep(8, SAMPLES, SHAPE, ROWS, probability),
        "the next samples": keep(7, SAMPLES + 1, SHAPE, ROWS, probability)[:-1],
        "samples far away": keep(7, SAMPLES + 2**40, SHAPE, ROWS, probability),
    }
    assert abs(correlation(mask, others["the next place"])) < FAR
    assert torch.equal(mask[1:], others["the next samples"])  # the same samples, one row up
    assert abs(correlation(mask[:-1], mask[1:])) < FAR
    assert abs(correlation(mask, others["samples far away"])) < FAR
    for shift in (1, 2, 3, 64, 256):
        assert abs(correlation(mask[:, shift:], mask[:, :-shift])) < FAR
    keys = [key_of(key_of(1, update), "layer", "dropout", 0) for update in range(32)]
    masks = [keep(key, SAMPLES, SHAPE, ROWS, probability) for key in keys]
    for one, other in pairwise(masks):
        assert abs(correlation(one, other)) < FAR


def test_certain_outcomes_are_certain() -> None:
    assert keep(7, SAMPLES, SHAPE, ROWS, 1.0).all()
    assert not keep(7, SAMPLES, SHAPE, ROWS, 0.0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_fill_their_range_evenly(dtype: torch.dtype) -> None:
    found = uniform(7, SAMPLES, SHAPE, ROWS, dtype)
    assert found.dtype == dtype
    assert found.min() >= 0
    assert found.max() < 1
    counts = torch.histc(found.double(), bins=64, min=0, max=1)
    expected = MANY / 64
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi - 63) < FAR * math.sqrt(2 * 63)


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    found = normal(7, SAMPLES, SHAPE, ROWS, torch.float64)
    # E x, E x², E x³, E x⁴ and the deviations of their estimates
    for power, (moment, spread) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], 1):
        far = FAR * math.sqrt(spread / MANY)
        assert abs(float(found.pow(power).mean()) - moment) < far


@pytest.mark.parametrize(
    "make",
    [lambda *a: keep(*a, 0.5), lambda *a: uniform(*a, torch.float32)],
    ids=["mask", "uniform"],
)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 4), (5, 1, 1, 2)])
def test_a_sample_has_its_numbers_wherever_it_is(make: object, shape: tuple[int, ...]) -> None:
    samples = torch.tensor([3, 0, 9, 4, 7])
    whole = make(11, samples, shape, ROWS)  # type: ignore[operator]
    for rows in ([0], [1, 2], [4, 0]):
        some = make(11, samples[rows], (len(rows), *shape[1:]), ROWS)  # type: ignore[operator]
        assert torch.equal(some, whole[rows])


@pytest.mark.parametrize("from_end", [False, True])
def test_a_position_has_its_numbers_whatever_the_padded_width(from_end: bool) -> None:
    layout = Layout(0, from_end)
    wide = keep(11, SAMPLES, (64, 3, 9, 9), layout, 0.5)
    narrow = keep(11, SAMPLES, (64, 3, 5, 5), layout, 0.5)
    expected = wide[:, :, -5:, -5:] if from_end else wide[:, :, :5, :5]
    assert torch.equal(narrow, expected)


@pytest.mark.parametrize("from_end", [False, True])
def test_samples_along_other_dimensions_and_in_runs(from_end: bool) -> None:
    samples = torch.tensor([5, 2, 8])
    time_major = keep(11, samples, (6, 3, 4), Layout(1, from_end), 0.5)
    assert torch.equal(
        keep(11, samples[[2]], (6, 1, 4), Layout(1, from_end), 0.5), time_major[:, [2]]
    )
    heads = keep(11, samples, (3 * 4, 6), Layout(0, from_end), 0.5)
    assert torch.equal(keep(11, samples[[1]], (4, 6), Layout(0, from_end), 0.5), heads[4:8])
    shared = keep(11, samples, (6, 4), Layout(None), 0.5)
    assert torch.equal(shared, keep(11, samples[:1], (6, 4), Layout(None), 0.5))
