"""A trace told as windows: what lay between two updates of the same parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gradaccum.doctor.reading import Reading, Term
from gradaccum.doctor.trace.model import Event, Place, Trace

__all__ = ["END", "Group", "Story", "Window", "adds", "inside", "place_of", "tell", "usual"]


END = 1 << 60
"""Order of what stood at the end."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters whose gradients held the same backwards."""

    params: frozenset[int]
    backwards: tuple[int, ...]
    held: int


@dataclass(slots=True)
class Window:
    """What one update used, and what happened since the one before."""

    optimizer: int | None
    """`None` where parameters were changed by hand, or nothing was."""
    step: Event | None
    """The update; `None` for gradients that were cleared or left without one."""
    events: list[Event]
    """Since the last update of the same optimizer."""
    whole: bool
    """Whether all of these events were kept."""
    used: list[Group] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    """Backwards in it that no earlier update of this optimizer had used."""
    stale: list[int] = field(default_factory=list)
    """Those that one had."""
    wasted: list[tuple[Event, tuple[int, ...]]] = field(default_factory=list)
    """Clearings, each with the backwards whose gradients of this optimizer it threw away."""
    order: int = 0

    @property
    def line(self) -> Place | None:
        """Where the update is made."""
        return None if self.step is None else place_of(self.step)

    def of(self, *kinds: str) -> list[Event]:
        """Its events of some kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def params(self) -> frozenset[int]:
        """Parameters that it had gradients for."""
        return frozenset().union(*(group.params for group in self.used))


@dataclass(slots=True)
class Story:
    """All windows of a run, and what the rules ask of the whole."""

    trace: Trace
    windows: list[Window]
    """Of optimizers and by hand, in the order of their updates."""
    open: list[Window]
    """Gradients that were never used: cleared, or left at the end."""
    backwards: dict[int, Event]
    readings: dict[int, Reading]
    used: dict[int, set[int | None]]
    """For each backward the optimizers whose updates used it; `None` is by hand."""
    whole: bool = True
    """Whether every event of the run was kept."""

    def by_line(self) -> Iterator[tuple[Place, list[Window]]]:
        """Windows by optimizer and line of the update."""
        found: dict[tuple[int | None, Place], list[Window]] = {}
        for window in self.windows:
            if window.line is not None:
                found.setdefault((window.optimizer, window.line), []).append(window)
        for (_, line), windows in found.items():
            yield line, windows

    def micros(self, window: Window) -> list[Event]:
        """The backwards of a window that no update had used before."""
        return [self.backwards[b] for b in window.fresh if b in self.backwards]

    def readings_of(self, event: Event) -> tuple[Term, ...]:
        """The terms of a backward's loss, as far as they were read."""
        reading = self.readings.get(event.get("b", -1))
        return () if reading is None else reading.terms

    def updates(self, windows: list[Window]) -> int:
        """How many updates the run had that were like these."""
        steps = {window.optimizer for window in windows}
        if self.whole or len(steps) != 1 or None in steps:
            return len(windows)
        return max(len(windows), self.counted(windows))

    def counted(self, windows: list[Window]) -> int:
        """Segments of the whole run with the shape of one of these."""
        places = {window.step.n for window in windows if window.step is not None}
        shapes = {
            segment.signature
            for segment in self.trace.segments
            if segment.events and segment.events[-1].n in places
        }
        return sum(row["count"] for row in self.trace.tally if row["signature"] in shapes)


def place_of(event: Event) -> Place | None:
    """The line that a finding about an event points at."""
    return event.user or event.at


def usual(windows: list[Window]) -> int:
    """The most frequent number of micro-batches in a window."""
    counts = Counter(len(window.fresh) for window in windows)
    return max(counts, key=lambda n: (counts[n], n)) if counts else 0


@dataclass(slots=True)
class _Teller:
    """Follows which backwards stand in which parameter's gradient."""

    trace: Trace
    story: Story
    holding: dict[int, tuple[int, ...]] = field(default_factory=dict)
    since: dict[int | None, list[Event]] = field(default_factory=dict)
    broken: set[int | None] = field(default_factory=set)
    consumed: dict[int | None, set[int]] = field(default_factory=dict)
    pending: list[Event] = field(default_factory=list)
    """Writes by hand that may make up one update."""
    last: Event | None = None

    def tell(self) -> None:
        expected = 0
        owned = [o.index for o in self.trace.optimizers]
        for segment in self.trace.segments:
            if segment.index != expected:
                self.by_hand()
                self.story.whole = False
                self.broken.update([*owned, None])
                self.holding.clear()
                for events in self.since.values():
                    events.clear()
            expected = segment.index + 1
            for event in segment.events:
                self.take(event)
        self.by_hand()
        if not self.trace.tally and not self.trace.complete:
            self.story.whole = False
        self.leftover()

    def take(self, event: Event) -> None:
        if self.pending and event.kind in ("backward", "step", "grad"):
            self.by_hand()
        for optimizer in self.trace.optimizers:
            self.since.setdefault(optimizer.index, []).append(event)
        self.since.setdefault(None, []).append(event)
        if event.kind == "backward":
            self.story.backwards[event.get("b")] = event
            ledger = event.get("ledger")
            if ledger:
                self.story.readings[event.get("b")] = Reading.from_dict(ledger)
            for param in event.get("arrived", ()):
                self.holding[param] = (*self.holding.get(param, ()), event.get("b"))
        elif event.kind == "zero":
            self.cleared(event)
        elif event.kind == "step":
            self.stepped(event)
        elif event.kind == "write" and event.get("target") == "param" and adds(event):
            if not self.seen_late(event):
                self.pending.append(event)
        self.last = event

    def seen_late(self, event: Event) -> bool:
        """An update without a line of its own: it used what the clearing seen with it took."""
        clearing = self.last
        if event.at is not None or clearing is None or clearing.kind != "zero":
            return False
        used = [_group(raw) for raw in clearing.get("lost", ())]
        if not used:
            return False
        self.story.open = [w for w in self.story.open if w.order != clearing.n]
        self.update(None, event, used)
        return True

    def groups(self, params: Iterable[int]) -> list[Group]:
        found: dict[tuple[int, ...], set[int]] = {}
        for param in params:
            held = self.holding.get(param, ())
            if held:
                found.setdefault(held, set()).add(param)
        return [Group(frozenset(p), held, len(held)) for held, p in found.items()]

    def cleared(self, event: Event) -> None:
        if self.pending and event.get("lost"):
            self.by_hand()
        for param in event.get("cleared", ()):
            self.holding.pop(param, None)
        lost = [_group(raw) for raw in event.get("lost", ())]
        for group in _largest(lost):
            if not any(b in self.story.used for b in group.backwards):
                self.unused(group, event.n)

    def stepped(self, event: Event) -> None:
        optimizer = event.get("optimizer")
        self.update(optimizer, event, [self.full(_group(raw)) for raw in event.get("used", ())])

    def full(self, group: Group) -> Group:
        """A group of which the trace names only the last backwards, with all that were followed."""
        if group.held <= len(group.backwards):
            return group
        followed = self.holding.get(min(group.params), ())
        return Group(group.params, followed, group.held) if len(followed) == group.held else group

    def update(self, optimizer: int | None, event: Event, used: list[Group]) -> None:
        events = self.since.get(optimizer, [])
        if optimizer is None and self.same_pass(event, used, events):
            return
        window = Window(optimizer, event, events[:], optimizer not in self.broken, used)
        window.order = event.n
        window.whole = window.whole and all(one.held == len(one.backwards) for one in used)
        self.broken.discard(optimizer)
        self.since[optimizer] = []
        known = self.consumed.setdefault(optimizer, set())
        numbers = sorted({b for group in used for b in group.backwards})
        window.fresh = [b for b in numbers if b not in known]
        window.stale = [b for b in numbers if b in known]
        known.update(numbers)
        for number in numbers:
            self.story.used.setdefault(number, set()).add(optimizer)
        self.story.windows.append(window)

    def same_pass(self, event: Event, used: list[Group], events: list[Event]) -> bool:
        """Add to the last update by hand what the same line does for other parameters."""
        last = self.story.windows[-1] if self.story.windows else None
        if last is None or last.optimizer is not None or last.line != place_of(event):
            return False
        params = frozenset().union(*(group.params for group in used))
        if params & last.params or any(e.kind == "backward" for e in events):
            return False
        last.used += used
        last.step, last.order = event, event.n
        last.events += events
        self.since[None] = []
        numbers = {b for group in used for b in group.backwards} - {*last.fresh, *last.stale}
        known = self.consumed.setdefault(None, set())
        last.fresh = sorted([*last.fresh, *(numbers - known)])
        last.stale = sorted([*last.stale, *(numbers & known)])
        known.update(numbers)
        for number in numbers:
            self.story.used.setdefault(number, set()).add(None)
        return True

    def by_hand(self) -> None:
        """An update that the script made itself: parameters written after gradients came."""
        writes, self.pending = self.pending, []
        params = [p for event in writes for p in event.get("params", ())]
        used = self.groups(params)
        if used and not any(inside(event, self.story) for event in writes):
            self.update(None, writes[-1], used)

    def leftover(self) -> None:
        """Gradients that stood at the end and that no update had used."""
        found: dict[tuple[tuple[int, ...], int], set[int]] = {}
        for param in self.trace.params:
            if param.held:
                found.setdefault((param.backwards, param.held), set()).add(param.index)
        groups = [
            self.full(_group({"params": list(p), "backwards": list(numbers), "held": held}))
            for (numbers, held), p in found.items()
        ]
        for group in _largest(groups):
            if any(b not in self.story.used for b in group.backwards):
                self.unused(group, END)

    def unused(self, group: Group, order: int) -> None:
        """Gradients that no update has used."""
        window = Window(None, None, self.since.get(None, [])[:], None not in self.broken)
        window.used = [group]
        window.whole = window.whole and group.held == len(group.backwards)
        window.fresh = [b for b in group.backwards if b not in self.story.used]
        window.stale = [b for b in group.backwards if b in self.story.used]
        window.order = order
        self.story.open.append(window)


def _largest(groups: list[Group]) -> list[Group]:
    """Those whose backwards are not all among another's."""
    kept: list[Group] = []
    for group in sorted(groups, key=lambda one: -len(one.backwards)):
        if not any(set(group.backwards) <= set(other.backwards) for other in kept):
            kept.append(group)
    return kept


_SCALES = {"mul", "div", "truediv", "clamp", "clip", "renorm", "copy", "zero", "fill", "round"}


def adds(event: Event) -> bool:
    """Whether a write can have used a gradient: is no projection, decay or loading of values."""
    how = str(event.get("how", "")).removeprefix("data.").strip("_").removeprefix("i")
    return how.partition("_")[0] not in _SCALES


def inside(event: Event, story: Story) -> bool:
    """Whether something happened while a backward ran: in a hook."""
    return any(backward.start < event.start < backward.end for backward in story.backwards.values())


def _group(raw: dict[str, object]) -> Group:
    params, backwards, held = raw["params"], raw["backwards"], raw["held"]
    assert isinstance(params, list)
    assert isinstance(backwards, list)
    assert isinstance(held, int)
    known = tuple(number for number in backwards if number >= 0)  # -1 stood there before the run
    return Group(frozenset(params), known, held - (len(backwards) - len(known)))


def _waste(story: Story) -> None:
    """Which clearings threw away what no update had used, or ever will."""
    owners = {o.index: frozenset(o.params) for o in story.trace.optimizers}
    for window in story.windows:
        if window.optimizer is None:
            continue
        mine = owners.get(window.optimizer, frozenset())
        for event in window.of("zero"):
            lost = {
                b
                for raw in event.get("lost", ())
                for b in _group(raw).backwards
                if _group(raw).params & mine and b not in story.used and b >= 0
            }
            if lost:
                window.wasted.append((event, tuple(sorted(lost))))


def tell(trace: Trace) -> Story:
    """The windows of a trace."""
    story = Story(trace, [], [], {}, {}, {})
    _Teller(trace, story).tell()
    _waste(story)
    return story
