"""The samples of a window, and any of them as one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, final

import torch
from torch import Tensor

from gradaccum.planner.apparent import apparent_rows, apparent_size
from gradaccum.planner.padding import Side
from gradaccum.planner.pytree import Build, is_array

__all__ = ["Collated", "Leaf", "LeafKind", "Rows", "Samples"]

LeafKind: TypeAlias = Literal["rows", "column", "shared"]


class Samples(Protocol):
    """Samples of one window, in the order in which they came; `len` counts them."""

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Size of each sample without padding, in elements; None where no lengths were given."""

    @property
    def elements(self) -> float:
        """Elements that a sample has in the batch's tensors, padding included; 1 if unknown."""

    @property
    def largest(self) -> int:
        """Elements that the largest sample seems to have, before it is collated; 1 in a batch."""

    def __len__(self) -> int: ...

    def apparent(self) -> Sequence[int]:
        """How large each sample seems to be, where no lengths were given."""

    def microbatch(self, indices: Sequence[int], width: int | None) -> Any:
        """The samples at `indices`, in that order, as one batch.

        Args:
            indices: positions of the samples; neighbours in ascending order are taken as views.
            width: length of the longest of them, to which padding is cut; None cuts nothing.
        """


@final
@dataclass(frozen=True, slots=True)
class Collated:
    """A list of samples and the function that makes a batch of some of them."""

    samples: Sequence[Any]
    collate: Callable[[list[Any]], Any]
    lengths: tuple[int, ...] | None

    @property
    def elements(self) -> float:
        """Samples of a list tell nothing before they are collated."""
        return 1.0

    @property
    def largest(self) -> int:
        """See `Samples`."""
        return max(self.apparent())

    def __len__(self) -> int:
        return len(self.samples)

    def apparent(self) -> Sequence[int]:
        """See `Samples`."""
        return [apparent_size(sample) for sample in self.samples]

    def microbatch(self, indices: Sequence[int], width: int | None) -> Any:  # noqa: ARG002
        """The samples at `indices` through `collate`, which itself pads them to their longest."""
        return self.collate([self.samples[index] for index in indices])


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a batch, and what becomes of it in a micro-batch."""

    path: str
    value: Any
    kind: LeafKind
    """`rows`: a tensor or array indexed along dimension 0; `column`: a list or tuple with one item
    for each sample; `shared`: the same in every micro-batch."""

    padded: bool = False
    """Whether dimension 1 is cut to the micro-batch's width."""


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """A batch in containers of any kind, its samples along dimension 0 of every tensor."""

    leaves: tuple[Leaf, ...]
    build: Build
    count: int
    lengths: tuple[int, ...] | None
    side: Side = "right"
    trim: Callable[[Any, int], Any] | None = None

    @property
    def elements(self) -> float:
        """See `Samples`."""
        tensors = [leaf.value for leaf in self.leaves if isinstance(leaf.value, Tensor)]
        return max(sum(t.numel() for t in tensors if t.ndim) / self.count, 1.0)

    @property
    def largest(self) -> int:
        """See `Samples`: padded to one width, all are alike."""
        return 1

    def __len__(self) -> int:
        return self.count

    def apparent(self) -> Sequence[int]:
        """See `Samples`; what is in a row decides where a model looks at its padding."""
        leaves = [leaf.value for leaf in self.leaves if leaf.kind != "shared"]
        sizes = [apparent_rows(value, self.count) for value in leaves]
        return [max(row) for row in zip(*sizes, strict=True)]

    def microbatch(self, indices: Sequence[int], width: int | None) -> Any:
        """The rows at `indices` in containers like the batch's, padding cut to `width`."""
        chosen = _Chosen(indices)
        leaves = [self._take(leaf, chosen, width) for leaf in self.leaves]
        micro = self.build(iter(leaves))
        return micro if self.trim is None or width is None else self.trim(micro, width)

    def _take(self, leaf: Leaf, chosen: _Chosen, width: int | None) -> Any:
        if leaf.kind == "shared":
            return leaf.value
        if leaf.kind == "column":
            items = [leaf.value[index] for index in chosen.indices]
            kind: Callable[[list[Any]], Any] = type(leaf.value)
            return kind(items)
        values = leaf.value
        if leaf.padded and width is not None and width < values.shape[1]:
            columns = values[:, :width] if self.side == "right" else values[:, -width:]
            rows = chosen.rows(columns)
            # A batch that could be viewed flat (`labels.view(-1)`) still can once it is cut.
            return rows.contiguous() if isinstance(rows, Tensor) else rows
        return chosen.rows(values)


class _Chosen:
    """Positions of a micro-batch's samples, as what each kind of leaf is indexed with."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = list(indices)
        first, n = self.indices[0], len(self.indices)
        self._span = slice(first, first + n)
        self._contiguous = self.indices == list(range(first, first + n))
        self._on: dict[torch.device, Tensor] = {}

    def rows(self, values: Any) -> Any:
        if self._contiguous:
            return values[self._span]
        if is_array(values):
            return values[self.indices]
        if values.device not in self._on:
            positions = torch.tensor(self.indices, device="cpu")
            self._on[values.device] = positions.to(values.device, non_blocking=True)
        return values.index_select(0, self._on[values.device])
