"""Activation checkpoints that do not keep the state of the random numbers."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from gradaccum.doctor.hooks.guard import guarded
from gradaccum.doctor.touch import Patches
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["install"]


class _Checkpoint:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def before(self, _: Any, frame: FrameType) -> Any:
        """A checkpoint begins: the frame of its forward has what it was given."""
        given = frame.f_locals
        if given.get("preserve_rng_state", True):
            return None
        function = given.get("fn", given.get("run_function"))
        module = getattr(function, "__self__", function)  # a bound method's module
        if not isinstance(module, self.recorder.torch.nn.Module):
            return None
        drawn = [name or type(m).__name__ for name, m in module.named_modules() if _draws(m)]
        if drawn:
            recorder = self.recorder
            place = recorder.find(frame)
            recorder.event("checkpoint", place, recorder.now(), preserve=False, drops=drawn[:8])
        return None


def _draws(module: Any) -> bool:
    """Whether a module's forward draws a mask now."""
    chance = getattr(module, "p", 0.0) if "Dropout" in type(module).__name__ else 0.0
    return bool(module.training) and isinstance(chance, float | int) and 0.0 < chance < 1.0


def install(recorder: Recorder, patches: Patches) -> None:
    """Listen to checkpoints, where the script's torch has loaded them."""
    home = sys.modules.get("torch.utils.checkpoint")
    # Both kinds of checkpoint ask it for the device, from the frame with their arguments.
    original = getattr(home, "_infer_device_type", None)
    if original is not None:
        before = guarded(recorder, _Checkpoint(recorder).before)
        patches.graft(original, before)
