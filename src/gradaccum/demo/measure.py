"""What an update costs and how far it is from another: seconds, bytes, relative distance."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["distance", "gradients_of", "peak_memory", "stopwatch"]


class Reading:
    """A number that is known once its `with` block is left."""

    value: float = 0.0


@contextmanager
def stopwatch(device: torch.device) -> Generator[Reading]:
    """Seconds from entering to leaving, the device's queued work included."""
    reading = Reading()
    _wait(device)
    start = time.perf_counter()
    yield reading
    _wait(device)
    reading.value = time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def peak_memory(device: torch.device) -> Generator[Reading]:
    """Most bytes of tensors alive at one moment inside, beyond those that lived at the entrance.

    CUDA's allocator keeps count. On the CPU none does, so every tensor that an operator returns
    is watched until it is freed, which slows small operators down: measure, but do not time. Work
    space inside an operator is not seen there.
    """
    reading = Reading()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield reading
        reading.value = torch.cuda.max_memory_allocated(device) - before
    else:
        with _LiveBytes() as live:
            yield reading
        reading.value = live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _is(tensor) and tensor.untyped_storage().data_ptr() not in old:
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self._watched:
            return

        def freed(_: object) -> None:
            if self._watched.pop(address, None) is not None:
                self.now -= size

        self._watched[address] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _is(value: object) -> bool:
    return isinstance(value, Tensor)


@contextmanager
def gradients_of(optimizer: Optimizer) -> Generator[list[Tensor]]:
    """Copies of the gradients that `optimizer` is about to step with, in its parameters' order."""
    seen: list[Tensor] = []

    def copy(stepping: Optimizer, *_: object) -> None:
        for group in stepping.param_groups:
            seen.extend(p.grad.detach().clone() for p in group["params"] if p.grad is not None)

    handle = optimizer.register_step_pre_hook(copy)
    try:
        yield seen
    finally:
        handle.remove()


def distance(gradients: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Relative distance, `|gradients - truth| / |truth|`, over all of them as one vector."""
    pairs = [(a.double().cpu(), b.double().cpu()) for a, b in zip(gradients, truth, strict=True)]
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    return (off / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5
