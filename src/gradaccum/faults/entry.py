"""The form of one entry of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PRELUDE", "Fault", "Severity"]

Severity = Literal["error", "warning", "note"]

PRELUDE = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(1, 1, bias=False)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = [(torch.ones(2, 1), torch.full((2, 1), t)) for t in (1.0, 2.0, 3.0, 4.0)]
every = 4
"""
"""What every example loop starts from: four micro-batches whose whole-batch update is 5.0."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what the linter, the doctor, `gradaccum explain` and the docs say of it."""

    code: str
    title: str
    severity: Severity
    """`error`: the update is wrong; `warning`: probably wrong, or wasteful; `note`: advice."""
    what: str
    why: str
    """Why it hurts; `{bad}` and `{good}` are the figures that the two loops print."""
    mend: str
    bad: str
    good: str
    figures: tuple[float, float]
    """What `bad` and `good` leave in `figure`, checked by running them."""
    static: bool = True
    """Whether the linter can see it."""
    usual: bool = True
    """Whether the linter reports it without being asked by `--select`."""
    prelude: str = PRELUDE
    runtime: bool = True
    """Whether the doctor can see it in a run; its detectors are in `gradaccum.doctor.checks`."""

    @property
    def reason(self) -> str:
        """Why it hurts, with the figures filled in."""
        bad, good = self.figures
        return self.why.format(bad=f"{bad:g}", good=f"{good:g}")

    @property
    def name(self) -> str:
        """File name of its docs page, without the ending."""
        return self.code.lower()
