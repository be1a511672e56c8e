"""Looks at values: only in windows that are looked at closely, and never seen by the script."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from gradaccum.doctor.trace.leaves import Leaves
from gradaccum.doctor.trace.tracked import Tracked

__all__ = ["Deep", "distance"]

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
SAMPLE = 64
"""Elements of a leaf that are compared before and after."""
KEPT = 2000
"""Parameters whose way over the whole run is told."""


class Deep:
    """Norms, samples and memory.

    Args:
        torch: the module, which the script has imported.
        leaves: all that are watched; they say whose gradients may be read.
    """

    def __init__(self, torch: Any, leaves: Leaves) -> None:
        self._torch = torch
        self._leaves = leaves
        self._modes = torch._C._len_torch_dispatch_stack
        self._profiled = torch._C._autograd._profiler_enabled
        self._cuda = hasattr(torch._C, "_cuda_getCurrentStream")

    def possible(self) -> bool:
        """Whether tensors may be read now: nobody captures, profiles or intercepts operators."""
        if self._modes() or self._profiled():
            return False
        if not self._cuda:
            return True
        cuda = self._torch.cuda
        return not (cuda.is_initialized() and cuda.is_current_stream_capturing())

    @contextmanager
    def quiet(self) -> Generator[None]:
        """No graph, no autocast."""
        with self._torch.no_grad(), self._torch._C._DisableAutocast():
            yield

    def silent(self, tensor: Any) -> bool:
        """Whether what is done to a tensor is told to nobody: its class intercepts no operators."""
        return type(tensor).__torch_dispatch__ is self._torch._C._disabled_torch_dispatch_impl

    def value(self, tensor: Any) -> float | None:
        """A scalar's value."""
        if not self.silent(tensor):
            return None
        if getattr(tensor, "numel", lambda: 0)() != 1 or tensor.is_complex() or tensor.is_meta:
            return None
        return float(tensor.detach().item())

    def norm(self, leaves: Iterable[Tracked]) -> float | None:
        """Norm of all gradients that stand in these leaves."""
        return self._norm(self._gradients(leaves))

    def _gradients(self, leaves: Iterable[Tracked]) -> list[Any]:
        return self._leaves.gradients(leaves)

    def recorded(self, leaves: Iterable[Tracked]) -> bool:
        """Whether a gradient carries a graph of its own, as `create_graph=True` makes it."""
        return any(gradient.requires_grad for gradient in self._gradients(leaves))

    def _norm(self, tensors: list[Any]) -> float | None:
        plain = [t for t in tensors if self._readable(t)]
        if not plain or len(plain) != len(tensors):
            return None
        norms = [float(self._torch.linalg.vector_norm(t).item()) for t in plain]
        return (
            math.sqrt(math.fsum(n * n for n in norms))
            if all(map(math.isfinite, norms))
            else (math.nan if any(map(math.isnan, norms)) else math.inf)
        )

    def _readable(self, tensor: Any) -> bool:
        """Whether it has elements that can be read; on `meta` there is nothing behind a shape."""
        if not self.silent(tensor):
            return False
        strided = tensor.layout is self._torch.strided
        return strided and not tensor.is_meta and tensor.numel() > 0

    def sample(self, leaves: Iterable[Tracked], gradient: bool) -> dict[int, list[float]]:
        """Some elements of each leaf, or of its gradient."""
        found = {}
        for leaf in leaves:
            tensor = leaf.reference()
            if tensor is not None and gradient:
                tensor = next(iter(self._leaves.gradients([leaf])), None)
            if tensor is None or not self._readable(tensor) or tensor.is_complex():
                continue
            flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else None
            if flat is None:
                continue
            stride = max(1, flat.numel() // SAMPLE)
            found[leaf.index] = flat[::stride][:SAMPLE].double().tolist()
        return found

    def remember(self, leaves: Iterable[Tracked]) -> None:
        """Keep some elements of parameters that are new, to tell at the end how far they went."""
        for leaf in leaves:
            if leaf.sample is None and leaf.is_parameter and leaf.index < KEPT:
                leaf.sample = self.sample([leaf], gradient=False)

    def gone(self, leaf: Tracked) -> float | None:
        """How far a parameter has gone since, relative to where it was.

        On the host alone: at the end of a run a device may never answer.
        """
        tensor = leaf.reference()
        if not leaf.sample or tensor is None or not tensor.is_cpu:
            return None
        far = distance(leaf.sample, self.sample([leaf], gradient=False))
        return far if far is not None and math.isfinite(far) else None

    def memory(self) -> int | None:
        """Bytes in use: of the accelerator where there is one, else of this process."""
        cuda = self._torch.cuda
        if self._cuda and cuda.is_initialized():
            return int(cuda.memory_allocated())
        try:
            # Opened and closed each time: one kept open would change the numbers of the script's.
            file = os.open("/proc/self/statm", os.O_RDONLY)
            try:
                return int(os.read(file, 100).split()[1]) * _PAGE
            finally:
                os.close(file)
        except (OSError, ValueError):
            return None


def distance(before: dict[int, list[float]], after: dict[int, list[float]]) -> float | None:
    """Norm of the change relative to the norm before, over the sampled elements."""
    changed = own = 0.0
    for index, values in before.items():
        for a, b in zip(values, after.get(index, ()), strict=False):
            changed += (b - a) ** 2
            own += a * a
    if not before:
        return None
    return math.sqrt(changed / own) if own else (math.inf if changed else 0.0)
