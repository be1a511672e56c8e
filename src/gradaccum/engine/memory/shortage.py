"""Recognises an error that says that memory ran out, whoever raised it."""

from __future__ import annotations

import gc
import re
import traceback

import torch

from gradaccum.errors import GradaccumError, ShortageError

__all__ = ["DeviceShortageError", "asked_bytes", "first_line", "is_shortage", "kind_of", "let_go"]

_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_SAYINGS = re.compile(
    r"out of memory"  # every device's allocator, the CUDA driver's own
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|CUDNN_STATUS_(ALLOC_FAILED|NOT_SUPPORTED|INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED)"
    r"|CU(BLAS|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
    r"|(MIOPEN|HIPBLAS|ROCBLAS)_STATUS_(ALLOC_FAILED|MEMORY_ERROR)"
    r"|std::bad_alloc"
    r"|could not create a (memory object|primitive)"  # oneDNN without room for its work space
    r"|[Uu]nable to (mmap|allocate) \d+ bytes"
    r"|RESOURCE_EXHAUSTED"
)
_ASKED = (
    re.compile(r"tried to allocate ([\d.]+) ?(|Ki|Mi|Gi|Ti)B\b", re.IGNORECASE),
    re.compile(r"tried to allocate (\d+) bytes()"),
)


class DeviceShortageError(ShortageError, torch.OutOfMemoryError):
    """A `ShortageError` that code which waits for `torch.OutOfMemoryError` catches too."""


def kind_of(error: BaseException) -> type[ShortageError]:
    """The kind of `ShortageError` that stands in for `error`."""
    return DeviceShortageError if isinstance(error, torch.OutOfMemoryError) else ShortageError


def is_shortage(error: BaseException) -> bool:
    """Whether `error` says that there was no memory for something.

    `torch.OutOfMemoryError` is what CUDA's caching allocator and those of other devices raise. The
    CPU's allocator, cuDNN, cuBLAS and oneDNN raise a plain RuntimeError, which only its text tells
    from others; cuDNN's NOT_SUPPORTED is how it says that no algorithm fits in what is left.
    """
    if isinstance(error, GradaccumError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYINGS.search(str(error)) is not None


def asked_bytes(error: BaseException) -> int | None:
    """The bytes that could not be had, where the text names them."""
    for form in _ASKED:
        found = form.search(str(error))
        if found:
            return int(float(found[1]) * _UNITS[found[2].capitalize()[:2]])
    return None


def first_line(error: BaseException) -> str:
    """The error's kind and the part of its text that is for people."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


def let_go(error: BaseException) -> None:
    """Free what the failed calls still hold, so that there is room for another attempt.

    An error's traceback keeps the frames it went through, and they keep the activations.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the pieces that are free must be able to become one large one
