"""Activation checkpoints that do not keep the state of the random numbers."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from gradaccum.doctor.hooks.guard import guarded
from gradaccum.doctor.touch import Patches
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["install"]

MOST = 64
"""Kinds of modules whose forwards are told."""


class _Checkpoint:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.met: set[type] = set()
        self.constant: set[type] = set()

    def before(self, _: Any, frame: FrameType) -> Any:
        """A checkpoint begins: the frame of its forward has what it was given."""
        given = frame.f_locals
        preserve = bool(given.get("preserve_rng_state", True))
        function = given.get("fn", given.get("run_function"))
        module = getattr(function, "__self__", function)  # a bound method's module
        if not isinstance(module, self.recorder.torch.nn.Module):
            return None
        recorder, drawn = self.recorder, []
        if not preserve:
            drawn = [name or type(m).__name__ for name, m in module.named_modules() if _draws(m)]
        new, more = self._new(module), self._constant(module, frame)
        if drawn or new or more:
            recorder.event(
                "checkpoint", recorder.find(frame), recorder.now(),
                preserve=not drawn, drops=drawn[:8], forwards=new, **more,
            )  # fmt: skip
        return None

    def _constant(self, module: Any, frame: FrameType) -> dict[str, Any]:
        """Of a reentrant checkpoint, a `Function`, to which nothing is given that asks for one."""
        if frame.f_code.co_name != "forward" or type(module) in self.constant:
            return {}
        given = frame.f_locals.get("args", ())
        if any(getattr(one, "requires_grad", False) for one in given):
            return {}
        self.constant.add(type(module))
        return {
            "constant": True,
            "params": self.recorder.indexes(self.recorder.leaves.held(module)),
        }

    def _new(self, module: Any) -> list[tuple[str, int]]:
        """Where the forwards of the script's own modules begin, of kinds not met before."""
        if type(module) in self.met or len(self.met) >= MOST:
            return []
        self.met.add(type(module))
        codes = [getattr(type(m).forward, "__code__", None) for m in module.modules()]
        places = [(c.co_filename, c.co_firstlineno) for c in dict.fromkeys(codes) if c is not None]
        return [one for one in places if self.recorder.places.theirs(one[0])][:16]


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
