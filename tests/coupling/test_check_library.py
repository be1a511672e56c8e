"""Models of a library, with their own losses."""

from __future__ import annotations

import pytest

import gradaccum as ga

pytest.importorskip("transformers")

from library import LIBRARY
from zoo import Known

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("known", LIBRARY.values(), ids=LIBRARY)
def test_the_verdict_and_the_causes_are_the_known_ones(known: Known) -> None:
    report = ga.check(known.model(), known.loss, known.batch(), **known.options)

    assert sorted(cause.kind for cause in report.causes) == sorted(known.causes), str(report)
    assert report.equal is (not known.causes)
    assert set(known.where) <= {name for cause in report.causes for name in cause.where}
    assert report.dtype == known.dtype
    assert report.bound < (1e-12 if known.dtype == "float64" else 1e-4)
