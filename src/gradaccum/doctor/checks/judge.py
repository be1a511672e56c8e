"""From a trace to a judgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradaccum.doctor.checks import (
    rules_absent,
    rules_clipping,
    rules_gradients,
    rules_graphs,
    rules_hand,
    rules_kept,
    rules_lengths,
    rules_lost,
    rules_objectives,
    rules_piling,
    rules_scaling,
    rules_schedules,
    rules_stepping,
    rules_unseen,
    rules_values,
    rules_zeroing,
)
from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, finding
from gradaccum.doctor.checks.story import tell
from gradaccum.doctor.checks.verdict import updated, verdict
from gradaccum.doctor.checks.weights import chart
from gradaccum.doctor.trace.model import Trace
from gradaccum.records.diagnosis import TermSeen
from gradaccum.records.finding import Finding

__all__ = ["DETECTORS", "Judgement", "judge"]

RULES = (
    rules_stepping.saved_in_mid_window,
    rules_lost.rebound,
    *rules_piling.FIRST,
    *rules_lost.RULES,
    *rules_piling.RULES,
    *rules_objectives.RULES,
    *rules_absent.RULES,
    *rules_clipping.RULES,
    *rules_kept.RULES,
    *rules_graphs.RULES,
    *rules_zeroing.RULES,
    *rules_scaling.RULES,
    *rules_lengths.RULES,
    *rules_schedules.RULES,
    *rules_stepping.RULES,
    *rules_hand.RULES,
    *rules_values.RULES,
    *rules_gradients.RULES,
    *rules_unseen.RULES,
    *rules_lost.NOTES,
)
"""In an order in which what explains others comes first."""

DETECTORS = frozenset(
    f"GA{number}"
    for number in (
        *range(101, 107), *range(201, 208), *range(301, 310), 311, 312, 315, 316, 317,
        *range(401, 412), 501, 502, 503, 504, 505, 601, 602, 603, 604, 701, 702, 703, 801, 802, 803,
    )
)  # fmt: skip
"""Codes that a run can give away; a test holds each to its bad loop."""

_RANK = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a run's trace shows."""

    verdict: str
    """One sentence."""
    findings: tuple[Finding, ...] = ()
    weights: Mapping[int, tuple[TermSeen, ...]] = field(default_factory=dict)
    """Loss terms by the number of their backward."""
    updates: int = 0
    """How many the run made, as the verdict counts them."""


def judge(trace: Trace) -> Judgement:
    """Find faults in a trace, and say what its loop did."""
    context = Context(tell(trace))
    hits: list[Hit] = []
    for rule in RULES:
        hits += rule(context)
    kept: dict[tuple[str, str, int], Hit] = {}
    for one in hits:
        kept.setdefault((one.code, one.place.path, one.place.line), one)
    found = sorted(map(finding, kept.values()), key=lambda one: (_RANK[one.severity], one.line))
    weights = chart(context.story, context.factor, context.wrong)
    return Judgement(verdict(context, found), tuple(found), weights, updated(context))
