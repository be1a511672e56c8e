"""Plans bounded by bytes, against all ways of grouping; and the model that they are bounded by."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.errors import PlanError
from gradaccum.planner.within import even_within, plan_within, rooms
from gradaccum.records import MemoryModel, Phase, Plan
from grouping import all_partitions

coefficients = st.tuples(*[st.integers(0, 9)] * 3)
phases = st.builds(Phase, coefficients, coefficients)
models = st.builds(
    MemoryModel, st.lists(phases, min_size=1, max_size=3).map(tuple), st.integers(0, 50)
)


@given(models, st.integers(1, 30), st.integers(1, 30), st.integers(0, 3000))
def test_most_is_the_most(model, samples, width, limit):
    most = model.most(limit, width)
    assert all(model.fits(n, width, limit) is (n <= most) for n in range(1, 40))
    assert model.bytes(samples, width) <= model.bytes(samples + 1, width)
    assert model.bytes(samples, width) <= model.bytes(samples, width + 1)
    assert MemoryModel.from_dict(json.loads(json.dumps(model.as_dict()))) == model


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), models, st.integers(0, 3000))
def test_rooms_are_what_trying_every_number_gives(lengths, model, limit):
    lengths.sort(reverse=True)
    asked = []

    def fits(samples, width):
        asked.append((samples, width))
        return model.fits(samples, width, limit)

    n = len(lengths)
    plain = [
        max((k for k in range(1, n + 1) if model.fits(k, width, limit)), default=0)
        for width in lengths
    ]
    assert rooms(lengths, fits) == plain
    assert len(asked) <= len(set(lengths)) * (2 * n.bit_length() + 2)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    models,
    st.integers(0, 900),
    st.integers(0, 9),
)
def test_no_way_of_grouping_that_fits_costs_less(lengths, model, room, overhead):
    limit = model.bytes(1, max(lengths)) + room
    plan = plan_within(lengths, model, limit, overhead=overhead)
    assert sorted(i for micro in plan for i in micro.indices) == list(range(len(lengths)))
    for micro in plan:
        assert micro.width == max(lengths[i] for i in micro.indices)
        assert micro.bytes == model.bytes(len(micro.indices), micro.width) <= limit
    sizes = [micro.bytes for micro in plan]
    assert sizes == sorted(sizes, reverse=True)
    ways = (
        sum(len(group) * max(group) + overhead for group in partition)
        for partition in all_partitions(lengths)
        if all(model.fits(len(group), max(group), limit) for group in partition)
    )
    assert plan.cost == min(ways)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_quadratic_price_splits_what_a_budget_would_not():
    square = MemoryModel((Phase((0, 0, 0), (0, 0, 1)),), resident=0)
    plan = plan_within([10] * 8 + [100], square, 10_000, overhead=0, microbatches=2)
    assert [(len(micro.indices), micro.width) for micro in plan] == [(1, 100), (8, 10)]
    both = plan_within([10] * 8 + [100], square, 10_000, overhead=0, budget=100)
    assert max(micro.padded for micro in both) <= 100


def test_the_bytes_are_shown():
    model = MemoryModel((Phase((0, 0, 0), (0, 1, 0)),), resident=1000)
    text = str(plan_within([5, 7], model, 2000))
    assert "memory 2,000 bytes" in text
    assert "1,014" in text


def test_what_cannot_fit_is_named_with_the_bytes_needed():
    model = MemoryModel((Phase((0, 0, 0), (0, 100, 0)),), resident=1000, step=500)
    with pytest.raises(PlanError) as caught:
        plan_within([5, 50, 7, 90], model, 3000)
    assert caught.value.slug == "memory-sample"
    assert "A single sample of length 50 does not fit" in str(caught.value)
    assert "sample 1, and 1 more: 6,000 bytes are predicted" in str(caught.value)
    assert "memory >= 10,000 bytes" in str(caught.value)
    with pytest.raises(PlanError) as caught:
        plan_within([5], model, 1400)
    assert caught.value.slug == "memory-floor"
    assert "memory=1500 or more" in str(caught.value)
    with pytest.raises(PlanError, match="budget >= 90"):
        plan_within([5, 90], model, 100_000, budget=60)
    with pytest.raises(PlanError, match=re.escape("microbatches >= 2 with this memory")):
        plan_within([10, 10], model, 2500, microbatches=1)


def test_even_micro_batches():
    model = MemoryModel((Phase((0, 0, 0), (100, 0, 0)),), resident=1000)
    assert [even_within(64, model, limit) for limit in (1100, 1200, 2600, 10**6)] == [64, 32, 4, 1]
    with pytest.raises(PlanError, match="A single sample does not fit"):
        even_within(64, model, 1050)


@pytest.mark.parametrize(
    "change",
    [
        {"phases": []},
        {"phases": [{"shared": [0, 0, 0], "each": [0, -1, 0]}]},
        {"phases": [{"shared": [0, 0], "each": [0, 1, 0]}]},
        {"phases": [{"shared": [0, 0, float("nan")], "each": [0, 1, 0]}]},
        {"resident": 1.5},
        {"step": None},
    ],
)
def test_models_that_are_none(change):
    good = MemoryModel((Phase((0, 0, 0), (1, 0, 0)),), resident=1).as_dict()
    with pytest.raises((ValueError, TypeError)):
        MemoryModel.from_dict({**good, **change})
