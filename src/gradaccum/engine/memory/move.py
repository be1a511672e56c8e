"""Batches on their way to the device: the next one travels while the present one computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gradaccum.planner.pytree import flatten
from gradaccum.planner.split import move

__all__ = ["Lane", "ahead", "lane_of"]


class Lane(Protocol):
    """A way for copies that lies beside the one for computations."""

    def beside(self) -> AbstractContextManager[object]:
        """What is queued within goes the lane's way."""

    def arrive(self, tensors: list[Tensor]) -> None:
        """Let computations from here on wait for the copies, and keep their memory until then."""


def ahead(
    batches: Iterable[Any], device: torch.device | str, *, lane: Lane | None = None
) -> Iterator[Any]:
    """Each batch with its tensors on `device`; one batch further is on its way meanwhile.

    The batches are made one by one as they are needed, so that whatever has not had its turn stays
    on the host. On an accelerator tensors are pinned and copied on a stream of their own, and
    computations wait for the copy on the device, not on the host. On the CPU nothing is copied.

    Args:
        batches: in the order of their turn; a generator makes each when its copy begins.
        device: where they are computed.
        lane: how copies travel; by default the device's own way.

    Examples:
        >>> import torch
        >>> list(ahead(iter([torch.ones(2), torch.zeros(1)]), "cpu"))
        [tensor([1., 1.]), tensor([0.])]
    """
    target = torch.device(device)
    if lane is None:
        lane = lane_of(target)
    if lane is None:
        for batch in batches:
            yield move(batch, target)
        return
    coming = iter(batches)
    sent = _send(coming, target, lane)
    while sent is not None:
        batch, pinned = sent
        lane.arrive(_tensors(batch))
        # After that: a copy that was queued before would have to be waited for as well.
        sent = _send(coming, target, lane)
        del pinned  # only now: torch keeps pinned memory until the copies from it are done
        yield batch
        del batch


def lane_of(device: torch.device) -> Lane | None:
    """The lane of a device; None where a copy has no way of its own."""
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "Stream"):
        return None
    if device.type == "mps":  # one queue, and no stream beside it
        return None
    return StreamLane(device)


@final
class StreamLane:
    """A stream beside the current one, as on CUDA and XPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def beside(self) -> AbstractContextManager[object]:
        """See `Lane`."""
        return self._module.stream(self._stream)

    def arrive(self, tensors: list[Tensor]) -> None:
        """See `Lane`."""
        current = self._module.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tensors:
            # Their memory belongs to the other stream, which else would take it back too early.
            tensor.record_stream(current)


def _send(coming: Iterator[Any], device: torch.device, lane: Lane) -> tuple[Any, Any] | None:
    """The next batch, its copy begun, and the pinned one, which has to live until it arrived."""
    try:
        batch = next(coming)
    except StopIteration:
        return None
    pinned = _pinned(batch, device)
    with lane.beside():
        return move(pinned, device), pinned


def _pinned(batch: Any, device: torch.device) -> Any:
    """The batch in memory that a device reads by itself; one that is there, or fails to, stays."""

    def pin(leaf: Any) -> Any:
        if isinstance(leaf, Tensor | PackedSequence):
            here = leaf.data.device if isinstance(leaf, PackedSequence) else leaf.device
            if here.type == "cpu" and device.type != "meta" and not leaf.is_pinned():
                try:
                    return leaf.pin_memory()
                except RuntimeError:  # no such memory is left: the copy then waits, and is right
                    return leaf
        return leaf

    tree = flatten(batch)
    return tree.build(iter([pin(leaf) for leaf in tree.leaves]))


def _tensors(batch: Any) -> list[Tensor]:
    found = []
    for leaf in flatten(batch).leaves:
        if isinstance(leaf, PackedSequence):
            found.append(leaf.data)
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found
