"""Counts, at dispatch level, what a loop does to tensors of the size of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
}
"""Operators whose result the host has to wait for."""


@dataclass
class Counts:
    """What was counted."""

    reads: int = 0
    """Tensors of a gradient's size that were arguments of an operator."""
    writes: int = 0
    """Tensors of a gradient's size that were results of an operator, or changed in place."""
    waits: int = 0
    """Operators that wait for a device."""
    names: list[str] = field(default_factory=list)
    """The operators counted, in order."""


class Counter(TorchDispatchMode):
    """Counts reads and writes of tensors that have as many elements as some parameter.

    The model should have parameters whose sizes no activation shares. Views are not counted: they
    touch no memory.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.sizes = {parameter.numel() for parameter in parameters}
        self.counts = Counts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in WAITS:
            self.counts.waits += 1
            self.counts.names.append(name)
        if not func.is_view and name != "aten::detach":
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        arguments = func._schema.arguments
        named = {a.name: v for a, v in zip(arguments, args, strict=False)} | kwargs
        given: dict[int, Tensor] = {}
        written = {id(t): t for t in tree_leaves(result) if self._sized(t)}
        for argument in arguments:
            sized = {id(t): t for t in tree_leaves(named.get(argument.name)) if self._sized(t)}
            if not argument.is_out:
                given |= sized
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= sized
        self.counts.reads += len(given)
        self.counts.writes += len(written)
        if given or written:
            self.counts.names.append(func._schema.name)

    def _sized(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.numel() in self.sizes


def count(parameters: Iterable[Tensor], run: Callable[[], object]) -> Counts:
    """What `run` does, once it has been run before."""
    run()
    counter = Counter(parameters)
    with counter:
        run()
    return counter.counts


def model() -> torch.nn.Module:
    """Two layers whose parameters have sizes that no activation of the benchmarks has."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(53, 101, bias=False), torch.nn.Tanh(), torch.nn.Linear(101, 47, bias=False)
    )
