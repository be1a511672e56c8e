"""All ways of putting things into groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def all_partitions(items: list[T]) -> Iterator[list[list[T]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for partition in all_partitions(rest):
        yield [[first], *partition]
        for position, group in enumerate(partition):
            yield [*partition[:position], [first, *group], *partition[position + 1 :]]
