"""A diagnosis as a trace in the Trace Event Format, which Perfetto and chrome://tracing open.

The format: https://perfetto.dev/docs/getting-started/other-formats#chrome-json-format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from gradaccum.records.diagnosis import Diagnosis, Event, MicrobatchSeen, WindowSeen
from gradaccum.report.seen import window_name
from gradaccum.report.visible import tame
from gradaccum.report.weights import named

__all__ = ["chrome_trace"]

_THREADS = {"windows": 100, "micro-batches": 200, "events": 300}
"""Number of the first thread of each kind; a kind has more where its slices overlap."""
_NANOSECONDS = 1e9
Slice = dict[str, Any]


def chrome_trace(diagnosis: Diagnosis) -> str:
    """One process for the rank: threads of windows, micro-batches and events, and counters.

    Times are microseconds since the run began, memory is in bytes.
    """
    shown = tame(diagnosis)
    process = shown.run.rank
    kinds = {
        "windows": [
            _window(item, window_name(item, item is shown.windows[-1])) for item in shown.windows
        ],
        "micro-batches": [
            _microbatch(item, micro) for item in shown.windows for micro in item.microbatches
        ],
        "events": [_event(event) for item in shown.windows for event in item.events],
    }
    rows = [_name("process_name", process, 0, name=f"rank {process}: {shown.run.script}")]
    for kind, slices in kinds.items():
        rows += _laid_out(kind, slices, process)
    table = {
        "traceEvents": [*rows, *_counters(shown, process)],
        "displayTimeUnit": "ms",
        "otherData": {
            "script": shown.run.script,
            "verdict": shown.verdict,
            "findings": [
                f"{item.code} {item.path}:{item.line} {item.message}" for item in shown.findings
            ],
        },
    }
    return json.dumps(table, allow_nan=False)


def _name(what: str, process: int, thread: int, **args: Any) -> Slice:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _slice(name: str, category: str, start: float, end: float, **args: Any) -> Slice:
    first, last = round(start * _NANOSECONDS), round(end * _NANOSECONDS)  # what Perfetto rounds to
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": first / 1000,
        "dur": max(last - first, 0) / 1000,
        "args": {key: _finite(value) for key, value in args.items() if value not in (None, "")},
    }


def _finite(value: Any) -> Any:
    # JSON has no word for infinity
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _window(window: WindowSeen, name: str) -> Slice:
    return _slice(
        name, "window", window.start, window.end, microbatches=len(window.microbatches),
        optimizer=window.optimizer, norm=window.norm, change=window.change,
    )  # fmt: skip


def _microbatch(window: WindowSeen, micro: MicrobatchSeen) -> Slice:
    weights = {f"weight of {name}": term.weight for name, term in named(micro)}
    expected = {f"expected of {name}": term.expected for name, term in named(micro)}
    return _slice(
        f"micro-batch {micro.index}", "microbatch", micro.start, micro.end, window=window.index,
        line=f"{micro.path}:{micro.line}", loss=micro.loss, norm=micro.norm,
        lost=micro.lost or None, **weights, **expected,
    )  # fmt: skip


def _event(event: Event) -> Slice:
    name = f"{event.kind} {event.what}".strip()
    return _slice(name, event.kind, event.start, event.end, line=f"{event.path}:{event.line}")


def _laid_out(kind: str, slices: list[Slice], process: int) -> Iterable[Slice]:
    """Each slice on the first thread where it lies apart from, or inside, what is there.

    Slices of one thread must nest; those of two threads of the program, or the windows of two
    optimizers, may not.
    """
    threads: list[list[int]] = []
    for item in sorted(slices, key=lambda row: (row["ts"], -row["dur"])):
        thread = _THREADS[kind] + _fit(threads, *_span(item))
        yield {**item, "pid": process, "tid": thread}
    for place in range(len(threads)):
        thread = _THREADS[kind] + place
        yield _name("thread_name", process, thread, name=f"{kind} {place}" if place else kind)
        yield _name("thread_sort_index", process, thread, sort_index=thread)


def _span(item: Slice) -> tuple[int, int]:
    start = round(item["ts"] * 1000)
    return start, start + round(item["dur"] * 1000)


def _fit(threads: list[list[int]], start: int, end: int) -> int:
    """Place of the thread that takes the slice; each is the stack of ends of what is open there."""
    for place, ends in enumerate(threads):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return place
    threads.append([end])
    return len(threads) - 1


def _counters(diagnosis: Diagnosis, process: int) -> Iterable[dict[str, Any]]:
    memory = [("memory, bytes", at, value) for at, value in diagnosis.memory]
    windows = [
        (name, window.end, value)
        for window in diagnosis.windows
        for name, value in (("gradient norm", window.norm), ("change of parameters", window.change))
        if value is not None and math.isfinite(value)
    ]
    for name, at, value in [*memory, *windows]:
        yield {
            "ph": "C", "name": name, "ts": at * 1e6, "pid": process, "tid": 0,
            "args": {"value": value},
        }  # fmt: skip
