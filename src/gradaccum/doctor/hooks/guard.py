"""Our code inside the script's calls: it never raises, never nests, and is unseen by torch's modes."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from gradaccum.doctor.touch import After, Before
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["guarded", "guarded_after"]


def guarded(recorder: Recorder, before: Callable[[Any, FrameType], Any]) -> Before:
    """A `before` that does nothing while our own code runs, and swallows what it raises."""
    hidden = recorder.torch._C.DisableTorchFunction
    name = getattr(before, "__qualname__", "before")

    def run(owner: Any, frame: FrameType) -> Any:
        if not recorder.enter():
            return None
        try:
            with hidden():
                return before(owner, frame)
        except Exception as error:  # noqa: BLE001 - the script must not notice
            recorder.fail(error, name)
            return None
        finally:
            recorder.leave()

    return run


def guarded_after(recorder: Recorder, after: Callable[[Any], None]) -> After:
    """The same for an `after`."""
    hidden = recorder.torch._C.DisableTorchFunction
    name = getattr(after, "__qualname__", "after")

    def run(note: Any) -> None:
        if not recorder.enter():
            return
        try:
            with hidden():
                after(note)
        except Exception as error:  # noqa: BLE001 - the script must not notice
            recorder.fail(error, name)
        finally:
            recorder.leave()

    return run
