"""Our code inside the script's calls: never raises, never nests, is unseen by torch's modes."""

from __future__ import annotations

import sys
from _thread import get_ident as _ident
from collections.abc import Callable
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any

from gradaccum.doctor.touch import Before
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["aside", "guarded", "guarded_after", "uncompiled"]

_frame, _gettrace, _settrace = sys._getframe, sys.gettrace, sys.settrace
_OWN = isinstance(_settrace, BuiltinFunctionType)
"""Whether tracers are set by Python itself: debuggers put a warning in its place."""


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


def aside(torch: Any) -> Any:
    """What sets `torch.compile` aside, where marking a function does not do so for all it calls."""
    frames = torch._C._dynamo.eval_frame
    return None if hasattr(frames, "set_code_exec_strategy") else frames.set_eval_frame


def _untraced() -> Any:
    """Take a debugger's or a script's trace function away, as long as our own code runs.

    Only one that is written in Python: one in C could not be put back as it was.
    """
    tracer = _gettrace()
    if _OWN and isinstance(tracer, FunctionType | MethodType):
        _settrace(None)
        return tracer
    return None


def guarded(recorder: Recorder, before: Before) -> Callable[..., Any]:
    """A `before` that does nothing while our own code runs, and swallows what it raises.

    Called in the frame of a grafted function it finds the caller's itself.
    """
    hidden = recorder.torch._C.DisableTorchFunction
    name = getattr(before, "__qualname__", "before")
    compiler = aside(recorder.torch)
    busy = recorder.busy

    def run(owner: Any, frame: FrameType | None = None) -> Any:
        thread = _ident()
        if thread in busy or recorder.closed or recorder.elsewhere:
            return None
        tracer = _untraced() if _gettrace() is not None else None
        compiling = compiler(None) if compiler else None
        busy.add(thread)
        try:
            with hidden():
                caller = frame or _frame(1).f_back
                return None if caller is None else before(owner, caller)
        except Exception as error:  # noqa: BLE001 - the script must not notice
            recorder.fail(error, name)
            return None
        finally:
            busy.discard(thread)
            if compiler:
                compiler(compiling)
            if tracer is not None:
                _settrace(tracer)

    uncompiled(recorder.torch, run)
    return run


def guarded_after(recorder: Recorder, after: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same for an `after`."""
    hidden = recorder.torch._C.DisableTorchFunction
    name = getattr(after, "__qualname__", "after")
    compiler = aside(recorder.torch)
    busy = recorder.busy

    def run(note: Any) -> None:
        thread = _ident()
        if thread in busy or recorder.closed or recorder.elsewhere:
            return
        tracer = _untraced() if _gettrace() is not None else None
        compiling = compiler(None) if compiler else None
        busy.add(thread)
        try:
            with hidden():
                after(note)
        except Exception as error:  # noqa: BLE001 - the script must not notice
            recorder.fail(error, name)
        finally:
            busy.discard(thread)
            if compiler:
                compiler(compiling)
            if tracer is not None:
                _settrace(tracer)

    uncompiled(recorder.torch, run)
    return run
