"""What only several ranks' reports show together: means over unequal counts."""

from __future__ import annotations

from collections.abc import Sequence

from gradaccum.faults import find
from gradaccum.records import Evidence, Finding
from gradaccum.records.diagnosis import Diagnosis, MicrobatchSeen, WindowSeen

__all__ = ["uneven"]


def uneven(diagnoses: Sequence[Diagnosis]) -> list[Finding]:
    """GA203, as a note: ranks average their means, which are over unequal numbers of values.

    DDP takes the mean of the ranks' gradients. Where each divides by its own count, a value of the
    rank that has few of them weighs more than one of the others.
    """
    for windows in zip(*(one.windows for one in diagnoses), strict=False):
        told = [_mean(window) for window in windows]
        if len(told) < 2 or any(one is None for one in told):
            continue
        micros = [micro for micro, _, _ in filter(None, told)]
        counts = [count for _, count, _ in filter(None, told)]
        weights = [weight for _, _, weight in filter(None, told)]
        same = all(abs(one - weights[0]) <= 4e-3 * abs(weights[0]) for one in weights)
        if not same or max(counts) <= 1.01 * min(counts):
            continue
        fault = find("GA203")
        if fault is None:
            continue
        numbers = ", ".join(f"{count:g}" for count in counts[:8])
        return [
            Finding(
                fault.code, "note", micros[0].path, micros[0].line, 1, fault.title,
                f"the ranks' means are over {numbers} values and weigh the same when DDP averages "
                f"them: a value of one rank weighs {max(counts) / min(counts):.3g} times as much "
                "as one of another",
                tuple(Evidence(one.path, one.line, "another rank's mean") for one in micros[1:2]
                      if (one.path, one.line) != (micros[0].path, micros[0].line)),
                "Divide each rank's sum by the count of all ranks, and multiply by their number: "
                "`loss = sum * world_size / all_reduced_count`.",
            )
        ]  # fmt: skip
    return []


def _mean(window: WindowSeen) -> tuple[MicrobatchSeen, float, float] | None:
    """The last micro-batch of an update that ranks share, its values and their weight in all."""
    if not window.stepped or not any(event.kind == "ddp_forward" for event in window.events):
        return None
    terms = [term for micro in window.microbatches for term in micro.terms]
    if not terms or any(len(micro.terms) != 1 for micro in window.microbatches):
        return None
    counts = [term.count for term in terms if term.count]
    weights = [term.weight for term in terms if term.weight]
    if len(counts) != len(terms) or len(weights) != len(terms):
        return None
    return window.microbatches[-1], sum(counts), sum(weights)
