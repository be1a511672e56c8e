"""Sums of gradients in more bits than the parameters have, kept outside of `.grad`.

A micro-batch's gradients arrive in `.grad`, which is empty before, and are added to the sums once
all of them are there. So a micro-batch that fails on the way is undone by dropping `.grad`: no
sum has been touched, and none had to be copied.

A parameter's first gradient of a window is kept as it is. Only the second makes a wide sum of it:
a window of one micro-batch is what plain torch would make it, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradaccum.engine.loss import Count, is_one
from gradaccum.engine.packed import Packed, Room, add_together_, flat, pack, pack_narrow, unpack

__all__ = ["Sum", "Sums", "Wide", "Width", "narrowed", "plain"]

Sum: TypeAlias = Tensor | Packed | None
"""A parameter's running sum: narrow as long as it is one gradient, then wide; `None` at first."""

Sums: TypeAlias = list[Sum]
"""One for each parameter, in the optimizers' order."""

CHUNK = 1 << 16
"""Elements that the CPU widens at a time: what a cache holds."""


class Width:
    """How wide the sums are to be.

    Args:
        dtype: of the sums of real parameters that are narrower; a complex one gets its complex
            counterpart; `None` if no sum is to be wider than its parameter.
        packed: keep the leading 24 bits of float32 between micro-batches.
        apart: keep sums apart from `.grad` also where none is wider, so that a micro-batch can
            be undone.
    """

    def __init__(self, dtype: torch.dtype | None, *, packed: bool, apart: bool = False) -> None:
        self.dtype = dtype
        self.packed = packed
        self.apart = apart
        self.name = "compensated" if packed else str(dtype).removeprefix("torch.")

    def of(self, parameter: Tensor) -> torch.dtype | None:
        """The dtype of a parameter's sum; `None` if the parameter is as wide."""
        if self.dtype is None or not (parameter.is_floating_point() or parameter.is_complex()):
            return None
        dtype = self.dtype.to_complex() if parameter.is_complex() else self.dtype
        return dtype if dtype.itemsize > parameter.dtype.itemsize else None

    def packs(self, dtype: torch.dtype | None) -> bool:
        """Whether dense sums of this dtype are packed."""
        return self.packed and dtype == torch.float32

    def over(self, parameters: Sequence[nn.Parameter]) -> Wide | None:
        """The sums of these parameters; `None` if they can be in `.grad`."""
        dtypes = [self.of(parameter) for parameter in parameters]
        return Wide(self, dtypes) if self.apart or any(dtypes) else None


class Wide:
    """The sums of an open window.

    Args:
        width: how wide they are.
        dtypes: of each parameter's sum, where it is wider than the parameter.
    """

    def __init__(self, width: Width, dtypes: list[torch.dtype | None]) -> None:
        self._width = width
        self._dtypes = dtypes
        self.sums: Sums = [None] * len(dtypes)
        self.changing = False
        """Whether additions have begun that are not done: they cannot be undone."""
        self._kept: dict[torch.dtype, Room | Tensor] = {}
        """What the CPU's additions work in during a backward; anew each time it would be mapped
        each time."""

    def add(self, arrived: Iterable[tuple[Sums, Sequence[Tensor | None]]]) -> None:
        """Add gradients to sums.

        What may fail for want of memory comes first and changes no value; the additions after it
        allocate nothing that grows with the model.
        """
        moved: list[tuple[Sums, int, Tensor | Packed]] = []
        dense: list[tuple[Tensor | Packed, Tensor]] = []
        for sums, grads in arrived:
            for i, grad in enumerate(grads):
                if grad is None:
                    continue
                total = sums[i]
                if total is None:
                    moved.append((sums, i, grad))
                    continue
                total = sums[i] = self._widened(total, i, pack_it=True)
                if grad.is_sparse or _is_sparse(total):
                    moved.append((sums, i, self._appended(total, grad, i)))
                else:
                    dense.append((total, _laid_like(grad, total)))
        rooms = _Rooms(dense, {})
        self.changing = True
        for sums, i, total in moved:
            sums[i] = total
        rooms.add()
        self.changing = False

    def add_some(self, sums: Sums, grads: Mapping[int, Tensor]) -> None:
        """Add gradients to sums that are there; `changing` stays until the next `add`.

        Args:
            sums: of all parameters.
            grads: by the position of their parameter.
        """
        dense: list[tuple[Tensor | Packed, Tensor]] = []
        appended: dict[int, Tensor | Packed] = {}
        for i, grad in grads.items():
            total = sums[i]
            assert total is not None
            total = sums[i] = self._widened(total, i, pack_it=True)
            if grad.is_sparse or _is_sparse(total):
                appended[i] = self._appended(total, grad, i)
            else:
                dense.append((total, _laid_like(grad, total)))
        rooms = _Rooms(dense, self._kept)
        self.changing = True
        for i, total in appended.items():
            sums[i] = total
        rooms.add()

    def forget_room(self) -> None:
        """Give back what additions have worked in."""
        self._kept = {}

    def combine(self, shares: Sequence[tuple[Sums, Count]]) -> None:
        """Make the sums `Σ factor · sum` of `shares`, of which they are the first themselves.

        It cannot be undone: `changing` stays until the next `add`.
        """
        for sums, _ in shares:
            for i, total in enumerate(sums):
                if total is not None:
                    sums[i] = self._widened(total, i, pack_it=False)
        self.changing = True
        (own, factor), *others = shares
        scale_(own, factor)
        for sums, factor in others:
            scale_(sums, factor)
            for i, total in enumerate(sums):
                if total is not None:
                    assert isinstance(total, Tensor)
                    mine = own[i]
                    own[i] = total if mine is None else _sum_of(mine, total)
                    sums[i] = None
        self.sums = own  # `changing` stays: what has landed is still to be added

    def stand(self, *, widen: bool) -> bool:
        """Make plain tensors of all sums, as the update needs them; return whether some are wide.

        Args:
            widen: also where every parameter had one gradient, or none, in this window.
        """
        if not widen and not any(map(_is_wide, self.sums, self._dtypes)):
            return False
        for i, total in enumerate(self.sums):
            if total is not None:
                self.sums[i] = self._widened(total, i, pack_it=False)
        return True

    def coalesce(self) -> None:
        """List each row of a sparse sum once."""
        self.sums = [
            total.coalesce() if isinstance(total, Tensor) and total.is_sparse else total
            for total in self.sums
        ]

    def adopt(self, sums: Sequence[Tensor | None]) -> Sums:
        """Sums of a saved window as they are kept."""
        return [
            pack(total)
            if total is not None
            and total.dtype == dtype
            and not total.is_sparse
            and self._width.packs(dtype)
            else total
            for total, dtype in zip(sums, self._dtypes, strict=True)
        ]

    def _widened(self, total: Tensor | Packed, i: int, *, pack_it: bool) -> Tensor | Packed:
        dtype = self._dtypes[i]
        if isinstance(total, Packed):
            return total if pack_it else unpack(total)
        if dtype is None or total.dtype == dtype:
            return total
        if total.is_sparse:
            return _sparse_to(total, dtype)
        if not pack_it or not self._width.packs(dtype):
            return total.to(dtype)
        return pack_narrow(total) if total.dtype == torch.bfloat16 else pack(total.to(dtype))

    def _appended(self, total: Tensor | Packed, grad: Tensor, i: int) -> Tensor | Packed:
        """A sum with a sparse part: the rows of both, or dense."""
        total = plain(total)
        dtype = self._dtypes[i] or total.dtype
        grad = _sparse_to(grad, dtype) if grad.is_sparse else grad.to(dtype)
        both = total + grad if grad.is_sparse else grad + total
        if not both.is_sparse:
            return pack(both) if self._width.packs(dtype) else both
        # Sparse gradients add by appending rows: their memory would grow with the micro-batches.
        return both.coalesce() if both._nnz() > 2 * both.shape[0] else both


class _Rooms:
    """Additions that are about to be made, and the memory that they need.

    On the CPU small ones are made together: what an operator costs by itself, its code not in a
    cache, is more than what it does for a small tensor.

    Args:
        dense: sums, and the gradients that are added to them.
        kept: rooms of earlier additions on the CPU, by the dtype of the sums.
    """

    def __init__(
        self,
        dense: list[tuple[Tensor | Packed, Tensor]],
        kept: dict[torch.dtype, Room | Tensor],
    ) -> None:
        self._alone: list[tuple[Tensor | Packed, Tensor]] = []
        self._packed: dict[torch.device, Room] = {}
        self._together: dict[torch.dtype, list[tuple[Tensor | Packed, Tensor]]] = {}
        self._kept = kept
        packed: dict[torch.device, int] = {}
        for total, grad in dense:
            if grad.is_cpu and (isinstance(total, Packed) or total.dtype != grad.dtype):
                # Only the CPU's kernels make a wide copy of the whole gradient first.
                kind = _PACKED if isinstance(total, Packed) else total.dtype
                self._together.setdefault(kind, []).append((total, grad))
                continue
            self._alone.append((total, grad))
            if isinstance(total, Packed):
                packed[grad.device] = max(grad.numel(), packed.get(grad.device, 0))
        self._packed = {device: Room(size, device) for device, size in packed.items()}
        for kind, pairs in self._together.items():
            _make_room(kept, kind, sum(grad.numel() for _, grad in pairs))

    def add(self) -> None:
        for total, grad in self._alone:
            if isinstance(total, Packed):
                total.add_(grad, self._packed[grad.device])
            else:
                total.add_(grad)
        for kind, pairs in self._together.items():
            room = self._kept[kind]
            size = room.size if isinstance(room, Room) else len(room)
            for totals, grads in _bundles(pairs, size):
                if isinstance(room, Room):
                    sums, rests = ([total[part] for total in totals] for part in (0, 1))
                    add_together_(sums, rests, grads, room)
                else:
                    sizes = [len(grad) for grad in grads]
                    wide = room[: sum(sizes)].split(sizes)
                    torch._foreach_copy_(wide, grads)
                    torch._foreach_add_([total for (total,) in totals], wide)


_PACKED = torch.bfloat16
"""Under which the room of packed sums is kept: none is in that dtype itself."""


def _make_room(kept: dict[torch.dtype, Room | Tensor], kind: torch.dtype, wanted: int) -> None:
    size = max(1, min(wanted, CHUNK))
    room = kept.get(kind)
    if room is None or (room.size if isinstance(room, Room) else len(room)) < size:
        cpu = torch.device("cpu")
        kept[kind] = (
            Room(size, cpu) if kind == _PACKED else torch.empty(size, dtype=kind, device=cpu)
        )


def _bundles(
    pairs: Iterable[tuple[Tensor | Packed, Tensor]], size: int
) -> Iterator[tuple[list[tuple[Tensor, ...]], list[Tensor]]]:
    """The parts of sums, and gradients, all flat, in bundles of `size` elements at most."""
    totals: list[tuple[Tensor, ...]] = []
    grads: list[Tensor] = []
    left = size
    for total, grad in pairs:
        parts = tuple(map(flat, total)) if isinstance(total, Packed) else (flat(total),)
        more, start, n = flat(grad), 0, grad.numel()
        while start < n:
            end = min(n, start + left)
            totals.append(tuple(part[start:end] for part in parts))
            grads.append(more[start:end])
            left -= end - start
            start = end
            if not left:
                yield totals, grads
                totals, grads, left = [], [], size
    if grads:
        yield totals, grads


def scale_(sums: Sums, factor: Count) -> None:
    """Multiply plain sums in place."""
    if is_one(factor):
        return
    for total in sums:
        if isinstance(total, Tensor):
            total.mul_(factor.to(total.device) if isinstance(factor, Tensor) else factor)


def plain(total: Tensor | Packed) -> Tensor:
    """A sum as a tensor; a packed one as float32."""
    return unpack(total) if isinstance(total, Packed) else total


def narrowed(total: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum in a parameter's own dtype, rounded once; a sparse one with each row once."""
    if total.dtype == dtype:
        return total
    return _sparse_to(total.coalesce(), dtype) if total.is_sparse else total.to(dtype)


def _sum_of(one: Tensor | Packed, other: Tensor) -> Tensor:
    assert isinstance(one, Tensor)
    if one.is_sparse:
        return other.add_(one) if not other.is_sparse else one + other
    return one.add_(other)


def _laid_like(grad: Tensor, total: Tensor | Packed) -> Tensor:
    """The gradient with its elements in the order of the sum's memory."""
    like = total.sum if isinstance(total, Packed) else total
    if grad.stride() == like.stride():
        return grad
    return torch.empty_like(like, dtype=grad.dtype).copy_(grad)


def _sparse_to(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.sparse_coo_tensor(
        grad._indices(),
        grad._values().to(dtype),
        grad.shape,
        is_coalesced=grad.is_coalesced(),
        check_invariants=False,
    )


def _is_sparse(total: Tensor | Packed) -> bool:
    return isinstance(total, Tensor) and total.is_sparse


def _is_wide(total: Sum, dtype: torch.dtype | None) -> bool:
    return isinstance(total, Packed) or (total is not None and total.dtype == dtype)
