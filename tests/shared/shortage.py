"""Memory that runs out on purpose: at any operation of a forward, or as any gradient arrives."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SAYINGS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 1073741824 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you ..."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB, other allocations: ...)"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
]


class Countdown:
    """Raises once, when something has happened so many times."""

    def __init__(self, at: int, error: BaseException = SAYINGS[0]) -> None:
        self.at = at
        self.seen = 0
        self.raised = 0
        self.error = error

    def tick(self, *_: object) -> None:
        self.seen += 1
        if self.seen == self.at:
            self.raised += 1
            raise self.error


class FailingForward(TorchFunctionMode):
    """Ticks at every function of torch that is called within it."""

    def __init__(self, countdown: Countdown) -> None:
        super().__init__()
        self.countdown = countdown

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.countdown.tick()
        return result


@contextmanager
def failing_arrivals(model: nn.Module, countdown: Countdown) -> Generator[None]:
    """Within it the countdown ticks before each gradient is added to a parameter's."""

    def tick(grad: Tensor) -> None:
        countdown.tick()

    handles = [p.register_hook(tick) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
