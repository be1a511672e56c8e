"""A counter of the bytes of live tensors, for devices whose allocator keeps no count.

Every storage that an operator returns is watched until it is freed: what torch's allocator was
asked for, to the byte, except for work space inside an operator. Where that is largest, it is
charged for: `workspace.py`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradaccum.planner.workspace import work_space

__all__ = ["LiveBytes", "eagerly", "storages"]


def eagerly() -> AbstractContextManager[object]:
    """Within it, what `torch.compile` compiled runs as it was written.

    A mode that looks at operators keeps it from compiling anyhow, which `fullgraph=True` takes for
    an error.
    """
    # Where nothing was compiled, torch's compiler is not even loaded.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


class LiveBytes(TorchDispatchMode):
    """Counts storages on one type of device that operators made and that are still alive.

    Args:
        kind: type of device; `"meta"` counts what tensors would take that have no memory.
        marks: a list to which the most bytes around each operator are added, or None.
    """

    def __init__(self, kind: str = "cpu", marks: list[int] | None = None) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._kind = kind
        self._marks = marks
        self._watched: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(_found((args, kwargs), self._kind))
        result = func(*args, **(kwargs or {}))
        for key, storage in _found(result, self._kind):
            if key in self._watched:
                self._resized(key, storage)
            elif key not in given:
                self._watch(key, storage)
            given[key] = storage
        beside = work_space(func, args, result) if self._kind == "cpu" else 0
        self.peak = max(self.peak, self.now + beside)
        if self._marks is not None:
            self._marks.append(self.now + beside)
        return result

    def _watch(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        # The callback must not keep the counter, and with it all that it watches, alive.
        counter = weakref.ref(self)

        def freed(_: object) -> None:
            live = counter()
            if live is not None:
                _, size = live._watched.pop(key)
                live.now -= size

        self._watched[key] = weakref.ref(storage, freed), size
        self.now += size

    def _resized(self, key: int, storage: torch.UntypedStorage) -> None:
        reference, size = self._watched[key]
        if storage.nbytes() != size:
            self._watched[key] = reference, storage.nbytes()
            self.now += storage.nbytes() - size


def storages(tensors: Iterable[Tensor], kind: str) -> dict[int, int]:
    """The bytes of each storage behind some tensors, once however many tensors share it."""
    return {key: storage.nbytes() for key, storage in _found(list(tensors), kind)}


def _found(tree: Any, kind: str) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            for tensor in _plain(leaf):
                if tensor.device.type == kind:
                    storage = tensor.untyped_storage()
                    yield storage._cdata, storage


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's memory: its parts, where it is made of several."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
