"""Runs a script under plain Python and under the doctor, and keeps what came out."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DOCTOR = [sys.executable, "-m", "gradaccum", "doctor"]


@dataclass(frozen=True)
class Out:
    """What a process left."""

    code: int
    stdout: bytes
    stderr: bytes


def run(command: list[str], folder: Path, stdin: bytes = b"", **variables: str) -> Out:
    """Run a command; its hash seed is fixed, so that sets print alike."""
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    environment = {**os.environ, **fixed, **variables}
    done = subprocess.run(
        command, cwd=folder, input=stdin, capture_output=True, env=environment, timeout=300
    )
    return Out(done.returncode, done.stdout, done.stderr)


def both(arguments: list[str], folder: Path, stdin: bytes = b"") -> tuple[Out, Out]:
    """The same command line under plain Python and under a doctor that prints nothing."""
    plain = run([sys.executable, *arguments], folder, stdin)
    under = run([*DOCTOR, "-q", *arguments], folder, stdin)
    return plain, under
