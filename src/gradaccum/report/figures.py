"""What the page's plots are drawn from: the windows of a diagnosis, packed small.

Texts that repeat stand once in a table and are named by their place in it. A run of any size makes
a page of bounded size: what is left out is counted, and the page says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from gradaccum.records.diagnosis import Diagnosis, MicrobatchSeen, TermSeen, WindowSeen
from gradaccum.report.seen import window_name
from gradaccum.report.visible import one_line
from gradaccum.report.weights import named, state

__all__ = ["embedded", "figures"]

MOST_WINDOWS = 400
_MOST_POINTS = 2_000
_MOST_BYTES = 640_000
_LONGEST = 160


def figures(diagnosis: Diagnosis, short: Mapping[str, str]) -> dict[str, Any]:
    """Plain lists and numbers for the page's scripts.

    Args:
        diagnosis: with its texts made visible.
        short: how each path is shown.
    """
    packer = _Packer(diagnosis, short)
    last = len(diagnosis.windows) - 1
    windows = [
        {"name": window_name(item, place == last), **packed}
        for place, item in enumerate(diagnosis.windows)
        if (packed := packer.window(item))
    ]
    points = diagnosis.memory[:: max(1, math.ceil(len(diagnosis.memory) / _MOST_POINTS))]
    return {
        **{name: table.rows for name, table in packer.tables.items()},
        "optimizers": [f"{item.kind} {item.index}" for item in diagnosis.optimizers],
        "windows": windows,
        "memory": [[_short(at) for at, _ in points], [value for _, value in points]],
        "left": {
            "windows": len(diagnosis.windows) - len(windows),
            "events": packer.events_left,
            "microbatches": packer.microbatches_left,
        },
    }


def embedded(value: Any) -> str:
    """JSON that neither ends a script element nor opens a comment in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


class _Table:
    """Rows that repeat, each once."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._place: dict[Any, int] = {}

    def at(self, key: Any, row: Any = None) -> int:
        if key not in self._place:
            self._place[key] = len(self.rows)
            self.rows.append(key if row is None else row)
        return self._place[key]

    def cut(self, length: int) -> None:
        """Forget the rows from `length` on."""
        del self.rows[length:]
        self._place = {key: place for key, place in self._place.items() if place < length}


class _Packer:
    """Packs windows until the page is full."""

    def __init__(self, diagnosis: Diagnosis, short: Mapping[str, str]) -> None:
        self._sources = diagnosis.sources
        self._shown = short
        self._room = _MOST_BYTES
        self.tables = {name: _Table() for name in ("kinds", "places", "texts", "terms")}
        self.events_left = self.microbatches_left = 0

    def window(self, window: WindowSeen) -> dict[str, Any] | None:
        """One window; its events are all there or all left out, since half a window would lie."""
        for events, micros in ((True, True), (False, True), (False, False)):
            packed = self._fitted(window, events, micros)
            if packed is not None:
                self.events_left += 0 if events else len(window.events)
                self.microbatches_left += 0 if micros else len(window.microbatches)
                return packed
        return None

    def _fitted(self, window: WindowSeen, events: bool, micros: bool) -> dict[str, Any] | None:
        before = {name: len(table.rows) for name, table in self.tables.items()}
        packed = {
            "index": window.index,
            "optimizer": window.optimizer,
            "start": _short(window.start),
            "end": _short(window.end),
            "stepped": window.stepped,
            "norm": _short(window.norm),
            "change": _short(window.change),
            "memory": window.memory,
            "count": len(window.microbatches),
            "micros": [self._micro(item) for item in window.microbatches] if micros else [],
            "events": self._timeline(window) if events else None,
        }
        new = {name: table.rows[before[name] :] for name, table in self.tables.items()}
        size = len(embedded(packed)) + len(embedded(new))
        if size <= self._room:
            self._room -= size
            return packed
        for name, table in self.tables.items():
            table.cut(before[name])
        return None

    def _micro(self, micro: MicrobatchSeen) -> list[Any]:
        return [
            micro.index, self._where(micro.path, micro.line), _short(micro.start),
            _short(micro.end), _short(micro.loss), _short(micro.norm), micro.memory,
            int(micro.lost),
            [self._term(name, term, micro) for name, term in named(micro)],
        ]  # fmt: skip

    def _term(self, name: str, term: TermSeen, micro: MicrobatchSeen) -> list[Any]:
        return [
            self._text("terms", name), _short(term.weight), _short(term.expected),
            _short(term.count), state(term, micro), self._text("texts", term.why),
        ]  # fmt: skip

    def _timeline(self, window: WindowSeen) -> list[list[Any]]:
        return [
            [
                self._text("kinds", event.kind), self._where(event.path, event.line),
                round((event.start - window.start) * 1e6), round((event.end - event.start) * 1e6),
                self._text("texts", event.what),
            ]
            for event in sorted(window.events, key=lambda item: item.start)
        ]  # fmt: skip

    def _text(self, table: str, text: str) -> int:
        return self.tables[table].at(one_line(text, _LONGEST))

    def _where(self, path: str, line: int) -> int:
        code = self._sources.get(path, {}).get(line, "").strip()
        row = [one_line(self._shown.get(path, path), _LONGEST), line, one_line(code, _LONGEST)]
        return self.tables["places"].at((path, line), row)


def _short(value: float | None) -> float | None:
    # seven digits: more than a plot can show, and more than a float32 has
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None
