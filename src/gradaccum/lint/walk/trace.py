"""What a walk of a training loop leaves behind: one record for every call that matters."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TypeAlias

from gradaccum.lint.walk.values import Tensor, Thing, Value

__all__ = ["SET", "Doubt", "Event", "Frame", "Gate", "Loop", "Trace"]

SET = "?="
"""Before a condition that only settings decide, and of which both branches were walked."""

Doubt: TypeAlias = "tuple[str, bool, bool]"
"""A condition that nobody can evaluate: its key, whether it changes from iteration to iteration,
and whether the condition holds where the key does."""


@dataclass(slots=True, unsafe_hash=True)
class Loop:
    """One iteration of one loop."""

    node: ast.AST
    entry: int
    """Number of the time this loop was entered, so that two epochs' inner loops differ."""
    index: int


@dataclass(slots=True, eq=False)
class Event:
    """A call that touches gradients, parameters, schedules or graphs."""

    kind: str
    node: ast.AST
    path: str
    loops: tuple[Loop, ...]
    thing: Thing | None = None
    tensor: Tensor | None = None
    flags: frozenset[str] = frozenset()
    unsure: tuple[str, ...] = ()
    """Conditions that nobody can evaluate and that were decided to get here."""
    calls: tuple[tuple[ast.AST, str], ...] = ()
    """Of a forward or backward pass: the statements, with their files, that called up to here."""

    @property
    def line(self) -> int:
        """Where it stands."""
        return getattr(self.node, "lineno", 1)

    @property
    def spot(self) -> tuple[ast.AST, ...]:
        """Where it stands, told apart by the calls that lead there: two losses, one helper."""
        return (self.node, *[node for node, _ in self.calls])


@dataclass(slots=True)
class Gate:
    """A condition in loops that turn as often as the script says, and whether it ever held."""

    node: ast.If
    path: str
    loops: tuple[Loop, ...]
    taken: bool = False


@dataclass(slots=True)
class Trace:
    """One walk: its events, and how each unknown condition was decided."""

    events: list[Event] = field(default_factory=list)
    decisions: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    """Condition to (taken, differs from iteration to iteration)."""
    window_keys: set[str] = field(default_factory=set)
    """Symbols that count micro-batches, by where they are used."""
    scaled_keys: set[str] = field(default_factory=set)
    """Symbols that some hyperparameter was multiplied or divided by."""
    things: list[Thing] = field(default_factory=list)
    guessed: bool = False
    """A counter of unknown start was taken to start at zero."""
    shifted: bool = False
    """A counter of windows begins nobody knows where, or its window changes on the way."""
    trimmed: bool = False
    """The loop leaves by itself what would not fill a window."""
    measured: set[str] = field(default_factory=set)
    """Symbols that a loader was cut to a multiple of."""
    multiples: set[float] = field(default_factory=set)
    """Numbers that a length is a multiple of, because the script says so."""
    named: bool = False
    """The file calls something an optimizer that steps, so nothing unnamed is taken for one."""
    exact: bool = True
    """No symbol's value had to be chosen on the way."""
    over: dict[int, Value] = field(default_factory=dict)
    """What each loop walks over, by the number of the time it was entered."""
    gates: dict[int, Gate] = field(default_factory=dict)
    """Conditions of steps whose every value is known, by their node."""
    undone: set[int] = field(default_factory=set)
    """Means of losses that are multiplied afterwards."""
    made_in: dict[int, str] = field(default_factory=dict)
    """The file of each call that made a schedule."""


@dataclass(slots=True)
class Frame:
    """One loop that is being walked."""

    node: ast.AST
    entry: int
    index: int = 0
    last: bool = False
    exact: bool = False
    """It turns as often as the script says."""
    now: Loop = field(init=False)

    def __post_init__(self) -> None:
        self.now = Loop(self.node, self.entry, 0)

    def turn(self, index: int, last: bool) -> None:
        """Begin the next iteration."""
        self.index, self.last = index, last
        self.now = Loop(self.node, self.entry, index)
