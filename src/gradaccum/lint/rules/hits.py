"""What a rule says: a fault at a place, with the lines it was judged by."""

from __future__ import annotations

from dataclasses import dataclass

from gradaccum.lint.walk.trace import Event

__all__ = ["Hit", "hit"]


@dataclass(slots=True, frozen=True)
class Hit:
    """One fault in one walk."""

    code: str
    path: str
    line: int
    column: int
    message: str
    evidence: tuple[tuple[str, int, str], ...] = ()
    """Lines it was judged by: path, line, what happens there."""

    @property
    def place(self) -> tuple[str, str, int, int]:
        """What makes two hits the same finding."""
        return self.code, self.path, self.line, self.column


def hit(code: str, event: Event, message: str, *evidence: tuple[Event, str]) -> Hit:
    """A fault at `event`."""
    return Hit(
        code,
        event.path,
        event.line,
        getattr(event.node, "col_offset", 0),
        message,
        tuple(dict.fromkeys((other.path, other.line, what) for other, what in evidence)),
    )
