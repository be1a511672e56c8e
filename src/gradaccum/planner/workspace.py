"""What the CPU's convolutions take beside the tensors that they are given and return.

oneDNN computes in layouts of its own, in which channels come in whole blocks: what it is given is
copied into them, and what it makes is copied out of them. Which of the two are there at one moment
was read off the events of torch's own allocator; scratch pads that do not grow with the batch are
left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["work_space"]

_FORTH, _BACK = "aten::convolution", "aten::convolution_backward"
_NARROW = 8
"""Channels in a block of the narrower vectors."""
_AS_IT_IS = 3
"""Channels of an image that is read as it is for the weights' gradient."""


class _Shape(NamedTuple):
    """A convolution of `wide` into `made`; one that is transposed goes the other way."""

    wide: Tensor
    made: Tensor
    weight: Tensor
    block: int
    strided: bool
    grouped: bool

    @property
    def pointwise(self) -> bool:
        return all(size == 1 for size in self.weight.shape[2:])

    def filled(self, tensor: Tensor, block: int = 0) -> int:
        """Bytes of a copy whose channels are filled up to whole blocks."""
        block, channels = block or self.block, max(tensor.shape[1], 1)
        return tensor.nbytes * (-(-channels // block) * block) // channels

    @property
    def plain(self) -> bool:
        """Whether it is computed by oneDNN's reference, in the layout that there is."""
        return self.grouped and self.wide.ndim == 5

    @property
    def tiny(self) -> bool:
        """Whether the image is smaller than what is moved over it."""
        pairs = zip(self.wide.shape[2:], self.weight.shape[2:], strict=True)
        return any(image < kernel for image, kernel in pairs)

    def forth(self) -> int:
        """Beside its result: what goes in and what comes out, both copied."""
        if self.plain:
            return max(self.wide.nbytes + self.weight.nbytes, 2 * self.made.nbytes)
        given, made = self.filled(self.wide), self.filled(self.made)
        if self.wide.shape[1] < self.block and not (self.pointwise or self.grouped):
            given = 0  # so few channels are read as they are
        return max(given + self.weight.nbytes + made - self.made.nbytes, made)

    def back(self) -> int:
        """Beside its result, the gradient of `wide`."""
        if self.strided and not self.grouped:  # by matrix products, and copied twice
            return max(self.made.nbytes + self.weight.nbytes, 2 * self.wide.nbytes)
        given, made = self.filled(self.made), self.filled(self.wide)
        return max(given + self.weight.nbytes + made - self.wide.nbytes, made)

    def weights(self) -> int:
        """Beside its result, the gradient of the weights: both of what varies, copied."""
        channels, block = self.wide.shape[1], self.block
        if self.plain:
            return 0
        if block == _NARROW and self.tiny and not self.grouped:
            return 4 * torch.get_num_threads() * self.weight.nbytes  # some for each thread
        summed = 0
        if self.wide.dtype is torch.bfloat16:
            if channels < block and not (self.pointwise or self.grouped):
                return 0
            summed = 2 * torch.get_num_threads() * self.weight.nbytes  # each thread's, in float32
        if not (self.pointwise or self.grouped) and channels < block:
            if channels == _AS_IT_IS or (channels < _AS_IT_IS and block > _NARROW):
                return self.filled(self.made)
            block = _NARROW
        return self.filled(self.wide, block) + self.filled(self.made, block) + summed


def work_space(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that an operator has at its peak beside what it was given and what it returns.

    Args:
        func: the operator, as a dispatch mode is told of it; others than convolutions take none.
        args: its arguments.
        result: what it returned.
    """
    name = func._schema.name
    if name not in (_FORTH, _BACK):
        return 0
    if name == _FORTH:
        (x, weight, _, stride, _, _, transposed, _, groups), y = args[:9], result
        wanted = (False, False)
    else:
        y, x, weight, _, stride, _, _, transposed, _, groups, wanted = args[:11]
    if not _by_onednn(x):
        if transposed:  # back, it takes one sample after the other
            return _columns(weight, x) if name == _FORTH and x.ndim < 5 else 0
        columns = _columns(weight, y) if name == _FORTH or wanted[1] else 0
        return columns if groups == 1 else max(columns, y.nbytes)
    if _last(x) or _last(weight):  # channels come last already, which it computes in as it is
        return weight.nbytes
    wide, made = (y, x) if transposed else (x, y)
    block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else _NARROW
    shape = _Shape(wide, made, weight, block, max(stride) > 1, groups > 1)
    if name == _FORTH:
        return shape.back() if transposed else shape.forth()
    # The input's gradient is made first, the weights' after it.
    own = weight.nbytes if wanted[1] else 0
    first = (shape.forth() if transposed else shape.back()) - own if wanted[0] else 0
    # That is copied out when all else is gone, which is the most where weights are large.
    return max(first, shape.weights(), shape.weight.nbytes) if wanted[1] else max(first, 0)


def _by_onednn(x: Tensor) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if x.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if x.dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return x.dtype is torch.float32


def _columns(weight: Tensor, made: Tensor) -> int:
    """Where matrix products make a convolution: each place with all that it is made of."""
    if all(size == 1 for size in weight.shape[2:]):
        return 0
    return made.nbytes // max(made.shape[1], 1) * weight[0].numel()


def _last(tensor: Tensor) -> bool:
    kind = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if kind is None or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=kind)
