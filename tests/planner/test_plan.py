"""Laws of `gradaccum.plan`, its numbers on real text, and what it refuses."""

import ast
import random
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradaccum as ga
from gradaccum.errors import PlanError
from gradaccum.planner.pack import default_overhead, plan
from gradaccum.planner.usual import usual_loop

some_lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def shapes(found):
    return Counter((len(micro.indices), micro.width) for micro in found)


@given(some_lengths, st.integers(0, 2000), st.integers(0, 300))
def test_every_sample_once_none_over_the_budget_largest_first(lengths, room, overhead):
    budget = max(lengths) + room
    found = plan(lengths, budget=budget, overhead=overhead)
    assert sorted(i for micro in found for i in micro.indices) == list(range(len(lengths)))
    for micro in found:
        assert micro.width == max(lengths[i] for i in micro.indices)
        assert micro.real == sum(lengths[i] for i in micro.indices)
        assert micro.padded <= budget
        assert list(micro.indices) == sorted(micro.indices)
    sizes = [micro.padded for micro in found]
    assert sizes == sorted(sizes, reverse=True)
    assert found.largest == sizes[0]
    assert found.real == sum(lengths)
    assert found.cost == sum(sizes) + overhead * len(found)


@given(some_lengths, st.randoms(use_true_random=False))
def test_deterministic_and_independent_of_the_order(lengths, generator):
    budget = 2 * max(lengths)
    found = plan(lengths, budget=budget)
    assert plan(list(lengths), budget=budget) == found
    generator.shuffle(lengths)
    assert shapes(plan(lengths, budget=budget)) == shapes(found)


@given(some_lengths, st.integers(0, 500), st.integers(1, 500), st.integers(0, 100))
def test_a_larger_budget_never_costs_more(lengths, room, more, overhead):
    budget = max(lengths) + room
    tight = plan(lengths, budget=budget, overhead=overhead)
    wide = plan(lengths, budget=budget + more, overhead=overhead)
    assert wide.cost <= tight.cost


@given(some_lengths, st.integers(1, 70))
def test_a_number_of_microbatches_alone_keeps_the_memory_of_an_even_split(lengths, most):
    found = plan(lengths, microbatches=most)
    assert len(found) <= most
    assert found.largest <= found.budget == -(-len(lengths) // most) * max(lengths)


def test_equal_lengths_are_split_evenly_when_only_the_number_is_given():
    assert [len(micro.indices) for micro in plan([7] * 32, microbatches=8)] == [4] * 8


def test_samples_that_stand_together_stay_together():
    assert [micro.indices for micro in plan([5] * 6, budget=10, overhead=0)] == [
        (0, 1),
        (2, 3),
        (4, 5),
    ]


def test_a_larger_overhead_gives_fewer_microbatches():
    lengths = random.Random(0).choices(range(1, 1000), k=200)
    counts = [len(plan(lengths, budget=8000, overhead=price)) for price in (0, 10, 100, 1000)]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)
    assert plan(lengths, budget=8000).overhead == default_overhead(8000) == 128


def test_the_cap_and_the_budget_together():
    lengths = [100, 60, 50, 20, 10, 5]
    free = plan(lengths, budget=200, overhead=0)
    capped = plan(lengths, budget=200, overhead=0, microbatches=3)
    assert len(free) == 6
    assert len(capped) == 3
    assert capped.largest <= 200
    with pytest.raises(PlanError, match=re.escape("microbatches >= 2 with this budget")):
        plan(lengths, budget=200, microbatches=1)


@pytest.mark.parametrize(
    "lengths",
    [
        (3, 5, 4),
        iter([3, 5, 4]),
        torch.tensor([3, 5, 4]),
        torch.tensor([3, 5, 4], dtype=torch.int32),
        np.array([3, 5, 4]),
        list(np.array([3, 5, 4])),
        [torch.tensor(3), 5, np.int8(4)],
    ],
    ids=["tuple", "iterator", "int64", "int32", "array", "list of numpy", "mixed list"],
)
def test_lengths_of_many_kinds(lengths):
    assert plan(lengths, budget=10) == plan([3, 5, 4], budget=10)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([], "There are no lengths"),
        ([3, 0], "lengths[1] = 0 (int)"),
        ([-3], "lengths[0] = -3 (int)"),
        ([3, True], "lengths[1] = True (bool)"),
        ([3, 2.0], "lengths[1] = 2.0 (float)"),
        ([float("nan")], "lengths[0] = nan (float)"),
        (["12"], "lengths[0] = '12' (str)"),
        ([None], "lengths[0] = None (NoneType)"),
        ("12", "'12' (str)"),
        (5, "5 (int)"),
        (torch.tensor(5), "tensor(5) (Tensor)"),
        (torch.tensor([2.0]), "pass whole numbers: lengths.long() for a tensor"),
        (torch.tensor([[1, 2]]), "pass lengths of one dimension, such as mask.sum(1)"),
        (np.array([True]), "lengths[0] = True (bool)"),
    ],
)
def test_lengths_that_cannot_be_meant(lengths, text):
    with pytest.raises(PlanError, match=re.escape(text)) as caught:
        plan(lengths, budget=10)
    assert caught.value.slug == "plan-lengths"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "neither `budget` nor `microbatches`"),
        ({"budget": 0}, "budget=0 (int)"),
        ({"budget": 2.5}, "budget=2.5 (float)"),
        ({"budget": True}, "budget=True (bool)"),
        ({"microbatches": 0}, "microbatches=0 (int)"),
        ({"budget": 10, "overhead": -1}, "overhead=-1 (int)"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments, text):
    with pytest.raises(PlanError, match=re.escape(text)) as caught:
        plan([5, 6], **arguments)
    assert caught.value.slug == "plan-argument"


def test_a_sample_longer_than_the_budget_is_named():
    with pytest.raises(PlanError) as caught:
        plan([5, 50, 7, 90], budget=10)
    text = str(caught.value)
    assert "Sample 1 alone is larger than the budget of 10 elements." in text
    assert "lengths[1] = 50, and 1 more; the longest has 90" in text
    assert "set budget=90 or more" in text


def library_lengths() -> list[int]:
    """Words and signs in the functions of some large modules of the standard library."""
    found = []
    for name in ("argparse", "ast", "datetime", "_pydecimal", "inspect", "tarfile", "turtle"):
        source = Path(ast.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                found.append(min(1024, len(re.findall(r"\w+|[^\w\s]", text))))
    return found


def test_padding_on_real_text():
    lengths = library_lengths()
    generator = random.Random(0)
    ours, usual = [], []
    for _ in range(20):
        batch = generator.sample(lengths, 64)
        ours.append(plan(batch, budget=8 * max(batch)).waste)
        usual.append(usual_loop(batch, 8).waste)
    assert sum(ours) / len(ours) <= 1.16
    assert sum(usual) / len(usual) >= 2.5


def test_planning_is_quick():
    # Bounds with room for a busy machine: 0.1 ms and 8 ms were measured on an idle one.
    generator = random.Random(0)
    for n, seconds in ((64, 0.004), (4096, 0.2)):
        lengths = [min(1024, int(generator.lognormvariate(4, 1)) + 1) for _ in range(n)]
        for arguments in ({"budget": 8192}, {"microbatches": 8}):
            times = []
            for _ in range(5):
                start = time.perf_counter()
                plan(lengths, **arguments)
                times.append(time.perf_counter() - start)
            assert min(times) < seconds


@pytest.mark.parametrize(("extra", "loaded"), [("", False), ("import torch", True)])
def test_planning_needs_no_torch(extra, loaded):
    # The second case shows that the first one can fail.
    code = textwrap.dedent(
        f"""
        import sys
        import gradaccum
        {extra}
        gradaccum.plan([3, 5, 4], budget=10)
        import gradaccum.planner.usual, gradaccum.planner.lengths
        assert ("torch" in sys.modules) is {loaded}
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_front_door_has_it():
    assert ga.plan is plan
