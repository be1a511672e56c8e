"""A trace as the checks read it: plain records, resolved from the JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradaccum.errors import InputError

__all__ = ["Event", "Opt", "Param", "Place", "Segment", "Trace"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code."""

    path: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; what it is made of depends on its kind."""

    kind: str
    n: int
    """Number in the run, from 0."""
    at: Place | None
    """Innermost line outside torch; `None` if it was seen only afterwards."""
    user: Place | None
    """Innermost line in the user's own files."""
    start: float
    end: float
    data: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A field of `data`."""
        return self.data.get(key, default)


@dataclass(frozen=True, slots=True)
class Segment:
    """The events up to and including one update."""

    index: int
    events: tuple[Event, ...]
    deep: bool
    closed: bool
    signature: int
    """-1 if it has none."""


@dataclass(frozen=True, slots=True)
class Param:
    """One leaf that was watched."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    owners: tuple[int, ...]
    is_parameter: bool
    arrivals: int = 0
    zeroed: int = 0
    changes: int = 0
    held_max: int = 0
    requires_grad: bool | None = None
    """At the end; `None` if it was freed."""
    held: int = 0
    """Backwards whose gradients stood in it at the end."""
    backwards: tuple[int, ...] = ()
    change: float | None = None
    """Norm of its change over the run relative to its norm at the start, over a sample."""


@dataclass(frozen=True, slots=True)
class Opt:
    """One optimizer."""

    index: int
    kind: str
    at: Place | None
    user: Place | None
    params: tuple[int, ...]
    steps: int
    lr: float | None
    elements: int = 0


@dataclass(slots=True)
class Trace:
    """All that is known of one process."""

    head: dict[str, Any] = field(default_factory=dict)
    params: list[Param] = field(default_factory=list)
    optimizers: list[Opt] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    tally: list[dict[str, int]] = field(default_factory=list)
    modules: list[dict[str, Any]] = field(default_factory=list)
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The script's own names of modules, and the parameters of each."""
    seconds: float = 0.0
    error: str = ""
    trouble: str = ""
    complete: bool = False
    """Whether the process came to its end; a killed one did not."""

    @property
    def events(self) -> list[Event]:
        """Of all segments that were kept, in order."""
        return [event for segment in self.segments for event in segment.events]

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a JSON-lines file."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls.parse(file, str(path))
        except OSError as error:
            raise InputError(
                "trace-unreadable",
                f"cannot read the trace {path}: {error.strerror}.",
                got=str(path),
                expected="a file that `gradaccum doctor --trace FILE` has written",
                do="check the path",
            ) from None
        except UnicodeDecodeError:
            raise _no_trace(str(path), "it is not text") from None

    @classmethod
    def parse(cls, lines: Iterable[str], name: str = "the trace") -> Trace:
        """Read JSON lines; a last line that was cut off is left out."""
        return _Reader(name).read(lines)


def _no_trace(name: str, why: str) -> InputError:
    return InputError(
        "trace-format",
        f"{name} is not a trace: {why}.",
        got=name,
        expected="a file that `gradaccum doctor --trace FILE` has written",
        do="run `gradaccum doctor --trace FILE script.py` again",
    )


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.trace = Trace()
        self.places: list[Place] = []
        self.raw: dict[int, dict[str, Any]] = {}
        self.told: dict[int, dict[str, Any]] = {}
        self.totals: dict[str, Any] = {}

    def read(self, lines: Iterable[str]) -> Trace:
        bad = 0
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            if bad:
                raise _no_trace(self.name, f"line {bad} is not JSON")
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                bad = number + 1
                continue
            if number == 0:
                self._head(record)
            try:
                self._take(record)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                raise _no_trace(self.name, f"line {number + 1} is not a record") from None
        if not self.trace.head:
            raise _no_trace(self.name, "it is empty or begins with something else")
        try:
            self._finish()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise _no_trace(self.name, "a record lacks what belongs to it") from None
        return self.trace

    def _head(self, record: Any) -> None:
        if not isinstance(record, dict) or record.get("t") != "head":
            raise _no_trace(self.name, "it begins with something else")
        version = record.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise InputError(
                "trace-version",
                f"{self.name} was written by a newer gradaccum.",
                got=f"version {version}",
                expected=f"version {VERSION} or older",
                do="pip install --upgrade gradaccum",
            )

    def _take(self, record: dict[str, Any]) -> None:
        kind = record.get("t")
        if kind == "head":
            self.trace.head = record
        elif kind == "places":
            del self.places[record["from"] :]
            self.places += [Place(*place) for place in record["places"]]
        elif kind == "params":
            self.told.update({param["i"]: param for param in record["params"]})
        elif kind == "segment":
            self.raw[record["i"]] = record
        elif kind == "totals":
            self.totals = record

    def _place(self, number: int | None) -> Place | None:
        if number is None or not 0 <= number < len(self.places):
            return None
        return self.places[number]

    def _event(self, raw: dict[str, Any]) -> Event:
        data = {k: v for k, v in raw.items() if k not in ("k", "n", "at", "user", "s", "e")}
        for key in ("after", "before"):
            if key in data:
                data[key] = self._place(data[key])
        at = self._place(raw.get("at"))
        user = self._place(raw["user"]) if "user" in raw else at
        return Event(raw["k"], raw["n"], at, user, raw["s"], raw["e"], data)

    def _finish(self) -> None:
        trace, totals = self.trace, self.totals
        for index in sorted(self.raw):
            raw = self.raw[index]
            events = tuple(map(self._event, raw["events"]))
            trace.segments.append(
                Segment(index, events, raw["deep"], raw["closed"], raw["signature"])
            )
        self.told.update({param["i"]: param for param in totals.get("params", ())})
        counts = totals.get("counts", [])
        for index in sorted(self.told):
            far = totals.get("changes", [])[index : index + 1]
            trace.params.append(_param(self.told[index], counts[index : index + 1], far))
        trace.optimizers = [
            Opt(
                o["i"], o["kind"], self._place(o["at"]), self._place(o["user"]),
                tuple(o["params"]), max(o["steps"], self._steps(o["i"])), o["lr"],
                sum(self.told[i]["elements"] for i in o["params"] if i in self.told),
            )
            for o in totals.get("optimizers", ())
        ]  # fmt: skip
        if totals.get("rank"):
            trace.head = {**trace.head, "rank": totals["rank"][0], "ranks": totals["rank"][1]}
        # those of a run that was killed are as old as their last writing
        seen, told = self._counted(), totals.get("totals", {})
        trace.totals = {
            kind: max(told.get(kind, 0), seen.get(kind, 0)) for kind in {**told, **seen}
        }
        trace.tally = totals.get("tally", [])
        trace.modules = totals.get("modules", [])
        trace.holders = {name: tuple(held) for name, held in totals.get("holders", {}).items()}
        trace.error = totals.get("error", "")
        trace.trouble = totals.get("trouble", "")
        trace.complete = bool(totals.get("ended"))
        ends = [event.end for event in trace.events[-1:]]
        trace.seconds = totals.get("seconds") or (ends[0] if ends else 0.0)

    def _steps(self, optimizer: int) -> int:
        return sum(
            event.kind == "step" and event.get("optimizer") == optimizer
            for event in self.trace.events
        )

    def _counted(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for event in self.trace.events:
            counts[event.kind] = counts.get(event.kind, 0) + 1
        return counts


def _param(told: dict[str, Any], counts: list[list[Any]], far: list[float | None]) -> Param:
    c = counts[0] if counts else [0, 0, 0, 0, None, 0, []]
    return Param(
        told["i"], told["name"], tuple(told["shape"]), told["dtype"], told["elements"],
        tuple(told["owners"]), told["parameter"], c[0], c[1], c[2], c[3], c[4], c[5], tuple(c[6]),
        far[0] if far else None,
    )  # fmt: skip
