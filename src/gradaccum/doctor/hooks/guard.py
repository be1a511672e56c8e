"""Our code inside the script's calls: never raises, never nests, is unseen by torch's modes."""

from __future__ import annotations

from _thread import get_ident as _ident
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradaccum.doctor.touch import After, Before
from gradaccum.doctor.trace.recorder import Process, Recorder

__all__ = ["guarded", "guarded_after", "uncompiled"]


def uncompiled(torch: Any, *functions: Callable[..., Any]) -> None:
    """Keep `torch.compile` from compiling these functions of ours, in whose regions they run.

    What `torch.compiler.disable` does, without importing the compiler into a script that does not.
    """
    frames = torch._C._dynamo.eval_frame
    for function in functions:
        if hasattr(frames, "set_code_exec_strategy"):
            action = frames._FrameAction
            skip = frames._FrameExecStrategy(action.SKIP, action.SKIP)
            frames.set_code_exec_strategy(function.__code__, skip)
        elif hasattr(frames, "skip_code"):  # torch 2.6
            frames.skip_code(function.__code__)
        function._torchdynamo_disable = True  # type: ignore[attr-defined]


def guarded(recorder: Recorder, before: Callable[[Any, FrameType], Any]) -> Before:
    """A `before` that does nothing while our own code runs, and swallows what it raises."""
    hidden = recorder.torch._C.DisableTorchFunction
    name = getattr(before, "__qualname__", "before")

    compiler = recorder.torch._C._dynamo.eval_frame.set_eval_frame

    busy = recorder.busy

    def run(owner: Any, frame: FrameType) -> Any:
        thread = _ident()
        if thread in busy or recorder.closed or recorder.process != Process.number:
            return None
        compiling = compiler(None)
        busy.add(thread)
        try:
            with hidden():
                return before(owner, frame)
        except Exception as error:  # noqa: BLE001 - the script must not notice
            recorder.fail(error, name)
            return None
        finally:
            busy.discard(thread)
            compiler(compiling)

    uncompiled(recorder.torch, run)
    return run


def guarded_after(recorder: Recorder, after: Callable[[Any], None]) -> After:
    """The same for an `after`."""
    hidden = recorder.torch._C.DisableTorchFunction
    name = getattr(after, "__qualname__", "after")

    compiler = recorder.torch._C._dynamo.eval_frame.set_eval_frame

    busy = recorder.busy

    def run(note: Any) -> None:
        thread = _ident()
        if thread in busy or recorder.closed or recorder.process != Process.number:
            return
        compiling = compiler(None)
        busy.add(thread)
        try:
            with hidden():
                after(note)
        except Exception as error:  # noqa: BLE001 - the script must not notice
            recorder.fail(error, name)
        finally:
            busy.discard(thread)
            compiler(compiling)

    uncompiled(recorder.torch, run)
    return run
