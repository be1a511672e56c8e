"""A window half done, saved and gone on with in a fresh process, ends bit for bit as if never left.

The training itself is `resume_script.py` beside this file, so that a fresh interpreter can run it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum as ga
from gradaccum.errors import StateError

SCRIPT = Path(__file__).with_name("resume_script.py")
CASES = ["sgd", "adamw", "scaler", "terms", "zero", "counts", "regrouped", "loader"]
CASES += ["whole windows", "wide", "wide terms", "wide scaler", "compensated", "compensated terms"]


def run(mode: str, folder: Path, cases: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), mode, str(folder), *cases],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs, saved after every micro-batch, and new processes that go on from each file."""
    folder = tmp_path_factory.mktemp("runs")
    run("whole", folder, CASES)
    run("resume", folder, CASES)
    run("forget", folder, ["adamw"])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_stopped_after_any_microbatch_goes_on_to_the_bit(case: str, runs: Path) -> None:
    whole = torch.load(runs / f"{case}-whole.pt", weights_only=True)
    resumed = sorted(runs.glob(f"{case}-resumed-*.pt"))
    assert len(resumed) >= 8
    for path in resumed:
        assert_same(torch.load(path, weights_only=True), whole, path.stem)


@pytest.mark.slow
def test_the_comparison_sees_a_lost_window(runs: Path) -> None:
    whole = torch.load(runs / "adamw-whole.pt", weights_only=True)
    forgot = torch.load(runs / "adamw-forgot.pt", weights_only=True)
    with pytest.raises(AssertionError, match=r"forgot\.model"):
        assert_same(forgot, whole, "forgot")


def assert_same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert one == other, where


def half_done(width: int = 3, optimizer: Any = torch.optim.AdamW, **options: Any) -> Any:
    model = nn.Linear(width, 1)
    acc = ga.Accumulator(model, optimizer(model.parameters(), lr=0.1), every=4, **options)
    loop = acc.microbatches([torch.ones(2, width)] * 4)
    micro = next(loop)
    micro.backward(model(micro.batch).sum(), 2)
    with pytest.warns(ga.OpenWindowWarning, match="1 of 4"):
        loop.close()
    return acc


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: half_done(width=4), r"parameter 0 \(name, shape, dtype\) differs"),
        (lambda: half_done(optimizer=torch.optim.SGD), "optimizers differs"),
        (lambda: half_done(scaler=torch.amp.GradScaler("cpu")), "scaler differs"),
    ],
    ids=["model", "optimizer", "scaler"],
)
def test_a_foreign_state_is_refused_and_nothing_changes(other: Any, difference: str) -> None:
    foreign = other().state_dict()
    acc = half_done()
    before = acc.state_dict()
    with pytest.raises(StateError, match=difference) as caught:
        acc.load_state_dict(foreign)
    assert caught.value.got
    assert caught.value.expected
    assert_same(acc.state_dict(), before, "state")


@pytest.mark.parametrize("state", [None, {}, {"version": 1}, [1, 2]])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError, match="no state of an accumulator"):
        half_done().load_state_dict(state)


def test_a_state_of_another_version_is_refused() -> None:
    acc = half_done()
    with pytest.raises(StateError, match="version of the state differs"):
        acc.load_state_dict({**acc.state_dict(), "version": 99})


@pytest.mark.parametrize("missing", ["window", "gradients", "random", "updates", "stage"])
def test_a_state_with_a_part_missing_is_refused_and_nothing_changes(missing: str) -> None:
    acc = half_done()
    state = acc.state_dict()
    del state[missing]
    before = acc.state_dict()
    with pytest.raises(StateError, match=f"`{missing}`"):
        acc.load_state_dict(state)
    assert_same(acc.state_dict(), before, "state")


def test_the_state_is_a_value_that_training_on_does_not_change() -> None:
    model = nn.Linear(3, 1)
    acc = ga.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), every=3)
    states = []
    for micro in acc.microbatches([torch.ones(2, 3)] * 3):
        micro.backward(model(micro.batch).sum(), 2)
        states.append(acc.state_dict())
    assert states[0]["window"]["microbatches"] == 1
    first, second = states[0]["gradients"][0], states[1]["gradients"][0]
    assert torch.equal(second, 2 * first)
    assert states[2]["window"] is None
