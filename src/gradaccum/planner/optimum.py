"""Cutting a descending list of lengths into groups of least cost: exact, in plain integers.

A group costs `scale * samples * longest + price`, and how many samples it may have depends on its
longest: the longer, the fewer. Contiguous groups of the descending list are
enough: where a sample of one group is longer than a sample of a group with a longer longest,
exchanging the two never makes either group wider, so what was allowed stays allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["cut", "cut_within"]


def cut(lengths: Sequence[int], room: Sequence[int], *, scale: int, price: int) -> list[int]:
    """Bounds `[0, ..., n]` of the groups of least total cost, none larger than it may be.

    As `best[j] = min over i of best[i] + scale * lengths[i] * (j - i) + price`, where group `i:j`
    is allowed up to `j = i + room[i]`; in O(n).

    Args:
        lengths: descending, each at least 1, in elements.
        room: most samples of a group whose longest is that one; each at least 1, never descending.
        scale: weight of a padded element; at least 0.
        price: cost of one group; at least 0.
    """
    n = len(lengths)
    slope = [scale * length for length in lengths]
    base, best, origin = [0] * n, [0] * (n + 1), [0] * (n + 1)
    last = [start + most for start, most in enumerate(room)]
    # Starts that still can win, and the first end at which each does. As lengths descend, a later
    # start grows slower and stays allowed for longer: once it wins over an earlier, it always does.
    queue: list[int] = []
    since: list[int] = []
    head = 0
    for start in range(n):
        base[start] = best[start] + price - slope[start] * start
        wins = start + 1
        while len(queue) > head:
            old = queue[-1]
            wins = last[old] + 1
            if slope[old] > slope[start]:
                wins = min(wins, -((base[old] - base[start]) // (slope[old] - slope[start])))
            elif base[start] <= base[old]:
                wins = start + 1
            if wins > since[-1]:
                break
            queue.pop()
            since.pop()
        if wins <= n or len(queue) == head:
            queue.append(start)
            since.append(wins)
        end = start + 1
        while head + 1 < len(queue) and since[head + 1] <= end:
            head += 1
        origin[end] = queue[head]
        best[end] = base[origin[end]] + slope[origin[end]] * end
    bounds = [n]
    while bounds[-1]:
        bounds.append(origin[bounds[-1]])
    return bounds[::-1]


def cut_within(lengths: Sequence[int], room: Sequence[int], overhead: int, most: int) -> list[int]:
    """Bounds of at most `most` groups of least cost; of the fewest, if even these are more.

    The least padded size is convex in the number of groups, because the cost of a group is Monge.
    So a price for each group is sought at which the optimum passes `most`, by the secant between
    an optimum with fewer groups and one with more.

    Args:
        lengths: descending, each at least 1, in elements.
        room: most samples of a group whose longest is that one; each at least 1, never descending.
        overhead: cost of one group in padded elements.
        most: most groups; at least 1.
    """
    n = len(lengths)
    # The scale leaves room for a price of 1: of equal optima, the one with fewer groups.
    many = cut(lengths, room, scale=n + 1, price=(n + 1) * overhead + 1)
    if len(many) - 1 <= most:
        return many
    few = cut(lengths, room, scale=1, price=n * lengths[0] + 1)
    while len(few) - 1 < most:
        scale = len(many) - len(few)
        price = _padded(lengths, few) - _padded(lengths, many)
        middle = cut(lengths, room, scale=scale, price=price)
        if _cost(lengths, middle, scale, price) == _cost(lengths, few, scale, price):
            return _splice(few, many, most)
        if len(middle) - 1 <= most:
            few = middle
        else:
            many = middle
    return few


def _splice(few: list[int], many: list[int], groups: int) -> list[int]:
    """An optimum of exactly `groups`, between two optima for the same price.

    There is a group of `many` inside a group of `few` such that following `many` up to it and
    `few` after it makes `groups`; the Monge inequality says that neither way of crossing over
    costs more than the two it came from.
    """
    shift = groups - (len(few) - 1)
    at = next(at for at in range(len(few) - 1) if few[at + 1] >= many[at + 1 + shift])
    return many[: at + shift + 1] + few[at + 1 :]


def _padded(lengths: Sequence[int], bounds: list[int]) -> int:
    return sum(lengths[start] * (end - start) for start, end in pairwise(bounds))


def _cost(lengths: Sequence[int], bounds: list[int], scale: int, price: int) -> int:
    return scale * _padded(lengths, bounds) + price * (len(bounds) - 1)
