"""`check` finds what is known about each model and loss, and nothing else."""

from __future__ import annotations

import pytest
from zoo import OWN, Known

import gradaccum as ga


@pytest.mark.parametrize("known", OWN.values(), ids=OWN)
def test_the_verdict_and_the_causes_are_the_known_ones(known: Known) -> None:
    report = ga.check(known.model(), known.loss, known.batch(), **known.options)

    assert sorted(cause.kind for cause in report.causes) == sorted(known.causes), str(report)
    assert report.equal is (not known.causes)
    assert set(known.where) <= {name for cause in report.causes for name in cause.where}
    assert report.dtype == "float64"
    assert report.bound < 1e-12
