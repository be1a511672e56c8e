"""How large samples look whose lengths nobody gave.

Only which of them are measured depends on it: the largest, so that no other takes more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from gradaccum.planner.pytree import is_array

__all__ = ["apparent_rows", "apparent_size"]

_CHUNK = 1 << 20
_DEEPEST = 8


def apparent_size(sample: object, depth: int = _DEEPEST) -> int:
    """Elements in a single sample, before it is collated; 1 for what tells nothing.

    Examples:
        >>> apparent_size({"ids": [5, 6, 7], "text": "ab", "label": 1})
        6
    """
    if isinstance(sample, Tensor):
        return sample.numel()
    if is_array(sample):
        return int(getattr(sample, "size", 1))
    if isinstance(sample, str | bytes):
        return len(sample)
    if depth == 0:
        return 1
    if isinstance(sample, Mapping):
        return _sum(sample.values(), depth)
    if isinstance(sample, list | tuple):
        return len(sample) if sample and isinstance(sample[0], Number) else _sum(sample, depth)
    if is_dataclass(sample):
        return _sum((getattr(sample, field.name) for field in fields(sample)), depth)
    return 1


def _sum(values: Iterable[Any], depth: int) -> int:
    return sum(apparent_size(value, depth - 1) for value in values)


def apparent_rows(values: object, count: int) -> Sequence[int]:
    """Elements of each row of a batch's leaf that are no padding, by the look of them.

    Taken for padding is what repeats the row's last element at its end, or its first at its
    beginning.

    Args:
        values: samples along dimension 0; or a list with an item for each.
        count: samples.

    Examples:
        >>> import torch
        >>> apparent_rows(torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0], [-1, -1, -1, 4]]), 3)
        [2, 3, 1]
    """
    if isinstance(values, list | tuple):
        return [apparent_size(value) for value in values]
    if is_array(values):
        values = torch.as_tensor(values)
    if not isinstance(values, Tensor) or values.layout is not torch.strided or values.ndim < 2:
        return [1] * count
    rows = values.detach().reshape(count, -1)
    if not rows.shape[1]:
        return [0] * count
    found: list[int] = []
    step = max(1, _CHUNK // rows.shape[1])
    for part in rows.split(step):
        ends = _run(part.flip(1)), _run(part)
        found += (rows.shape[1] - torch.maximum(*ends)).tolist()
    return found


def _run(rows: Tensor) -> Tensor:
    """How many elements at the beginning of each row are alike."""
    other = rows != rows[:, :1]
    return torch.where(other.any(1), other.int().argmax(1), rows.shape[1])
