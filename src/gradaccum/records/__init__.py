"""What passes between the rooms: frozen records that know nothing of who makes or reads them."""

from __future__ import annotations

from gradaccum.records.finding import Evidence as Evidence
from gradaccum.records.finding import Finding as Finding
from gradaccum.records.fit import Fit as Fit
from gradaccum.records.fit import FitRow as FitRow
from gradaccum.records.memory import MemoryModel as MemoryModel
from gradaccum.records.memory import Phase as Phase
from gradaccum.records.plan import Plan as Plan
from gradaccum.records.plan import PlannedMicrobatch as PlannedMicrobatch
from gradaccum.records.report import Cause as Cause
from gradaccum.records.report import Report as Report
from gradaccum.records.report import SplitSeen as SplitSeen
from gradaccum.records.update import Update as Update

__all__ = [
    "Cause",
    "Evidence",
    "Finding",
    "Fit",
    "FitRow",
    "MemoryModel",
    "Phase",
    "Plan",
    "PlannedMicrobatch",
    "Report",
    "SplitSeen",
    "Update",
]
