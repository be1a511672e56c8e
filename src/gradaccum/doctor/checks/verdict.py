"""One sentence on the whole run."""

from __future__ import annotations

from collections import Counter

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import plural
from gradaccum.doctor.checks.story import Window
from gradaccum.records.finding import Finding

__all__ = ["verdict"]


def verdict(context: Context, found: list[Finding]) -> str:
    """What the loop did, and how many faults it has."""
    errors = sum(one.severity == "error" for one in found)
    warnings = sum(one.severity == "warning" for one in found)
    did = _did(context)
    if errors or warnings:
        worst = found[0]
        counts = [plural(errors, "error")] if errors else []
        counts += [plural(warnings, "warning")] if warnings else []
        return f"{' and '.join(counts)}; first {worst.title} (line {worst.line}). {did}"
    if found:
        notes = f"{plural(len(found), 'note')}: {found[0].title} (line {found[0].line})"
        return f"No fault found, {notes}. {did}"
    return f"No fault found. {did}"


def _did(context: Context) -> str:
    story, trace = context.story, context.trace
    steps = sum(o.steps for o in trace.optimizers)
    hands = [window for window in story.windows if window.optimizer is None]
    backwards = trace.totals.get("backward", 0)
    if not backwards and not steps:
        return "No backward and no step was seen."
    if not steps and hands:
        count = _hand_updates(context, hands)
        made = f"made outside any optimizer{_through(hands)}"
        return f"{_updates(count, hands)}{_cleared(context)}; {made}."
    if not steps:
        clears = "cleared and " if trace.totals.get("zero") else "never cleared and "
        return f"{plural(backwards, 'backward')} and no update: gradients were {clears}never used."
    own = [window for window in story.windows if window.optimizer is not None]
    if not any(window.used for window in own) and not backwards:
        return f"{plural(steps, 'step')}, none with a gradient: no backward made any."
    return f"{_updates(steps, own)}{_cleared(context)}{_weights(context, own)}."


def _cleared(context: Context) -> str:
    """Whether gradients were cleared once an update."""
    windows = [window for window in context.story.windows if window.whole]
    if len(windows) < 2 or any(len(window.fresh) != 1 for window in windows):
        return ""
    zeros = sum(any(event.get("lost") for event in w.of("zero")) for w in windows)
    return "; gradients were zeroed in each" if zeros >= len(windows) - 1 else ""


def _hand_updates(context: Context, hands: list[Window]) -> int:
    return len(hands) if context.story.whole else max(len(hands), context.story.counted(hands))


def _through(hands: list[Window]) -> str:
    step = hands[0].step
    if step is None:
        return ""
    place = step.user or step.at
    where = "" if place is None else f" (line {place.line})"
    data = str(step.get("how", "")).startswith("data.")
    return where + (", through `.data`, which is not wrong in what it computes" if data else "")


def _updates(count: int, windows: list[Window]) -> str:
    sizes = Counter(len(window.fresh) for window in windows if window.fresh)
    if not sizes:
        return plural(count, "update")
    if len(sizes) == 1:
        size = next(iter(sizes))
        each = " each" if count > 1 else ""
        if size == 1:
            return f"{plural(count, 'update')} of one micro-batch{each}: nothing was accumulated"
        return f"{plural(count, 'update')} of {size} micro-batches{each}"
    low, high = min(sizes), max(sizes)
    return f"{plural(count, 'update')} of {low} to {high} micro-batches"


def _weights(context: Context, windows: list[Window]) -> str:
    for window in windows:
        terms = [one for one in context.series(window) if one.known]
        if len(window.fresh) >= 2 and terms and not context.handled(window):
            heaviest = max(terms, key=lambda one: one.total)
            values = {f"{abs(weight):.3g}" for weight in heaviest.weights}
            if len(values) == 1:
                return f"; each micro-batch weighed {values.pop()}"
    return ""
