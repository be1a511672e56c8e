"""What every rule is given: the story, and questions that several rules ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from gradaccum.doctor.checks.named import counts_to
from gradaccum.doctor.checks.source import above_of, gate, gated, microbatches
from gradaccum.doctor.checks.story import Story, Window, place_of
from gradaccum.doctor.checks.weights import Series, close, handled, scales, series
from gradaccum.doctor.trace.model import Event, Place, Trace

__all__ = ["Context"]


@dataclass(slots=True)
class Context:
    """The story and what rules have settled so far."""

    story: Story
    factor: dict[int, float] = field(default_factory=dict)
    wrong: list[tuple[Window, float, str]] = field(default_factory=list)
    """Windows, what weights should have been multiplied by, and of which term; empty for all."""
    settled: set[Place] = field(default_factory=set)
    """Lines of updates whose window length has been judged."""
    faulty: set[int | None] = field(default_factory=set)
    """Optimizers of which a finding already explains what follows."""
    explained: set[int] = field(default_factory=set)
    """Parameters of which one does."""
    replaced: set[int] = field(default_factory=set)
    """Parameters whose place in the model another has taken."""
    lost: bool = False
    """Whether a finding already explains that no parameter changes."""
    _steps: list[Event] | None = None
    _arrived: dict[int, list[Event]] | None = None
    _series: dict[int, list[Series]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.factor = scales(self.story)

    @property
    def trace(self) -> Trace:
        """The trace itself."""
        return self.story.trace

    def lines(self) -> Iterator[tuple[Place, list[Window]]]:
        """Windows by the line of their update."""
        yield from self.story.by_line()

    def series(self, window: Window) -> list[Series]:
        """Its terms with their weights."""
        found = self._series.get(id(window))
        if found is None:
            found = self._series[id(window)] = series(self.story, window, self.factor)
        return found

    @property
    def steps(self) -> list[Event]:
        """Every step of an optimizer."""
        if self._steps is None:
            self._steps = [event for event in self.trace.events if event.kind == "step"]
        return self._steps

    def arrived(self, param: int) -> list[Event]:
        """The backwards that brought a parameter a gradient."""
        if self._arrived is None:
            found: dict[int, list[Event]] = {}
            for event in self.trace.events:
                if event.kind == "backward" and not event.get("nested"):
                    for index in event.get("arrived", ()):
                        found.setdefault(index, []).append(event)
            self._arrived = found
        return self._arrived.get(param, [])

    def plain(self, windows: list[Window]) -> list[tuple[Window, list[Series]]]:
        """Windows whose weights are those of their graphs."""
        found = []
        for window in windows:
            terms = self.series(window)
            if window.whole and terms and self.handled(window) is None and not window.stale:
                found.append((window, terms))
        return found

    def one_line(self, window: Window) -> bool:
        """Whether all of its backwards are one line's."""
        return len({place_of(event) for event in self.story.micros(window)}) == 1

    def handled(self, window: Window) -> Event | None:
        """Where the script changed the gradients itself."""
        return handled(window)

    def updates(self, windows: list[Window]) -> int:
        """How many updates of the run were like these."""
        return self.story.updates(windows)

    def gated(self, window: Window, line: Place) -> bool:
        """Whether the step is known to stand under a condition in the backwards' loop."""
        micros = self.story.micros(window)
        return bool(micros) and gated(line, place_of(micros[-1])) is True

    def gate(self, window: Window) -> Place | None:
        """The condition that a window's update stands under, where it is mended."""
        micros = self.story.micros(window)
        return gate(window.line, place_of(micros[-1])) if micros else None

    def are_micros(self, window: Window, line: Place | None) -> str:
        """How the passes of an update are known to be micro-batches; empty if they are not.

        Several passes over one batch, whose losses are meant to be added, look the same in a
        trace. Micro-batches are passes between which a loader gave data, whose number a condition
        tests, or whose loss the same line divides elsewhere.
        """
        micros = self.story.micros(window)
        place = place_of(micros[-1])
        if len(window.of("fetch")) >= len(micros):
            return "fetched"
        if gated(line, place) is True:
            return "gated"
        if line is not None and (place is None or place.path != line.path):
            tests = [node for node in above_of(line) if isinstance(node, ast.If)]
            if tests and counts_to(Place(line.path, tests[0].lineno, "")) == len(micros):
                return "counted"  # a backward that a library calls, as in another thread
        mine = self.series(window)
        for other in self.story.windows:
            count = len(other.fresh)
            if other is window or count != len(window.fresh) or not mine:
                continue
            events, terms = self.story.micros(other), self.series(other)
            if not events or place_of(events[-1]) != place or not terms or not terms[0].known:
                continue
            pairs = zip(mine[0].weights, terms[0].weights, strict=True)
            if all(close(one, count * divided) for one, divided in pairs):
                return "divided elsewhere"
        return "fetched" if microbatches(place) else ""
