"""The catalogue of faults: one entry each, for the linter, the doctor, `explain` and the docs."""

from __future__ import annotations

from gradaccum.faults import clipping, graphs, ranks, scaling, schedules, stepping, zeroing
from gradaccum.faults.entry import PRELUDE as PRELUDE
from gradaccum.faults.entry import Fault as Fault
from gradaccum.faults.entry import Severity as Severity

__all__ = ["CATALOGUE", "PRELUDE", "Fault", "Severity", "find"]

CATALOGUE: dict[str, Fault] = {
    fault.code: fault
    for fault in sorted(
        (
            fault
            for family in (zeroing, scaling, stepping, schedules, clipping, graphs, ranks)
            for fault in family.FAULTS
        ),
        key=lambda fault: fault.code,
    )
}


def find(code: str) -> Fault | None:
    """The entry of a code, written in either case; `None` if there is none."""
    return CATALOGUE.get(code.strip().upper())
