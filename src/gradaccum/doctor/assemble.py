"""Traces on disk to diagnoses, and reports to files."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradaccum.doctor.diagnose import diagnose
from gradaccum.doctor.diagnose import together as together
from gradaccum.doctor.execute import Outcome
from gradaccum.doctor.trace.model import Trace
from gradaccum.errors import InputError
from gradaccum.records.diagnosis import Diagnosis
from gradaccum.report import stored

__all__ = [
    "diagnosis",
    "gather",
    "keep",
    "load",
    "ranked",
    "read",
    "together",
    "why_nothing",
    "write",
]

_PATIENCE = 20.0
"""Seconds that the first rank waits for the others' reports."""


@dataclass(frozen=True, slots=True)
class Found:
    """A process's trace, and the file it was read from."""

    path: Path
    trace: Trace


def read(folder: Path) -> list[Found]:
    """The traces of all processes that trained, by rank; those that only loaded data are none."""
    found = [Found(path, Trace.read(path)) for path in sorted(folder.glob("*.jsonl"))]
    trained = [f for f in found if f.trace.totals.get("backward") or f.trace.totals.get("step")]
    kept = trained or found[:1]
    return sorted(kept, key=lambda f: (f.trace.head.get("rank", 0), f.path.name))


def diagnosis(found: Found, name: str, outcome: Outcome, processes: int) -> Diagnosis:
    """Judge one process."""
    alone = processes == 1
    status = outcome.status if alone or not found.trace.complete else None
    return diagnose(found.trace, name, status)


def why_nothing(outcome: Outcome) -> str:
    """Why there is no trace."""
    if outcome.status < 0:
        return f"{signal.Signals(-outcome.status).name} ended the script before it trained."
    if outcome.status:
        return f"the script ended with exit code {outcome.status} before it trained."
    return "no process imported torch and ran a backward or an optimizer."


def ranked(path: Path, rank: int) -> Path:
    """`report.json` of rank 1 is `report.rank1.json`."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def gather(paths: Sequence[Path]) -> list[Diagnosis]:
    """The other ranks' reports, once they are written; those that come too late are left out."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and not all(path.exists() for path in paths):
        time.sleep(0.1)
    found = []
    for path in paths:
        try:
            found.append(stored.load(path.read_text(encoding="utf-8"), str(path)))
        except (OSError, InputError):  # noqa: PERF203 - a rank that died leaves none, or half a one
            continue
    return found


def keep(found: Sequence[Found], path: str) -> None:
    """Copy the traces to where they were asked for."""
    target = Path(path)
    for item in found:
        rank = item.trace.head.get("rank", 0)
        several = len(found) > 1 or item.trace.head.get("ranks", 1) > 1
        own = ranked(target, rank) if several else target
        try:
            shutil.copyfile(item.path, own)
        except OSError as error:
            raise _unwritable(own, error) from None


def write(path: Path, text: str) -> None:
    """Write a report."""
    try:
        path.write_text(text + ("" if text.endswith("\n") else "\n"), encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        "doctor-output",
        f"cannot write {path}: {error.strerror}.",
        got=str(path),
        expected="a file in a folder that exists and that you may write to",
        do="check the path and that its folder exists",
    )


def load(path: str) -> Diagnosis:
    """A report or a trace, told apart by its first line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin with a mark
    except OSError as error:
        raise InputError(
            "report-file",
            f"cannot read {path}: {error.strerror}.",
            got=path,
            expected="a file that `gradaccum doctor --json` or `--trace` has written",
            do="check the path",
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            "report-unreadable",
            f"{path} is not text in UTF-8.",
            got=f"{error.reason} at byte {error.start:,}",
            expected="a file that `gradaccum doctor --json` or `--trace` has written",
            do="check the path, or write the report anew",
        ) from None
    first = text.split("\n", 1)[0]
    try:
        is_trace = isinstance(record := json.loads(first), dict) and record.get("t") == "head"
    except (ValueError, RecursionError):
        is_trace = first.startswith('{"t":"head"')
    if is_trace:
        trace = Trace.parse(text.splitlines(), path)
        command = trace.head.get("argv") or [path]
        return diagnose(trace, command[0])
    return stored.load(text, path)
