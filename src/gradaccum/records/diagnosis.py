"""What a run was seen to do: what the doctor writes and the report shows.

Times are seconds since the run began, memory is in bytes, a weight is the factor that one mean-loss
of a micro-batch had in its update. `None` stands for what was not seen or cannot be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradaccum.records.finding import Finding

__all__ = [
    "Diagnosis",
    "Event",
    "MicrobatchSeen",
    "OptimizerSeen",
    "ParameterSeen",
    "Run",
    "TermSeen",
    "WindowSeen",
]


@dataclass(frozen=True, slots=True)
class Run:
    """The program that was run, and how it ended."""

    script: str
    """As it was given: a path, or `-m module`; `watch` where no program was run."""
    argv: tuple[str, ...]
    started: str
    """Local time, ISO 8601."""
    seconds: float
    ended: str
    """`finished`, `raised`, `exited`, `interrupted`, `killed`."""
    exit_code: int
    error: str = ""
    """The exception's last line, where one ended it."""
    rank: int = 0
    ranks: int = 1
    python: str = ""
    torch: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerSeen:
    """One optimizer, and what it owns."""

    index: int
    kind: str
    """Class name."""
    path: str
    line: int
    """Where it was made."""
    parameters: int
    elements: int
    steps: int
    lr: float | None = None


@dataclass(frozen=True, slots=True)
class ParameterSeen:
    """One tensor that asked for gradients."""

    name: str
    """Qualified name where a module is known to hold it."""
    shape: tuple[int, ...]
    dtype: str
    owner: int | None
    """Index of its optimizer; `None` if no optimizer owns it."""
    arrivals: int
    """Gradients that were added to it."""
    changes: int
    """Updates in which its value changed."""
    zeroed: int
    """Times its gradient was cleared."""
    change: float | None = None
    """Norm of its change over the run, relative to its norm at the start."""


@dataclass(frozen=True, slots=True)
class TermSeen:
    """One loss term's weight in an update."""

    name: str
    weight: float | None
    expected: float | None
    count: float | None = None
    why: str = ""
    """Why it is unknown."""


@dataclass(frozen=True, slots=True)
class MicrobatchSeen:
    """One backward."""

    index: int
    """In its window, from 0."""
    path: str
    line: int
    """Where backward was called."""
    start: float
    end: float
    loss: float | None = None
    terms: tuple[TermSeen, ...] = ()
    norm: float | None = None
    """Norm of the gradient that stood after it: how the gradient grew within the window."""
    memory: int | None = None
    """Peak bytes during it."""
    lost: bool = False
    """Whether its gradient was thrown away before any step."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, in the order in which it did."""

    kind: str
    """`forward`, `backward`, `zero`, `clip`, `unscale`, `step`, `scale`, `schedule`, `write`,
    `mode`, `sync`."""
    path: str
    line: int
    start: float
    end: float
    what: str = ""


@dataclass(frozen=True, slots=True)
class WindowSeen:
    """What lay between two steps of one optimizer."""

    index: int
    optimizer: int | None
    """`None` where parameters were changed outside any optimizer."""
    start: float
    end: float
    microbatches: tuple[MicrobatchSeen, ...]
    events: tuple[Event, ...]
    stepped: bool = True
    norm: float | None = None
    """Norm of the gradient that the step used."""
    change: float | None = None
    """Norm of the change of the parameters, relative to their norm."""
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A whole run: the verdict, and what it is judged by."""

    run: Run
    verdict: str
    """One sentence."""
    findings: tuple[Finding, ...] = ()
    totals: Mapping[str, int] = field(default_factory=dict)
    """How often each kind of event happened in the whole run, not only where it was looked at."""
    optimizers: tuple[OptimizerSeen, ...] = ()
    parameters: tuple[ParameterSeen, ...] = ()
    windows: tuple[WindowSeen, ...] = ()
    """Those that were looked at: the first ones, and some of the others."""
    sources: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Lines of source around all that is named, by path and line number."""
    memory: tuple[tuple[float, int], ...] = ()
    """Bytes over time, thinned to a bounded number of points."""
