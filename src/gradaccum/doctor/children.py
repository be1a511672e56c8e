"""Processes that the script starts: those that are Python are listened to as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from gradaccum.doctor.touch import BuiltinTouch

__all__ = ["listen_to_children"]

_BOOT = str(Path(__file__).parent / "boot")


def listen_to_children(folder: str) -> None:
    """Hand the hooks on where a process gets an environment of its own, as torchrun gives it.

    A process that inherits the environment has them already. They are handed to interpreters alone:
    what any other program prints of its environment stays what it was.
    """

    def before(_: Any, frame: FrameType) -> None:
        given = frame.f_locals
        environment = given.get("env_list")
        command = given.get("executable") or (given.get("args") or [""])[0]
        if isinstance(environment, list) and _is_python(command):
            _add(environment, folder)

    holders: tuple[tuple[Any, str], ...] = (
        (subprocess, "_fork_exec"),
        (getattr(subprocess, "_posixsubprocess", None), "fork_exec"),  # Python 3.10
    )
    for holder, name in holders:
        original = getattr(holder, name, None)
        if original is not None:
            setattr(holder, name, BuiltinTouch(original, _quietly(before)))
            return


def _quietly(before: Any) -> Any:
    def run(owner: Any, frame: FrameType) -> None:
        try:
            before(owner, frame)
        except Exception:  # noqa: BLE001 - a child that is not listened to is not worth an error
            return

    return run


def _is_python(command: object) -> bool:
    text = os.fsdecode(command) if isinstance(command, str | bytes | os.PathLike) else ""
    return text == sys.executable or os.path.basename(text).startswith("python")


def _add(environment: list[bytes], folder: str) -> None:
    if any(entry.startswith(b"GRADACCUM_DOCTOR=") for entry in environment):
        return
    path = _BOOT.encode()
    for i, entry in enumerate(environment):
        if entry.startswith(b"PYTHONPATH="):
            before = entry.partition(b"=")[2]
            environment[i] = b"PYTHONPATH=" + path + os.pathsep.encode() + before
            environment.append(b"GRADACCUM_DOCTOR_PATH=" + before)
            break
    else:
        environment.append(b"PYTHONPATH=" + path)
    environment.append(b"GRADACCUM_DOCTOR=" + os.fsencode(folder))
