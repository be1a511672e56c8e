"""What watching costs, counted in calls of our own code: times are for `benchmarks/watching.py`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import gradaccum.doctor
from gradaccum.doctor.arrive import head, ledger
from gradaccum.doctor.hooks.install import install
from gradaccum.doctor.trace.recorder import Recorder
from gradaccum.doctor.trace.segments import BURST, FIRST, FOR_EACH, OFTEN, SHARE, Segments
from gradaccum.doctor.trace.sink import ListSink

OURS = str(Path(gradaccum.doctor.__file__).parent)
EVERY, WINDOWS = 4, 5


def calls(layers: int, watched: bool = True) -> Counter[str]:
    """How often each function of the doctor's runs in a few windows of a long run."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(torch, ListSink(), head(torch), ledger())

    def loop(windows: int) -> None:
        for i in range(windows * EVERY):
            (model(torch.ones(1, 2)).square().mean() / EVERY).backward()
            if (i + 1) % EVERY == 0:
                optimizer.step()
                optimizer.zero_grad()

    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        # Comprehensions are calls in some Pythons, and not in others.
        ours = frame.f_code.co_filename.startswith(OURS) and frame.f_code.co_name[0] != "<"
        if event == "call" and ours:
            counted[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    remove = install(recorder) if watched else lambda: None
    try:
        loop(20)
        recorder.segments.spent = float("inf")  # the share of the time is used up
        recorder.segments._flushed = float("inf")  # nor is the file written, as each second
        loop(1)
        assert not watched or not (recorder.segments.deep or recorder.segments.reading)
        sys.setprofile(count)
        try:
            loop(WINDOWS)
        finally:
            sys.setprofile(None)
    finally:
        remove()
    return counted


def test_a_micro_batch_of_a_long_run_takes_few_calls() -> None:
    few = calls(2)
    assert few["backward.py:before"] == few["backward.py:after"] == WINDOWS * EVERY
    # Each call of a module, and each look-up of a method that writes, is one more.
    asked = few["modules.py:__get__"] + few["writes.py:__get__"]
    assert (few.total() - asked) / (WINDOWS * EVERY) < 40, few.most_common(60)
    assert few["read.py:read"] == few["deep.py:norm"] == few["leaves.py:find"] == 0
    assert calls(2, watched=False).total() == 0


def test_and_not_more_of_them_for_more_parameters() -> None:
    """Besides what Python itself asks of us: once for each module, and each gradient cleared."""
    few, many = calls(2), calls(20)
    for counted in (few, many):
        for name in ("modules.py:__get__", "writes.py:__get__"):
            counted.pop(name, None)
    assert many == few


@pytest.mark.parametrize("seconds", [10.0, 1000.0])
def test_deep_looks_get_their_share_of_the_time(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("gradaccum.doctor.trace.segments.time.perf_counter", lambda: now[0])
    segments = Segments(ListSink(), 0.0)
    number = 0
    while now[0] < seconds:
        if segments.reading:
            segments.spent += 0.004
            now[0] += 0.004
        now[0] += 0.01
        segments.add({"k": "backward", "n": number, "e": now[0]})
        segments.add({"k": "step", "n": number, "e": now[0]})
        segments.close()
        number += 2
    assert SHARE * seconds < segments.spent <= segments.allowed() + 0.004


def test_a_tiny_model_is_looked_at_now_and_then_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop of 0.1 ms, which no share of the time would pay a look of 0.1 ms for."""
    now, updates = [0.0], 10_000
    monkeypatch.setattr("gradaccum.doctor.trace.segments.time.perf_counter", lambda: now[0])
    segments = Segments(ListSink(), 0.0)
    read, deep = [], []
    for number in range(updates):
        now[0] += 1e-4
        if segments.reading:
            read.append(number)
            segments.spent += 1e-4
        if segments.deep:
            deep.append(number)
        segments.add({"k": "backward", "n": 2 * number, "e": now[0]})
        segments.add({"k": "step", "n": 2 * number + 1, "e": now[0]})
        segments.close()
    most = BURST + FOR_EACH * updates + SHARE * now[0]
    assert segments.spent <= most + FIRST * 1e-4 + 1e-4
    last = updates // 10
    assert sum(one >= updates - last for one in read) > 0.9 * FOR_EACH / 1e-4 * last
    assert sum(one >= updates - last for one in deep) >= last * FOR_EACH / 1e-4 // OFTEN
