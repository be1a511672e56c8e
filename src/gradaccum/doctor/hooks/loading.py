"""Loaders: each batch that is fetched, and where an epoch ends."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

from gradaccum.doctor.hooks.guard import guarded, guarded_after
from gradaccum.doctor.touch import Patches
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["install"]


class _Watch:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = 0

    def before(self, iterator: Any, frame: FrameType) -> Any:
        """A batch is asked for."""
        place = self.recorder.find(frame)
        return weakref.ref(iterator), int(iterator._num_yielded), place, self.recorder.now()

    def after(self, note: Any) -> None:
        """It is there, or the epoch is over."""
        reference, number, place, begun = note
        iterator = reference()
        if iterator is None:
            return
        loader = self._numbers.get(iterator)
        if loader is None:
            loader = self._numbers[iterator] = self._next
            self._next += 1
        fetched = int(iterator._num_yielded) > number
        self.recorder.event(
            "fetch" if fetched else "epoch", place, begun, loader=loader, number=number
        )


def install(recorder: Recorder, patches: Patches) -> None:
    """Listen to DataLoaders."""
    kind = recorder.torch.utils.data.dataloader._BaseDataLoaderIter
    watch = _Watch(recorder)
    before, after = guarded(recorder, watch.before), guarded_after(recorder, watch.after)
    patches.graft(vars(kind)["__next__"], before, after)
