"""Where records go: a file that grows as the run does, or a list."""

from __future__ import annotations

import json
import os
from typing import Any, Protocol

__all__ = ["FileSink", "ListSink", "Sink"]

# The script may replace what these names stand for.
_dumps, _open, _write, _close = json.dumps, os.open, os.write, os.close


class Sink(Protocol):
    """Takes records."""

    def write(self, record: dict[str, Any]) -> None:
        """Keep one record."""


class FileSink:
    """JSON lines, each handed to the system at once: a process that is killed has lost none.

    The file is made with the first record, so a process that never trains leaves none. It is open
    only while a record is written: the script's own files keep the numbers that they would have.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        data = (_dumps(record, separators=(",", ":"), default=str) + "\n").encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        file = _open(self.path, flags, 0o644)
        try:
            while data:
                data = data[_write(file, data) :]
        finally:
            _close(file)


class ListSink:
    """Keeps records in memory, as the file would hold them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        self.lines.append(_dumps(record, separators=(",", ":"), default=str))
