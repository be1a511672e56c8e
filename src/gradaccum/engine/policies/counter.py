"""Random bits that are a function of where they are used, not of when they are drawn.

The bits of an element are a hash of a key, its sample's number and its coordinates, by the
finaliser of SplitMix64 (Steele, Lea and Flood, 2014, https://doi.org/10.1145/2660193.2660195):
applied once for each dimension, it turns a key and a coordinate into the next key. Nothing is drawn
from a generator, so a sample's bits are the same in any micro-batch, whatever its width.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Layout", "keep", "key_of", "normal", "uniform"]

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK = 1 << 20
_TWO64 = 1 << 64
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


class Layout(NamedTuple):
    """Where the samples are in a tensor of random numbers."""

    dim: int | None
    """Dimension along which they lie, each in one run of elements; `None` if they share it."""

    from_end: bool = False
    """Whether coordinates count from the end: samples that are padded on the left."""


def key_of(*parts: object) -> int:
    """A key of 64 bits for anything that prints."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def keep(
    key: int, samples: Tensor, shape: tuple[int, ...], layout: Layout, probability: float
) -> Tensor:
    """A mask that is true with a probability, independently for each element.

    Args:
        key: tells calls apart.
        samples: number of each sample; shape `(n,)`, int64, on the device of the result.
        shape: of the result; a multiple of `n` along the samples' dimension.
        layout: where the samples are.
        probability: of true, from 0 to 1; met to 2^-64.

    Returns:
        A bool tensor of `shape`.
    """
    threshold = round(probability * _TWO64) - (_TWO64 >> 1)
    if threshold >= _TWO64 >> 1:
        return torch.ones(shape, dtype=torch.bool, device=samples.device)
    rows, columns = _rows(key, samples, shape, layout)
    out = torch.empty(len(rows), len(columns), dtype=torch.bool, device=samples.device)
    for block in _blocks(rows, columns):
        # the finaliser's last step leaves the high bits as they are, which decide
        torch.lt(_mix_(rows[block, None] + columns, last=False), threshold, out=out[block])
    return out.view(shape)


def uniform(
    key: int, samples: Tensor, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype
) -> Tensor:
    """Numbers evenly spread over [0, 1), in the steps that `dtype` has just below 1."""
    rows, columns = _rows(key, samples, shape, layout)
    bits = _BITS[dtype]
    out = torch.empty(len(rows), len(columns), dtype=dtype, device=samples.device)
    for block in _blocks(rows, columns):
        mixed = _mix_(rows[block, None] + columns)
        out[block] = _shifted(mixed, 64 - bits).to(dtype).mul_(2.0**-bits)
    return out.view(shape)


def normal(
    key: int, samples: Tensor, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype
) -> Tensor:
    """Numbers of the standard normal distribution, by Box and Muller."""
    # Apple's GPUs have nothing wider; elsewhere the tails want the finer steps.
    wide = torch.float32 if samples.device.type == "mps" else torch.float64
    radius = uniform(key_of(key, "radius"), samples, shape, layout, wide)
    angle = uniform(key_of(key, "angle"), samples, shape, layout, wide).mul_(2 * math.pi)
    return radius.neg_().log1p_().mul_(-2).sqrt_().mul_(angle.cos_()).to(dtype)


def _rows(
    key: int, samples: Tensor, shape: tuple[int, ...], layout: Layout
) -> tuple[Tensor, Tensor]:
    """A key for each row of the last dimension, and what each column adds to it."""
    device = samples.device
    keys = torch.full((1,), _signed(key), dtype=torch.int64, device=device)
    steps = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        if dim:
            keys = _mix_((keys[:, None] + steps).view(-1))
        if dim == layout.dim:
            run = size // len(samples)
            inner = _coordinates(run, layout.from_end, device)
            steps = (_mix_(_scaled(samples + 1))[:, None] + inner).view(-1)
        else:
            steps = _coordinates(size, layout.from_end, device)
    return keys, steps


def _coordinates(size: int, from_end: bool, device: torch.device) -> Tensor:
    first = -size if from_end else 0
    return _scaled(torch.arange(first, first + size, device=device))


def _scaled(values: Tensor) -> Tensor:
    return values * _signed(_GAMMA)


def _blocks(rows: Tensor, columns: Tensor) -> list[slice]:
    # Eight bytes for each element would be several times the activations that are dropped.
    step = max(1, _BLOCK // max(1, len(columns)))
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def _mix_(z: Tensor, *, last: bool = True) -> Tensor:
    """SplitMix64's finaliser, in place."""
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(_FIRST))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_SECOND))
    return z.bitwise_xor_(_shifted(z, 31)) if last else z


def _shifted(z: Tensor, by: int) -> Tensor:
    """A shift to the right that brings in zeros; torch's own brings in the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - _TWO64 if value >> 63 else value
