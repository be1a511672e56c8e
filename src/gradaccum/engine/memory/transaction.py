"""What a forward changes besides gradients, photographed so that it can be undone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradaccum.engine.memory.untouched import plain_attributes, restore_attributes

__all__ = ["Snapshot", "Snapshots"]

_SMALL = 1 << 16
"""Bytes up to which a buffer is copied each time: some kernels, batch norm's first of all, change
buffers without moving their version counters."""


class _Buffer(NamedTuple):
    """One buffer and where it hangs."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None
    """`None` for one that is large and was never seen to change."""


class Snapshot(NamedTuple):
    """Random states, and buffers and plain attributes of modules, at one moment."""

    random: dict[str, Any]
    small: list[_Buffer]
    large: list[_Buffer]
    attributes: list[tuple[nn.Module, dict[str, Any]]]
    """Plain attributes of modules: counters, cached tensors."""


class Snapshots:
    """Takes and restores snapshots of one model.

    Large buffers that never change (masks, tables of rotations) are copied for the first
    micro-batch only, and those that change anew whenever their version counter has moved.

    Args:
        model: its buffers are watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last: dict[tuple[int, str], _Buffer] = {}
        self._changing: set[tuple[int, str]] = set()
        self._taken = 0

    def take(self) -> Snapshot:
        """Photograph the generators that a forward may draw from, and the buffers."""
        self._taken += 1
        small: list[_Buffer] = []
        large: list[_Buffer] = []
        attributes = []
        for module in self._model.modules():
            attributes.append((module, plain_attributes(module)))
            for name, tensor in module._buffers.items():
                if tensor is None or is_lazy(tensor):
                    continue
                if tensor.is_inference():  # it cannot be changed where gradients are made
                    large.append(_Buffer(module, name, tensor, 0, None))
                elif tensor.layout is torch.strided and _bytes(tensor) <= _SMALL:
                    copy = torch.empty_like(tensor, requires_grad=False)
                    small.append(_Buffer(module, name, tensor, tensor._version, copy))
                else:
                    large.append(self._photograph(module, name, tensor))
        _copy_all([(one.copy, one.tensor) for one in small])
        self._last = {_key(one): one for one in large}
        return Snapshot(_random_states(self._devices()), small, large, attributes)

    def restore(self, snapshot: Snapshot) -> str | None:
        """Go back to `snapshot`; return the name of a buffer that cannot, `None` if all can."""
        lost = None
        _set_random_states(snapshot.random)
        for module, plain in snapshot.attributes:
            restore_attributes(module, plain)
        for one in (*snapshot.small, *snapshot.large):
            one.module._buffers[one.name] = one.tensor
        _copy_all([(one.tensor, one.copy) for one in snapshot.small])
        for i, one in enumerate(snapshot.large):
            if one.tensor.is_inference() or one.tensor._version == one.version:
                continue
            self._changing.add(_key(one))
            if one.copy is None:
                lost = self._name_of(one)
                continue
            with torch.no_grad():
                one.tensor.copy_(one.copy)
            # the copy is of what stands there now, under a version that this has moved
            snapshot.large[i] = one._replace(version=one.tensor._version)
        self._last = {_key(one): one for one in snapshot.large}
        return lost

    def _photograph(self, module: nn.Module, name: str, tensor: Tensor) -> _Buffer:
        one = _Buffer(module, name, tensor, tensor._version, None)
        before = self._last.get(_key(one))
        if before is not None and before.tensor is tensor and before.version == tensor._version:
            constant = self._taken == 2 and _key(one) not in self._changing
            return one if constant else before
        if before is not None:
            self._changing.add(_key(one))
        return one._replace(copy=tensor.detach().clone())

    def _devices(self) -> Iterable[torch.device]:
        return {p.device for p in self._model.parameters() if p.device.type == "cuda"}

    def _name_of(self, buffer: _Buffer) -> str:
        for name, module in self._model.named_modules():
            if module is buffer.module:
                return f"{name}.{buffer.name}".lstrip(".")
        return buffer.name


def _key(buffer: _Buffer) -> tuple[int, str]:
    return id(buffer.module), buffer.name


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_all(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> None:
    """Copy the second of each pair into the first: one launch for each device and dtype."""
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for into, source in pairs:
        assert into is not None
        assert source is not None
        kept, read = groups.setdefault((into.device, into.dtype), ([], []))
        kept.append(into)
        read.append(source)
    with torch.no_grad():
        for into_all, sources in groups.values():
            torch._foreach_copy_(into_all, sources)


def _random_states(devices: Iterable[torch.device]) -> dict[str, Any]:
    numpy = sys.modules.get("numpy.random")
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.get_state(),
        "cuda": {device: torch.cuda.get_rng_state(device) for device in devices},
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and states["numpy"] is not None:
        numpy.set_state(states["numpy"])
    for device, state in states["cuda"].items():
        torch.cuda.set_rng_state(state, device)
