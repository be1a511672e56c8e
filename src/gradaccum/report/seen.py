"""What was seen of a run: how often something happened, and what its windows are called."""

from __future__ import annotations

from gradaccum.records.diagnosis import Diagnosis, WindowSeen

__all__ = ["happened", "updates", "window_name"]


def happened(diagnosis: Diagnosis, kind: str) -> int:
    """Events of a kind in the whole run; at least those in the windows that were looked at.

    A run that was killed may have left no totals, or old ones.
    """
    looked = sum(event.kind == kind for window in diagnosis.windows for event in window.events)
    return max(diagnosis.totals.get(kind, 0), looked)


def updates(diagnosis: Diagnosis) -> int:
    """Updates as the verdict counts them; older reports do not say."""
    if "update" in diagnosis.totals:
        return diagnosis.totals["update"]
    return happened(diagnosis, "step") + happened(diagnosis, "write")


def window_name(window: WindowSeen, last: bool) -> str:
    """What a window is called.

    Args:
        window: to be named.
        last: whether it is the last that was looked at; one before it that has no step was not
            recorded to its end.
    """
    if window.stepped:
        return f"update {window.index}"
    return f"window {window.index}, {'no step' if last else 'seen in part'}"
