"""Torch has been imported by the script: start the trace."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
from typing import Any

from gradaccum.doctor.children import listen_to_children
from gradaccum.doctor.hooks.install import install
from gradaccum.doctor.touch import BuiltinTouch
from gradaccum.doctor.trace.recorder import Recorder, last_error
from gradaccum.doctor.trace.sink import FileSink

__all__ = ["arrive", "head"]


def arrive(torch: Any, folder: str) -> None:
    """Record this process into `folder`, until it ends."""
    recorder = Recorder(torch, _sink(folder), head(torch), ledger())
    install(recorder)
    if hasattr(os, "register_at_fork"):
        # Runs after the recorder's own. A child that only loads data writes no file.
        os.register_at_fork(
            after_in_child=lambda: recorder.begin(_sink(folder), head(torch, forked=True))
        )
    listen_to_children(folder)
    atexit.register(lambda: recorder.finish(last_error()))
    # A process that leaves this way runs nothing else; `_exit` is looked up in `os` when called.
    os._exit = BuiltinTouch(os._exit, lambda _, __: recorder.finish())  # type: ignore[assignment]


def _sink(folder: str) -> FileSink:
    return FileSink(os.path.join(folder, f"{os.getpid()}-{time.time_ns()}.jsonl"))


def ledger() -> Any:
    """What reads weights off the graph."""
    try:
        from gradaccum.doctor.ledger import read  # noqa: PLC0415 - loads torch
    except ImportError:
        return None
    return read


def head(torch: Any, forked: bool = False) -> dict[str, Any]:
    """What is known of this process when the trace begins."""
    original = getattr(sys, "orig_argv", sys.argv)
    # Asking CUDA in a fork, or before the script has, could bind it to a device.
    device = "cpu" if forked or not torch.cuda._is_compiled() else "cuda"
    return {
        "pid": os.getpid(),
        "argv": list(sys.argv),
        "command": list(original),
        "cwd": os.getcwd(),
        "rank": int(os.environ.get("RANK", "0") or 0),
        "ranks": int(os.environ.get("WORLD_SIZE", "1") or 1),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": device,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
