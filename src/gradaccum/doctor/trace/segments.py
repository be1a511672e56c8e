"""Which of a run's events are kept: the first, the last, one of each shape, and some others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gradaccum.doctor.trace.sink import Sink

__all__ = ["Segments"]

FIRST, EACH, LAST = 12, 3, 2
SHAPES, BACKWARDS, EVENTS = 256, 256, 2048
BURST, SHARE, FOR_EACH, MOST = 0.02, 0.01, 1e-5, 10.0
"""What looks at values may take: seconds, share of the run, seconds for each backward; and what the
first ones may take."""
OFTEN = 8
"""Of so many windows that are read, one is also looked at deeply, however little time there is."""


class Segments:
    """Cuts the stream of events after each step, and writes the segments worth keeping.

    Memory and file are bounded: what is not kept is counted by its shape.

    Args:
        sink: takes the records.
        start: `time.perf_counter()` at the beginning of the run.
    """

    def __init__(self, sink: Sink, start: float) -> None:
        self._sink = sink
        self._start = start
        self.index = 0
        self.events: list[dict[str, Any]] = []
        self._shape: list[Any] = []
        self._backwards = 0
        self._seen = 0
        self._read = 0
        self._ending = False
        self._shapes: dict[tuple[Any, ...], list[int]] = {}
        self._unsaved: deque[dict[str, Any]] = deque(maxlen=LAST)
        self._due = 1.0
        """When to write what is not yet written, in seconds since the beginning."""
        self.spent = 0.0
        self.deep = True
        self.reading = True
        self.turn: Callable[[bool], None] | None = None
        """Told when `deep` changes."""
        self.before_write: Any = None
        self.after_flush: Any = None

    def add(self, event: dict[str, Any], mark: object = None, now: float = 0.0) -> None:
        """Append an event; `mark` is what beside its kind and place makes up its shape.

        `now` in seconds since the beginning.
        """
        kind = event["k"]
        if self._ending and kind in ("backward", "forward", "zero", "optimizer", "step"):
            self.close()
        if kind == "backward":
            self._backwards += 1
            self._seen += 1
            if self._seen == BACKWARDS:
                self._choose()
            if self._backwards > BACKWARDS:
                self.close(closed=False)
                self._backwards = 1
        if len(self.events) < EVENTS:
            self.events.append(event)
            if kind != "forward":
                self._shape.append((kind, event.get("at"), mark))
        if kind == "write" and event.get("target") == "param":
            self._ending = True
        if now > self._due:
            self.flush(now + self._start)

    def close(self, closed: bool = True) -> None:
        """End the segment; write it if it is worth keeping."""
        self._ending = False
        shape = tuple(self._shape)
        entry = self._shapes.get(shape)
        if entry is None and len(self._shapes) < SHAPES:
            entry = self._shapes[shape] = [len(self._shapes), self.index, 0, self.index]
        if entry is not None:
            entry[2] += 1
            entry[3] = self.index
        number = -1 if entry is None else entry[0]
        segment = self._record(number, closed)
        new = entry is not None and entry[2] <= EACH
        if self.index < FIRST or new or self.index & (self.index - 1) == 0:
            self._write(segment)
        else:
            self._unsaved.append(segment)
        self.index += 1
        self.events = []
        self._shape = []
        self._backwards = 0
        self._choose()

    def _choose(self) -> None:
        allowed = self.allowed()
        first = self.index < FIRST and self._seen < BACKWARDS and self.spent < MOST
        self.reading = first or self.spent < allowed
        self._read += self.reading
        deep = first or self.spent < 0.5 * allowed or (self.reading and not self._read % OFTEN)
        if deep is not self.deep:
            self.deep = deep
            if self.turn is not None:
                self.turn(deep)

    def allowed(self) -> float:
        """Seconds that looks may have taken until now."""
        return BURST + FOR_EACH * self._seen + SHARE * (time.perf_counter() - self._start)

    def _record(self, number: int, closed: bool) -> dict[str, Any]:
        return {
            "t": "segment",
            "i": self.index,
            "signature": number,
            "deep": self.deep,
            "closed": closed,
            "events": self.events,
        }

    def _write(self, record: dict[str, Any]) -> None:
        if self.before_write is not None:
            self.before_write()
        self._sink.write(record)

    def flush(self, now: float, summary: bool = True) -> None:
        """Write what a killed process would lose; seldom, and less often as the run grows."""
        now -= self._start
        self._due = now + max(1.0, 0.02 * now)
        while self._unsaved:
            self._write(self._unsaved.popleft())
        if self.events:
            self._write(self._record(-1, closed=False))
        if summary and self.after_flush is not None:
            self.after_flush()

    def tally(self) -> list[dict[str, int]]:
        """How many segments had each shape."""
        return [
            {"signature": number, "example": example, "count": count, "last": last}
            for number, example, count, last in self._shapes.values()
        ]
