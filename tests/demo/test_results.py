from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gradaccum.demo.plot import draw
from gradaccum.demo.results import DemoResult, RunResult, megabytes, seconds, short


def run(name: str, title: str, time: float, peak: int, padded: int, off: float) -> RunResult:
    return RunResult(name, title, (time, time, 9.0), (7.0, 6.5, 6.0), peak, 1000, padded, (8,), off)


@pytest.fixture
def result() -> DemoResult:
    return DemoResult(
        whole=run("whole", "whole batch", 4.0, 2_000_000_000, 5000, 2e-7),
        usual=run("usual", "usual loop", 2.0, 300_000_000, 3200, 0.14),
        ours=run("ours", "gradaccum", 0.5, 60_000_000, 1060, 1e-7),
        settings={
            "batch": 64,
            "max_length": 1024,
            "parameters": 600_000,
            "device": "cpu",
            "threads": 2,
            "budget": 2048,
        },
    )


def test_the_verdict_says_same_update_time_and_memory(result: DemoResult) -> None:
    assert result.verdict() == (
        "The same update as the whole batch, to 1e-7, in 0.25 of the usual loop's time and "
        "0.03 of the whole batch's memory; the usual loop's update is 14% off."
    )


def test_the_verdict_says_when_the_update_is_not_the_same(result: DemoResult) -> None:
    wrong = replace(result, ours=replace(result.ours, distance=3e-4))
    assert not wrong.same
    assert wrong.verdict().startswith("NOT the update of the whole batch: 3e-4 away from it, in ")


def test_json_holds_every_number(result: DemoResult) -> None:
    record = json.loads(result.to_json())
    assert record["version"] == 1
    assert record["verdict"] == result.verdict()
    assert record["runs"]["ours"]["median_seconds"] == 0.5
    assert record["runs"]["usual"]["waste"] == 3.2
    assert record["runs"]["whole"]["losses"] == [7.0, 6.5, 6.0]


def test_numbers_are_short() -> None:
    assert [short(x) for x in (0.0, 1.4e-7, 0.009, 0.14)] == ["0e0", "1e-7", "9e-3", "0.14"]
    assert [seconds(x) for x in (1.254, 0.0312)] == ["1.25 s", "31 ms"]
    assert [megabytes(x) for x in (2.9e9, 5.94e6)] == ["2,900 MB", "5.9 MB"]


def test_the_plot_is_written_twice_and_the_same_each_time(
    result: DemoResult, tmp_path: Path
) -> None:
    png, svg = draw(result, tmp_path)
    first = svg.read_bytes()
    assert png.read_bytes().startswith(b"\x89PNG")
    for text in (b"gradaccum", b"usual loop", b"whole batch", b"The same update"):
        assert text in first
    draw(result, tmp_path)
    assert svg.read_bytes() == first
