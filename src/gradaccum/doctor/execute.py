"""Runs the script: a real `python` with the hooks inside, watched from outside to its end.

The script has an interpreter of its own, so argv, `sys.path`, tracebacks, exit codes and signals
are Python's, not an imitation; and whatever kills it, somebody is left to write the report.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradaccum.errors import InputError

__all__ = ["Outcome", "execute"]

_BOOT = Path(__file__).parent / "boot"
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
_SENT_BY_A_PROCESS = 0  # SI_USER; the terminal's own come from the kernel, to the child as well


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    status: int
    """Exit status; minus the number of the signal that killed it."""
    seconds: float
    started: str


def execute(arguments: Sequence[str], folder: Path) -> Outcome:
    """Run `python ARGUMENTS` under hooks, its trace written into `folder`."""
    environment = dict(os.environ)
    environment["GRADACCUM_DOCTOR"] = str(folder)
    path = environment.get("PYTHONPATH")
    if path is not None:
        environment["GRADACCUM_DOCTOR_PATH"] = path
    environment["PYTHONPATH"] = os.pathsep.join([str(_BOOT), *([path] if path else [])])
    flags = _flags(getattr(sys, "orig_argv", []))
    started, begin = time.strftime("%Y-%m-%dT%H:%M:%S"), time.perf_counter()
    child = subprocess.Popen([sys.executable, *flags, *arguments], env=environment)
    status = _wait(child)
    return Outcome(status, time.perf_counter() - begin, started)


def _flags(command: Sequence[str]) -> list[str]:
    """The interpreter's own options, which the script's interpreter gets too.

    Python says no other way what was on its command line and what came from the environment, which
    the script inherits anyhow.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise InputError(
            "doctor-isolated",
            "Python was started so that it reads no environment or site, so no hooks can be set.",
            got=" ".join(command[:3]),
            expected="python without -I, -E and -S",
            do="gradaccum doctor train.py",
        )
    flags: list[str] = []
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word[:2] in ("-m", "-c") or word == "-":
            break
        flags.append(word)
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            flags += [next(words, "")]
    return flags


def _wait(child: subprocess.Popen[bytes]) -> int:
    if not hasattr(signal, "sigtimedwait"):
        return _wait_plainly(child)
    passed = {getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)}
    watched = passed | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        while child.poll() is None:
            # The time limit covers a child that died before the signals were blocked.
            info = signal.sigtimedwait(watched, 1.0)
            if info is None or info.si_signo == signal.SIGCHLD:
                continue
            if info.si_signo in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2) or (
                info.si_code <= _SENT_BY_A_PROCESS
            ):
                child.send_signal(info.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode


def _wait_plainly(child: subprocess.Popen[bytes]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    return child.wait()
