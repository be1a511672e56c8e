"""Running sums of 24 bits: the leading three bytes of float32, as a bfloat16 and a byte.

The bfloat16 is the sum without what it has no room for, the byte compensates that: it holds the
next eight bits. Beside float32 this saves a byte for each parameter. (A bfloat16 sum with a
bfloat16 compensation, as in Kahan's summation, would save none.) Every addition is made in float32
and its result rounded once, to nearest with ties to even: it is off by 2⁻¹⁶ of the new sum at most.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Packed", "Room", "add_together_", "flat", "pack", "pack_narrow", "unpack"]


class Packed(NamedTuple):
    """A float32 tensor rounded to 24 bits; both parts lie densely and in one order."""

    sum: Tensor
    """Sign, exponent and the first seven bits of the fraction: bfloat16, rounded towards 0."""

    rest: Tensor
    """The next eight bits of the fraction: uint8."""

    def add_(self, grad: Tensor, room: Room) -> None:
        """Add a gradient of the same shape and strides in place, working in `room`."""
        parts = (flat(part).split(room.size) for part in (*self, grad))
        for total, rest, more in zip(*parts, strict=True):
            add_together_([total], [rest], [more], room)


def add_together_(sums: list[Tensor], rests: list[Tensor], grads: list[Tensor], room: Room) -> None:
    """Add gradients to packed sums in place, by as many operators as a single one takes.

    Args:
        sums: the first parts, flat.
        rests: the second parts, flat.
        grads: flat; no more elements in all than the room has.
        room: is worked in.
    """
    sizes = [len(grad) for grad in grads]
    bits, values, other = room.of(sum(sizes))
    pieces = other.split(sizes)
    torch._foreach_copy_(values.split(sizes), sums)
    torch._foreach_copy_(pieces, rests)
    bits.add_(other, alpha=1 << 8)
    wide = other.view(torch.float32)
    torch._foreach_copy_(wide.split(sizes), grads)
    values.add_(wide)
    _round(bits, values, other)
    torch.bitwise_right_shift(bits, 16, out=other)
    torch._foreach_copy_([total.view(torch.int16) for total in sums], pieces)
    torch.bitwise_right_shift(bits, 8, out=other)
    torch._foreach_copy_(rests, pieces)


class Room:
    """Memory that is worked in, so that an addition needs none.

    Args:
        size: elements of the largest tensor.
        device: where it is.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        # On the CPU what a cache holds; a device with queues wants few and large operations.
        most = 1 << 16 if device.type == "cpu" else 1 << 24
        self.size = max(1, min(size, most))
        self._bits, self._other = torch.empty((2, self.size), dtype=torch.int32, device=device)

    def of(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Integers, the same memory as float32, and other integers; each of `size` elements."""
        bits = self._bits[:size]
        return bits, bits.view(torch.float32), self._other[:size]


def pack(values: Tensor) -> Packed:
    """Round float32 `values` to 24 bits."""
    packed = Packed(
        torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.uint8)
    )
    if values.stride() != packed.sum.stride():
        values = torch.empty_like(packed.sum, dtype=torch.float32).copy_(values)
    room = Room(values.numel(), values.device)
    parts = (flat(part).split(room.size) for part in (*packed, values))
    for total, rest, value in zip(*parts, strict=True):
        bits, floats, other = room.of(len(total))
        floats.copy_(value)
        _split(bits, floats, other, total, rest)
    return packed


def pack_narrow(values: Tensor) -> Packed:
    """A bfloat16 tensor as a sum: the tensor itself, where it is dense, and nothing to add."""
    rest = torch.zeros_like(values, dtype=torch.uint8)
    if rest.stride() != values.stride():
        values = torch.empty_like(rest, dtype=torch.bfloat16).copy_(values)
    return Packed(values, rest)


def unpack(packed: Packed) -> Tensor:
    """The sums as float32, exactly."""
    values = torch.empty_like(packed.sum, dtype=torch.float32)
    room = Room(values.numel(), values.device)
    parts = (flat(part).split(room.size) for part in (*packed, values))
    for total, rest, value in zip(*parts, strict=True):
        bits, floats, other = room.of(len(total))
        _join(total, rest, bits, floats, other)
        value.copy_(floats)
    return values


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory, whatever its strides are."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _join(total: Tensor, rest: Tensor, bits: Tensor, values: Tensor, other: Tensor) -> None:
    values.copy_(total)
    bits.add_(other.copy_(rest), alpha=1 << 8)


def _split(bits: Tensor, values: Tensor, other: Tensor, total: Tensor, rest: Tensor) -> None:
    _round(bits, values, other)
    total.view(torch.int16).copy_(torch.bitwise_right_shift(bits, 16, out=other))
    rest.copy_(torch.bitwise_right_shift(bits, 8, out=other))


def _round(bits: Tensor, values: Tensor, other: Tensor) -> None:
    # The bits of floats, read as integers, count in units of the last place; rounding them would
    # carry some NaN over into a zero, while an infinity stays one.
    torch.nan_to_num(values, nan=math.inf, posinf=math.inf, neginf=-math.inf, out=values)
    torch.bitwise_right_shift(bits, 8, out=other)
    bits.add_(other.bitwise_and_(1).add_(0x7F))
