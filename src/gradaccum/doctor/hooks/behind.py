"""Writes to tensors that are no parameters: behind the graph's back, and running sums in 16 bit."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

from gradaccum.doctor.saved import hooked
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["Behind"]

MOST = 256
"""Writes that are remembered between two backwards."""
NODES = 20_000
_MANY = {"torch.bfloat16": 128, "torch.float16": 1024}
"""Additions after which a sum of equal numbers is off by half of each: 2 to the bits, halved."""
_ADDS = ("__iadd__", "add_")


class Behind:
    """Remembers where plain tensors were written in place, and compares with what a graph saved.

    A write that autograd sees moves the version that it compares. One through `.data` moves the
    version of another tensor, so the value that the graph had saved is changed unseen. A write
    counts only if the graph's node is older, which its sequence number tells.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._now = recorder.torch.autograd._get_sequence_nr
        self._written: list[tuple[int, int, tuple[int, int], str]] = []
        self._saved: dict[type, list[str]] = {}
        self._sums: dict[int, tuple[weakref.ref[Any], list[int]]] = {}

    def any_graph(self) -> bool:
        """Whether this thread has computed anything that has a graph."""
        return bool(self._now() > 0)

    def note(self, tensor: Any, name: str, frame: FrameType) -> None:
        """A tensor is about to be written."""
        recorder = self.recorder
        if tensor.requires_grad or recorder.places.ours(frame):
            return
        if str(tensor.dtype) in _MANY and tensor.numel() == 1:
            self._sum(tensor, name, frame)
        if recorder.segments.reading and len(self._written) < MOST:
            pointer = tensor.data_ptr()
            if pointer:
                self._written.append((pointer, self._now(), recorder.find(frame), name))

    def _sum(self, tensor: Any, name: str, frame: FrameType) -> None:
        """Count the additions to one number that nothing else changes."""
        found = self._sums.get(id(tensor))
        if name not in _ADDS:
            self._sums.pop(id(tensor), None)
            return
        if found is None or found[0]() is not tensor:
            if len(self._sums) >= MOST:
                return
            found = self._sums[id(tensor)] = (weakref.ref(tensor), [0])
        count = found[1]
        count[0] += 1
        if count[0] == _MANY[str(tensor.dtype)]:
            recorder = self.recorder
            kind = str(tensor.dtype).removeprefix("torch.")
            recorder.event(
                "narrow", recorder.find(frame), recorder.now(), count=count[0], dtype=kind
            )

    def look(self, outputs: tuple[Any, ...], backward: int) -> None:
        """Before a backward: whether what its graph saved was written since."""
        written, self._written = self._written, []
        if not written:
            return
        latest: dict[int, tuple[int, tuple[int, int], str]] = {}
        for pointer, when, place, name in written:
            latest[pointer] = when, place, name
        todo = [getattr(one, "grad_fn", None) for one in outputs]
        seen: set[Any] = set()
        while todo and len(seen) < NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if not hooked(node) and self._changed(node, latest, backward):
                return
            todo.extend(child for child, _ in node.next_functions)

    def _changed(
        self, node: Any, latest: dict[int, tuple[int, tuple[int, int], str]], backward: int
    ) -> bool:
        kind = type(node)
        names = self._saved.get(kind)
        if names is None:
            names = self._saved[kind] = [n for n in dir(kind) if n.startswith("_saved_")]
        plain = self.recorder.torch.Tensor
        for name in names:
            try:
                value = getattr(node, name)
                pointer = value.data_ptr() if isinstance(value, plain) else 0
            except RuntimeError:  # freed, or changed in a way that autograd sees and refuses
                continue
            found = latest.get(pointer) if pointer else None
            if found is not None and node._sequence_nr() < found[0]:
                _, place, how = found
                recorder = self.recorder
                recorder.event(
                    "behind", place, recorder.now(), how=how, node=kind.__name__, b=backward
                )
                return True
        return False
