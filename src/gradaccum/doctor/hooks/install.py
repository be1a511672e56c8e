"""All hooks, set and removed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradaccum.doctor import touch
from gradaccum.doctor.hooks import (
    backward,
    checkpointing,
    loading,
    modules,
    optimizers,
    scaling,
    writes,
)
from gradaccum.doctor.hooks.behind import Behind
from gradaccum.doctor.hooks.deep import Deep
from gradaccum.doctor.hooks.guard import uncompiled
from gradaccum.doctor.touch import Patches
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["install"]


def install(recorder: Recorder) -> Callable[[], None]:
    """Set all hooks; returns what removes them, in reverse order."""
    patches = Patches()
    deep = Deep(recorder.torch, recorder.leaves)
    behind = Behind(recorder)
    handles: list[Any] = []
    recorder.gone = deep.gone

    def remove() -> None:
        recorder.closed = True
        for handle in reversed(handles):
            handle.remove()
        recorder.look_closely(None)
        patches.restore()

    uncompiled(recorder.torch, *touch.RUNNING)
    try:
        backward.install(recorder, deep, behind, patches)
        writes.install(recorder, behind, patches)
        scaling.install(recorder, deep, patches)
        modules.install(recorder, patches)
        loading.install(recorder, patches)
        checkpointing.install(recorder, patches)
        handles += optimizers.install(recorder, deep, patches)
        if patches.failed:
            recorder.trouble = "not listened to: " + ", ".join(patches.failed)
    except BaseException:
        remove()
        raise
    return remove
