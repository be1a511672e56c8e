"""The optimum against all ways of grouping, and against a plain dynamic programme."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.planner.optimum import cut, cut_within
from grouping import all_partitions

lengths_of = st.lists(st.integers(1, 40), min_size=1, max_size=9).map(
    lambda lengths: sorted(lengths, reverse=True)
)


def rooms(lengths: list[int], budget: int) -> list[int]:
    return [budget // length for length in lengths]


def least_padded(lengths: list[int], room: list[int]) -> list[float]:
    """By number of groups, the least padded size: every group of the descending list, tried."""
    n = len(lengths)
    best = [[math.inf] * (n + 1) for _ in range(n + 1)]
    best[0][0] = 0
    for groups in range(1, n + 1):
        for end in range(1, n + 1):
            for start in range(end):
                size = lengths[start] * (end - start)
                if end - start <= room[start]:
                    best[groups][end] = min(best[groups][end], best[groups - 1][start] + size)
    return [row[n] for row in best]


def cost(lengths: list[int], bounds: list[int], overhead: int) -> int:
    return sum(lengths[a] * (b - a) + overhead for a, b in pairwise(bounds))


def check_groups(lengths: list[int], bounds: list[int], room: list[int]) -> None:
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    for start, end in pairwise(bounds):
        assert start < end
        assert end - start <= room[start]


@st.composite
def lengths_and_rooms(draw, elements, min_size, max_size):
    """Descending lengths, and how many samples may go with each: any numbers that never descend."""
    lengths = sorted(draw(st.lists(elements, min_size=min_size, max_size=max_size)), reverse=True)
    steps = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    room, found = draw(st.integers(1, 4)), {}
    for length, step in zip(lengths, steps, strict=True):
        if length not in found:
            room += step
            found[length] = room
    return lengths, [found[length] for length in lengths]


@given(lengths_and_rooms(st.integers(1, 40), 1, 9), st.integers(0, 60), st.integers(1, 9))
def test_no_grouping_within_the_cap_costs_less(lengths_and_room, overhead, most):
    lengths, room = lengths_and_room
    by_groups = least_padded(lengths, room)
    bounds = cut_within(lengths, room, overhead, most)
    check_groups(lengths, bounds, room)
    groups = len(bounds) - 1
    if groups > most:
        # The cap cannot be met; then it must be the least number that can.
        assert by_groups[:groups] == [math.inf] * groups
    else:
        costs = [padded + overhead * count for count, padded in enumerate(by_groups)]
        assert cost(lengths, bounds, overhead) == min(costs[: most + 1])
        assert min(costs[:groups], default=math.inf) > costs[groups], "fewer would do as well"


@given(lengths_and_rooms(st.integers(1, 12), 1, 6), st.integers(0, 9))
def test_neighbours_in_descending_order_are_enough(lengths_and_room, overhead):
    lengths, room = lengths_and_room
    most = dict(zip(lengths, room, strict=True))
    ways = (
        sum(len(group) * max(group) + overhead for group in partition)
        for partition in all_partitions(lengths)
        if all(len(group) <= most[max(group)] for group in partition)
    )
    bounds = cut(lengths, room, scale=1, price=overhead)
    assert cost(lengths, bounds, overhead) == min(ways)


@given(st.lists(st.integers(1, 2000), min_size=50, max_size=120), st.integers(1, 8))
def test_the_optimum_of_longer_lists(lengths, times):
    lengths.sort(reverse=True)
    budget, overhead = times * lengths[0], 128
    best = [0.0] * (len(lengths) + 1)
    for end in range(1, len(lengths) + 1):
        best[end] = min(
            best[start] + lengths[start] * (end - start) + overhead
            for start in range(end)
            if lengths[start] * (end - start) <= budget
        )
    bounds = cut(lengths, rooms(lengths, budget), scale=1, price=overhead)
    check_groups(lengths, bounds, rooms(lengths, budget))
    assert cost(lengths, bounds, overhead) == best[-1]


@given(st.lists(st.integers(1, 500), min_size=20, max_size=40), st.integers(1, 20))
def test_the_optimum_of_longer_lists_within_a_cap(lengths, most):
    lengths.sort(reverse=True)
    budget = -(-len(lengths) // most) * lengths[0]
    room = rooms(lengths, budget)
    bounds = cut_within(lengths, room, 0, most)
    check_groups(lengths, bounds, room)
    assert len(bounds) - 1 <= most
    assert cost(lengths, bounds, 0) == min(least_padded(lengths, room)[: most + 1])


@given(lengths_and_rooms(st.integers(1, 500), 20, 40), st.integers(1, 20))
def test_the_optimum_of_longer_lists_with_any_room_within_a_cap(lengths_and_room, most):
    lengths, room = lengths_and_room
    bounds = cut_within(lengths, room, 0, most)
    check_groups(lengths, bounds, room)
    by_groups = least_padded(lengths, room)
    if len(bounds) - 1 > most:
        assert by_groups[: len(bounds) - 1] == [math.inf] * (len(bounds) - 1)
    else:
        assert cost(lengths, bounds, 0) == min(by_groups[: most + 1])


@pytest.mark.parametrize(
    ("lengths", "budget", "bounds"),
    [
        ([5], 5, [0, 1]),
        ([5, 5, 5, 5], 10, [0, 2, 4]),
        ([9, 1, 1, 1], 9, [0, 1, 4]),
        ([9, 9, 1, 1], 100, [0, 2, 4]),
    ],
)
def test_groups_one_would_choose_by_hand(lengths, budget, bounds):
    assert cut_within(lengths, rooms(lengths, budget), 3, len(lengths)) == bounds
