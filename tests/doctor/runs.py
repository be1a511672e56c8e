"""Runs a script under the doctor, in this process, and says what it found."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from gradaccum.doctor.watch import watch
from gradaccum.records.diagnosis import Diagnosis


def diagnose(text: str, folder: Path, name: str = "train.py") -> Diagnosis:
    """The diagnosis of a script; errors that it lets out are part of what is seen."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    state = torch.get_rng_state()
    # Kept until the watch is over, as a program's names are until it ends.
    names: dict[str, object] = {"__name__": "__main__", "__file__": str(path)}
    code = compile(text, str(path), "exec")
    try:
        with watch() as seen, suppress(Exception):
            exec(code, names)
    finally:
        torch.set_rng_state(state)
    return seen.diagnosis


def found(text: str, folder: Path) -> list[tuple[str, int]]:
    """Code and line of each finding."""
    return [(one.code, one.line) for one in diagnose(text, folder).findings]
