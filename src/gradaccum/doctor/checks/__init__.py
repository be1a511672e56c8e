"""What a trace gives away: findings, the verdict, and the weight of each loss term."""

from __future__ import annotations

from gradaccum.doctor.checks.judge import DETECTORS as DETECTORS
from gradaccum.doctor.checks.judge import Judgement as Judgement
from gradaccum.doctor.checks.judge import judge as judge

__all__ = ["DETECTORS", "Judgement", "judge"]
