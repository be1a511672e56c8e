"""`Plan` as a value: JSON there and back, the table, and what is no plan."""

import json
import pickle
import re
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.errors import PlanError
from gradaccum.planner.pack import plan
from gradaccum.records import Plan


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=30))
def test_json_and_pickle_bring_it_back(lengths):
    found = plan(lengths, microbatches=4)
    assert Plan.from_json(found.to_json()) == found
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found) == hash(Plan.from_json(found.to_json()))


def test_json_has_the_totals_for_other_readers():
    found = plan([7, 100, 9, 90, 8], budget=200, overhead=10)
    assert json.loads(found.to_json()) == {
        "version": 1,
        "budget": 200,
        "overhead": 10,
        "samples": 5,
        "real": 214,
        "padded": 227,
        "waste": 227 / 214,
        "microbatches": [
            {"indices": [1, 3], "width": 100, "real": 190},
            {"indices": [0, 2, 4], "width": 9, "real": 24},
        ],
    }


def test_it_is_frozen():
    with pytest.raises(FrozenInstanceError):
        plan([1], budget=1).budget = 2  # pyrefly: ignore


def test_the_table():
    assert str(plan([7, 100, 9, 90, 8], budget=2000, overhead=10)) == (
        "5 samples in 2 micro-batches: 214 elements, 227 padded (1.06 of the real)\n"
        "budget 2,000, overhead 10 for each micro-batch\n"
        "\n"
        "     #   samples     width      padded     padding\n"
        "     0         2       100         200          10\n"
        "     1         3         9          27           3"
    )


def test_a_long_table_is_cut():
    lines = str(plan([1000] * 100, budget=1000)).splitlines()
    assert lines[-1] == "       ... and 76 more"
    assert len(lines) == 4 + 24 + 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "ValueError: version 2"),
        ({"budget": 1.5}, "TypeError: 1.5 is not a whole number"),
        ({"microbatches": []}, "ValueError: no micro-batches"),
        ({"microbatches": [{"indices": [0], "width": 3}]}, "KeyError: 'real'"),
        ({"microbatches": [{"indices": 7, "width": 3, "real": 3}]}, "TypeError:"),
        ({"microbatches": [{"indices": [True], "width": 3, "real": 3}]}, "TypeError: True"),
    ],
)
def test_what_is_no_plan(change, text):
    broken = json.dumps({**json.loads(plan([3], budget=3).to_json()), **change})
    with pytest.raises(PlanError, match=re.escape(text)) as caught:
        Plan.from_json(broken)
    assert caught.value.slug == "plan-json"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}"])
def test_text_that_is_no_json_object_of_ours(text):
    with pytest.raises(PlanError, match=re.escape("not a plan that this version can read")):
        Plan.from_json(text)
