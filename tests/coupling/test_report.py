"""The record that `check` returns: text, JSON, and nothing lost between them."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradaccum as ga
from gradaccum import errors
from gradaccum.records import Cause, SplitSeen
from refusals import refused

texts = st.text(max_size=20)
numbers = st.floats(allow_nan=False)
splits = st.builds(
    SplitSeen,
    name=texts,
    sizes=st.lists(st.integers(1, 99), max_size=9).map(tuple),
    distance=numbers,
    counts=st.lists(numbers, max_size=9).map(tuple),
    error=texts,
)
causes = st.builds(
    Cause,
    kind=texts,
    title=texts,
    evidence=st.lists(texts, max_size=3).map(tuple),
    mend=texts,
    where=st.lists(texts, max_size=3).map(tuple),
    fault=texts,
)
reports = st.builds(
    ga.Report,
    equal=st.booleans(),
    verdict=texts,
    distance=numbers,
    bound=numbers,
    dtype=texts,
    samples=st.integers(2, 99),
    loss=numbers,
    splits=st.lists(splits, max_size=3).map(tuple),
    causes=st.lists(causes, max_size=3).map(tuple),
    notes=st.lists(texts, max_size=3).map(tuple),
)


@given(reports)
def test_it_survives_json_and_the_json_is_strict(report: ga.Report) -> None:
    text = report.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert ga.Report.from_json(text) == report


@given(reports)
def test_its_text_begins_with_the_verdict_and_has_everything_in_it(report: ga.Report) -> None:
    text = str(report)
    assert text.startswith(report.verdict)
    for cause in report.causes:
        assert all(part in text for part in (cause.title, *cause.evidence, cause.mend))
    assert all(note in text for note in report.notes)


def example(**changes: object) -> ga.Report:
    values = {
        "equal": True,
        "verdict": "equal: well",
        "distance": 0.0,
        "bound": 1e-14,
        "dtype": "float64",
        "samples": 8,
        "loss": math.nan,
    }
    return ga.Report(**{**values, **changes})  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_survives_too() -> None:
    again = ga.Report.from_json(example().to_json())
    assert math.isnan(again.loss)


def test_it_is_true_where_it_is_equal() -> None:
    assert example()
    assert not example(equal=False)
    assert example().assert_equal() == example() or math.isnan(example().loss)


def test_a_split_that_failed_has_no_distance() -> None:
    failed = SplitSeen("in 2", (4, 4), math.inf, (), "ValueError: no")
    assert "failed" in str(example(splits=(failed,)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1}', "null"])
def test_what_is_no_report_is_refused(text: str) -> None:
    refused(
        lambda: ga.Report.from_json(text),
        errors.InputError,
        "check-json",
        "not a report that this version can read",
    )
