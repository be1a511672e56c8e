"""One sentence on the whole run."""

from __future__ import annotations

from collections import Counter

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import plural
from gradaccum.doctor.checks.story import Window
from gradaccum.doctor.checks.weights import Series
from gradaccum.records.finding import Finding

__all__ = ["updated", "verdict"]

_TERMS = 3
"""Loss terms that a verdict names."""
_FEW = 8
"""Values of a sum that are perhaps losses themselves."""


def verdict(context: Context, found: list[Finding]) -> str:
    """What the loop did, and how many faults it has."""
    errors = sum(one.severity == "error" for one in found)
    warnings = sum(one.severity == "warning" for one in found)
    did = _did(context) + _unseen(context.trace.trouble)
    if errors or warnings:
        worst = found[0]
        counts = [plural(errors, "error")] if errors else []
        counts += [plural(warnings, "warning")] if warnings else []
        return f"{' and '.join(counts)}; first {worst.title} (line {worst.line}). {did}"
    if found:
        notes = f"{plural(len(found), 'note')}: {found[0].title} (line {found[0].line})"
        return f"No fault found, {notes}. {did}"
    return f"No fault found. {did}"


def _unseen(trouble: str) -> str:
    """What the doctor could not listen to, or where its own code failed."""
    return f" Not everything was seen ({' '.join(trouble.split())[:200]})." if trouble else ""


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
        if _set_by_hand(context):
            return f"{plural(steps, 'step')} on gradients that the script set itself."
        return f"{plural(steps, 'step')}, none with a gradient: no backward made any."
    return f"{_updates(steps, own)}{_cleared(context)}{_weights(context, own)}."


def _set_by_hand(context: Context) -> bool:
    """Whether the script has put gradients into what optimizers own, of its own computing."""
    owned = {p for o in context.trace.optimizers if o.steps for p in o.params}
    return any(
        event.kind == "write"
        and event.get("target") == "grad"
        and owned & set(event.get("params", ()))
        for event in context.trace.events
    )


def _cleared(context: Context) -> str:
    """Whether gradients were cleared once an update."""
    windows = [window for window in context.story.windows if window.whole]
    if len(windows) < 2 or any(len(window.fresh) != 1 for window in windows):
        return ""
    zeros = sum(any(event.get("lost") for event in w.of("zero")) for w in windows)
    return "; gradients were zeroed in each" if zeros >= len(windows) - 1 else ""


def updated(context: Context) -> int:
    """Updates of the whole run: an optimizer's steps, or where none steps those by hand."""
    steps = sum(o.steps for o in context.trace.optimizers)
    hands = [window for window in context.story.windows if window.optimizer is None]
    return steps or (_hand_updates(context, hands) if hands else 0)


def _hand_updates(context: Context, hands: list[Window]) -> int:
    if context.story.whole:
        return len(hands)
    sizes = {len(window.fresh) for window in hands[:-1]}
    if len(sizes) == 1 and 0 not in sizes:
        return max(len(hands), context.trace.totals.get("backward", 0) // sizes.pop())
    return max(len(hands), context.story.counted(hands))


def _through(hands: list[Window]) -> str:
    step = hands[0].step
    if step is None:
        return ""
    place = step.user or step.at
    where = "" if place is None else f" (line {place.line})"
    data = str(step.get("how", "")).startswith("data.")
    return where + (", through `.data`, which is not wrong in what it computes" if data else "")


def _updates(count: int, windows: list[Window]) -> str:
    old = sum(bool(window.stale) for window in windows if window.optimizer is not None)
    if old > 1 and 2 * old >= len(windows):
        return f"{plural(count, 'update')}, nearly all of gradients that an earlier one had used"
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
    """The weight of each term of the loss, over all windows that were looked at."""
    seen: dict[str, list[Series]] = {}
    if all(len(window.fresh) < 2 for window in windows):
        return ""
    for window in windows:
        if not window.fresh or context.handled(window):
            continue
        for one in context.series(window):
            if not one.known or not any(one.weights):
                return ""  # what the others weigh is not the whole
            seen.setdefault(one.path, []).append(one)
    if not seen:
        return ""
    if len(seen) == 1:
        return f"; each micro-batch weighed {_range(next(iter(seen.values())))}"
    terms = [f"`{all_of[0].terms[0].name}` {_range(all_of)}" for all_of in seen.values()]
    more = f", and {len(terms) - _TERMS} more terms" if len(terms) > _TERMS else ""
    return f"; in each micro-batch {', '.join(terms[:_TERMS])}{more}"


def _range(all_of: list[Series]) -> str:
    """From the smallest to the largest weight, and of a sum how much each of its values has."""
    weights = [abs(weight) for one in all_of for weight in one.weights]
    low, high = f"{min(weights):.3g}", f"{max(weights):.3g}"
    said = low if low == high else f"{low} to {high}"
    term = all_of[0].terms[0]
    if low != high:
        return said
    if term.reduction == "sum" and term.each and term.count and term.count <= _FEW:
        value = abs(term.each / all_of[0].scales[0])
        said += f" (a sum of {term.count:g}, {value:.3g} each)"
    return said
