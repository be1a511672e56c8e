"""How many bytes a device's tensors take at their peak, and how many more it can give.

One small class for each way in which devices keep count: the CPU, whose allocator does not, and the
caching allocators of the accelerators, which do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradaccum.errors import InputError
from gradaccum.planner.live import LiveBytes, eagerly, storages
from gradaccum.planner.room import free_on_host

__all__ = ["Allocator", "Meter", "Peak", "allocator_of", "meter_for"]


@final
class Peak:
    """What a `with meter.peak() as peak` block took; known once the block is left."""

    def __init__(self) -> None:
        self.bytes = 0
        """Most bytes at one moment, beyond those at the entrance."""

        self.marks: list[int] = []
        """The most bytes around each operator in turn, beyond those at the entrance; empty where
        `marks=False`."""

        self.begun = 0
        """How many of the marks were made before `begin` was called."""

        self.turned = 0
        """How many of the marks were made before `turn` was called."""

    def begin(self) -> None:
        """Say that the batch is there and the forward begins."""
        self.begun = len(self.marks)

    def turn(self) -> None:
        """Say that the forward is over and the backward begins."""
        self.turned = len(self.marks)


class Meter(Protocol):
    """Counts the bytes of one device."""

    @property
    def device(self) -> torch.device:
        """The device."""

    def peak(self, *, marks: bool = True) -> AbstractContextManager[Peak]:
        """Measure what happens inside the `with` block.

        Args:
            marks: whether to look at every operator, which slows small ones down and keeps
                `torch.compile` from compiling; without it some devices only know the peak.
        """

    def used(self, owned: Iterable[Tensor]) -> int:
        """Bytes in use now: of all tensors, or of the `owned` ones where nobody counts all."""

    def free(self) -> int:
        """Bytes that can still be had, less a margin for what no counter sees."""


def meter_for(device: torch.device | str) -> Meter:
    """The meter of a device.

    Raises:
        InputError: if the device's allocator keeps no count.

    Examples:
        >>> import torch
        >>> with meter_for("cpu").peak() as peak:
        ...     x = torch.zeros(1000)
        >>> peak.bytes
        4000
    """
    target = torch.device(device)
    if target.type == "cpu":
        return CpuMeter()
    return AllocatorMeter(target, allocator_of(target))


@final
class CpuMeter:
    """The bytes of live tensors, each watched until it is freed."""

    device = torch.device("cpu")

    @contextmanager
    def peak(self, *, marks: bool = True) -> Generator[Peak]:
        """See `Meter.peak`."""
        found = Peak()
        live = LiveBytes("cpu", found.marks if marks else None)
        with eagerly(), live:
            yield found
        found.bytes = live.peak

    def used(self, owned: Iterable[Tensor]) -> int:
        """See `Meter.used`; tensors that share memory count once."""
        return sum(size for size in storages(owned, "cpu").values())

    def free(self) -> int:
        """See `Meter.free`."""
        try:
            return free_on_host()
        except OSError as error:
            raise InputError(
                "memory-unknown",
                "This system does not tell how much memory is free.",
                got=f'memory="auto": {error}',
                expected="a Linux kernel's /proc, or a limit of the process",
                do='say how much may be used: memory="8GiB"',
            ) from None


class Allocator(Protocol):
    """The statistics that a caching allocator keeps."""

    keeps_peak: bool
    """Whether `highest` looks back; else it is what is allocated now."""

    def now(self) -> int:
        """Bytes of live tensors."""

    def highest(self) -> int:
        """Most bytes of live tensors since `restart`."""

    def restart(self) -> None:
        """Forget the highest so far."""

    def free(self) -> int:
        """Bytes that can still be had, from the device and from the allocator's own reserve."""


@final
class AllocatorMeter:
    """A device whose caching allocator keeps count.

    The allocator knows one peak only, which is started anew: what `max_memory_allocated` says
    after a measurement is that measurement's.
    """

    def __init__(self, device: torch.device, allocator: Allocator) -> None:
        self.device = device
        self._allocator = allocator

    @contextmanager
    def peak(self, *, marks: bool = True) -> Generator[Peak]:
        """See `Meter.peak`."""
        found, allocator = Peak(), self._allocator
        before = allocator.now()
        allocator.restart()
        if not marks and allocator.keeps_peak:
            yield found
            found.bytes = allocator.highest() - before
            return
        with eagerly(), _Marks(allocator, found.marks, before):
            yield found
        found.bytes = max([0, allocator.highest() - before, *found.marks])
        if not marks:
            found.marks.clear()

    def used(self, owned: Iterable[Tensor]) -> int:
        """See `Meter.used`: the allocator counts all tensors."""
        del owned
        return self._allocator.now()

    def free(self) -> int:
        """See `Meter.free`."""
        room = self._allocator.free()
        # Blocks are rounded up and fragment: a share that grows with what is asked for.
        return max(0, room - room // 16)


class _Marks(TorchDispatchMode):
    """Notes the allocator's highest count during every operator."""

    def __init__(self, allocator: Allocator, marks: list[int], before: int) -> None:
        super().__init__()
        self._allocator, self._marks, self._before = allocator, marks, before

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._marks.append(self._allocator.highest() - self._before)
        self._allocator.restart()
        return result


@final
class ModuleAllocator:
    """Statistics as `torch.cuda`, `torch.xpu` and other device modules offer them."""

    keeps_peak = True

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module = device, module

    def now(self) -> int:
        """See `Allocator`."""
        return self._module.memory_allocated(self._device)

    def highest(self) -> int:
        """See `Allocator`."""
        return self._module.max_memory_allocated(self._device)

    def restart(self) -> None:
        """See `Allocator`."""
        self._module.reset_peak_memory_stats(self._device)

    def free(self) -> int:
        """See `Allocator`."""
        module, device = self._module, self._device
        free, total = module.mem_get_info(device)
        reserved = module.memory_reserved(device)
        # A process may have been given a share of the device only.
        share = getattr(module, "get_per_process_memory_fraction", None)
        if share is not None:
            free = min(free, int(share(device) * total) - reserved)
        return max(0, free) + reserved - module.memory_allocated(device)


@final
class MpsAllocator:
    """Apple's allocator: it knows what is allocated now, and no peak."""

    keeps_peak = False

    def __init__(self, module: Any) -> None:
        self._module = module

    def now(self) -> int:
        """See `Allocator`."""
        return self._module.current_allocated_memory()

    def highest(self) -> int:
        """See `Allocator`: read after every operator, the largest reading is the peak."""
        return self._module.current_allocated_memory()

    def restart(self) -> None:
        """See `Allocator`."""

    def free(self) -> int:
        """See `Allocator`."""
        module = self._module
        return max(0, module.recommended_max_memory() - module.current_allocated_memory())


_STATISTICS = (
    "memory_allocated",
    "max_memory_allocated",
    "reset_peak_memory_stats",
    "memory_reserved",
)


def allocator_of(device: torch.device) -> Allocator:
    """The statistics of a device's allocator, from its own module or from `torch.accelerator`.

    Raises:
        InputError: if it keeps none.
    """
    try:
        module: Any = torch.get_device_module(device)
    except RuntimeError:
        module = None
    if device.type == "mps" and module is not None:
        return MpsAllocator(module)
    if _offers(module, "mem_get_info"):
        return ModuleAllocator(device, module)
    accelerator: Any = getattr(torch, "accelerator", None)
    if _offers(accelerator, "get_memory_info") and accelerator.is_available():
        current = accelerator.current_accelerator()
        if current is not None and current.type == device.type:
            return ModuleAllocator(device, _Accelerator(accelerator))
    raise InputError(
        "memory-device",
        "The device's allocator keeps no statistics, so memory cannot be planned on it.",
        got=f"device {device}",
        expected="a CPU, CUDA, XPU or MPS device, or one that torch.accelerator counts for",
        do="leave out memory= and pass budget=, the most padded elements in a micro-batch",
    )


def _offers(module: Any, *also: str) -> bool:
    return module is not None and all(hasattr(module, name) for name in (*_STATISTICS, *also))


@final
class _Accelerator:
    """`torch.accelerator` under the names of a device module."""

    def __init__(self, module: Any) -> None:
        self.memory_allocated = module.memory_allocated
        self.max_memory_allocated = module.max_memory_allocated
        self.reset_peak_memory_stats = module.reset_peak_memory_stats
        self.memory_reserved = module.memory_reserved
        self.mem_get_info = module.get_memory_info
