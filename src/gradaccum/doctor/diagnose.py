"""From a trace to a diagnosis: windows, tables, verdict, findings, and the source around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gradaccum.doctor.across import uneven
from gradaccum.doctor.checks import judge
from gradaccum.doctor.checks.story import adds
from gradaccum.doctor.trace.model import Event as Noted
from gradaccum.doctor.trace.model import Opt, Param, Place, Segment, Trace
from gradaccum.records import Finding
from gradaccum.records.diagnosis import (
    Diagnosis,
    Event,
    MicrobatchSeen,
    OptimizerSeen,
    ParameterSeen,
    Run,
    TermSeen,
    WindowSeen,
)
from gradaccum.report.rows import rows

__all__ = ["diagnose", "ended", "together"]

_AROUND = 6
"""Lines of source that are kept on each side of a line that is named."""
_POINTS = 500
_NAMES = {
    "scaler_step": "step",
    "scaler_update": "scale",
    "no_sync": "sync",
}
Terms = Mapping[int, tuple[TermSeen, ...]]


def ended(status: int, error: str) -> str:
    """How a run ended, by its exit status and what Python printed last."""
    if status == -2 or error.startswith("KeyboardInterrupt"):
        return "interrupted"
    if status < 0:
        return "killed"
    if status == 0:
        return "finished"
    return "raised" if error else "exited"


def diagnose(trace: Trace, script: str, status: int | None = None) -> Diagnosis:
    """Judge a trace.

    Args:
        trace: of one process.
        script: what to call what was run.
        status: its exit status, where somebody saw it.
    """
    judgement = judge(_as_it_ended(trace, status))
    head = trace.head
    unknown = status is None and not trace.complete
    status = status or 0
    run = Run(
        script=script,
        argv=tuple(head.get("argv", ())[1:]),
        started=head.get("started", ""),
        seconds=trace.seconds,
        ended="unfinished" if unknown else ended(status, trace.error),
        exit_code=status if status >= 0 else 128 - status,
        error=trace.error,
        rank=head.get("rank", 0),
        ranks=head.get("ranks", 1),
        python=head.get("python", ""),
        torch=head.get("torch", ""),
        device=head.get("device", ""),
    )
    windows = _windows(trace, judgement.weights)
    return Diagnosis(
        run=run,
        verdict=judgement.verdict,
        findings=judgement.findings,
        totals={**trace.totals, "update": judgement.updates},
        optimizers=tuple(map(_optimizer, trace.optimizers)),
        parameters=tuple(_parameter(p) for p in trace.params),
        windows=windows,
        sources=_sources(judgement.findings, windows),
        memory=_memory(trace.events),
    )


def _as_it_ended(trace: Trace, status: int | None) -> Trace:
    """The trace of a run that gave up: to exit with a status is as early an end as to raise."""
    if not status or trace.error:
        return trace
    return replace(trace, error=f"SystemExit: {status}")


def _optimizer(seen: Opt) -> OptimizerSeen:
    path, line = _spot(seen.user or seen.at)
    return OptimizerSeen(
        seen.index, seen.kind, path, line, len(seen.params), seen.elements, seen.steps, seen.lr
    )


def _parameter(seen: Param) -> ParameterSeen:
    owner = seen.owners[-1] if seen.owners else None
    name = seen.name or f"{'parameter' if seen.is_parameter else 'leaf'} {seen.index}"
    return ParameterSeen(
        name, seen.shape, seen.dtype, owner, seen.arrivals, seen.changes, seen.zeroed, seen.change
    )


def _spot(place: Place | None) -> tuple[str, int]:
    return (place.path, place.line) if place is not None else ("", 0)


def _windows(trace: Trace, weights: Terms) -> tuple[WindowSeen, ...]:
    lost = {
        number
        for event in trace.events
        if event.kind == "zero"
        for group in event.get("lost", ())
        for number in group["backwards"]
    }
    used = {
        number
        for event in trace.events
        if event.kind == "step"
        for group in event.get("used", ())
        for number in group["backwards"]
    }
    for segment in trace.segments:
        used.update(_written(segment))
    lost |= _left(trace)
    return tuple(
        _window(segment, weights, lost - used) for segment in trace.segments if segment.events
    )


def _left(trace: Trace) -> set[int]:
    """Backwards whose gradients stood where updates are made when the run had come to its end."""
    if not trace.complete or trace.error:
        return set()
    stepped = {optimizer.index for optimizer in trace.optimizers if optimizer.steps}
    return {
        number
        for param in trace.params
        if param.changes or stepped & set(param.owners)
        for number in param.backwards
        if param.held
    }


def _written(segment: Segment) -> set[int]:
    """Backwards that an update outside any optimizer used: those before the write."""
    seen: dict[int, set[int]] = {}
    used: set[int] = set()
    for event in segment.events:
        if event.kind == "backward":
            seen[event.get("b")] = set(event.get("arrived", ()))
        elif event.kind == "write" and event.get("target") == "param" and adds(event):
            params = set(event.get("params", ()))
            used.update(number for number, arrived in seen.items() if arrived & params)
    return used


def _window(segment: Segment, weights: Terms, lost: set[int]) -> WindowSeen:
    events = segment.events
    step = next((e for e in reversed(events) if e.kind == "step"), None)
    micros = tuple(
        _microbatch(index, event, weights, lost)
        for index, event in enumerate(
            e for e in events if e.kind == "backward" and not e.get("nested")
        )
    )
    memory = [micro.memory for micro in micros if micro.memory is not None]
    written = segment.closed and any(
        e.kind == "write" and e.get("target") == "param" for e in events
    )
    return WindowSeen(
        index=segment.index,
        optimizer=step.get("optimizer") if step else None,
        start=events[0].start,
        end=events[-1].end,
        microbatches=micros,
        events=tuple(map(_event, events)),
        # The run's last update by hand is followed by nothing that would close its segment.
        stepped=(segment.closed and step is not None) or written or bool(_written(segment)),
        norm=step.get("norm") if step else None,
        change=step.get("change") if step else None,
        memory=max(memory, default=None),
    )


def _microbatch(index: int, event: Noted, weights: Terms, lost: set[int]) -> MicrobatchSeen:
    path, line = _spot(event.user)
    number = event.get("b")
    return MicrobatchSeen(
        index=index,
        path=path,
        line=line,
        start=event.start,
        end=event.end,
        loss=event.get("loss"),
        terms=weights.get(number, ()),
        norm=event.get("norm"),
        memory=event.get("memory"),
        lost=number in lost,
    )


def _event(event: Noted) -> Event:
    path, line = _spot(event.user or event.get("before"))
    return Event(
        _NAMES.get(event.kind, event.kind), path, line, event.start, event.end, _what(event)
    )


def _what(event: Noted) -> str:
    data = event.data
    kind = event.kind
    if kind == "zero":
        return f"{data['via']}, {len(data['cleared'])} gradients"
    if kind == "step":
        return f"{len(data['changed'])} parameters changed"
    if kind == "clip":
        limit = data.get("max")
        return f"{data['via']}{'' if limit is None else f' {limit:g}'}"
    if kind == "write":
        what = "parameters" if data["target"] == "param" else "gradients"
        return f"{data['how']} on {len(data['params'])} {what}"
    if kind == "mode":
        return f"{data['module']}.{'train' if data['train'] else 'eval'}()"
    if kind == "forward":
        return str(data["module"])
    if kind == "schedule":
        return str(data["kind"])
    if kind == "scaler_step" and not data["stepped"]:
        return "skipped"
    return ""


def _memory(events: Iterable[Noted]) -> tuple[tuple[float, int], ...]:
    points = [(e.end, e.get("memory")) for e in events if e.get("memory") is not None]
    stride = max(1, -(-len(points) // _POINTS))
    return tuple((end, int(size)) for end, size in points[::stride])


def _sources(
    findings: Sequence[Finding], windows: Sequence[WindowSeen]
) -> dict[str, dict[int, str]]:
    named: dict[str, set[int]] = {}
    for finding in findings:
        named.setdefault(finding.path, set()).add(finding.line)
        for item in finding.evidence:
            named.setdefault(item.path, set()).add(item.line)
    for window in windows:
        for event in window.events:
            named.setdefault(event.path, set()).add(event.line)
    return {path: lines for path, wanted in named.items() if (lines := _excerpt(path, wanted))}


def _excerpt(path: str, wanted: set[int]) -> dict[int, str]:
    if not path or path.startswith("<"):
        return {}
    try:
        text = rows(Path(path).read_bytes())
    except OSError:
        return {}
    near = {n for line in wanted for n in range(line - _AROUND, line + _AROUND + 1)}
    return {n: text[n - 1].rstrip("\r\n")[:400] for n in sorted(near) if 1 <= n <= len(text)}


def together(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """One diagnosis of several processes: the first rank's, with everybody's findings."""
    first = min(diagnoses, key=lambda d: d.run.rank)
    if len(diagnoses) == 1:
        return first
    seen: dict[tuple[str, str, int], list[int]] = {}
    kept: dict[tuple[str, str, int], Finding] = {}
    sources: dict[str, dict[int, str]] = {}
    for diagnosis in sorted(diagnoses, key=lambda d: d.run.rank):
        for path, lines in diagnosis.sources.items():
            sources.setdefault(path, {}).update(lines)
        for finding in diagnosis.findings:
            key = (finding.code, finding.path, finding.line)
            kept.setdefault(key, finding)
            seen.setdefault(key, []).append(diagnosis.run.rank)
    findings = [
        finding
        if len(seen[key]) == len(diagnoses)
        else replace(finding, message=f"{finding.message} (rank {_ranks(seen[key])} only)")
        for key, finding in kept.items()
    ]
    known = {finding.code for finding in findings}
    findings += [one for one in uneven(diagnoses) if one.code not in known]
    worst = next((d for d in diagnoses if d.findings), first) if not first.findings else first
    return replace(
        first,
        verdict=f"{len(diagnoses)} ranks: {worst.verdict}",
        findings=tuple(findings),
        sources=sources,
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
