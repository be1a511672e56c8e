"""The trace that Perfetto opens: the Trace Event Format's rules, and nothing lost."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from gradaccum.records.diagnosis import Event
from gradaccum.report.perfetto import chrome_trace
from tests.report import samples


def rows(diagnosis, phase):
    return [row for row in json.loads(chrome_trace(diagnosis))["traceEvents"] if row["ph"] == phase]


def assert_nested(slices):
    """On one thread a slice lies apart from, or inside, every other."""
    threads = defaultdict(list)
    for row in slices:
        start = round(row["ts"] * 1000)  # Perfetto counts nanoseconds
        threads[row["pid"], row["tid"]].append((start, start + round(row["dur"] * 1000)))
    for spans in threads.values():
        for index, (start, end) in enumerate(spans):
            for other, last in spans[index + 1 :]:
                apart = last <= start or end <= other
                inside = (start <= other and last <= end) or (other <= start and end <= last)
                assert apart or inside


@pytest.mark.parametrize("name", [name for name in samples.ALL if name != "large"])
def test_every_window_micro_batch_and_event_is_a_slice(name):
    made = samples.ALL[name]()
    slices = rows(made, "X")
    counts = [
        len(made.windows),
        sum(len(window.microbatches) for window in made.windows),
        sum(len(window.events) for window in made.windows),
    ]
    assert [sum(row["tid"] // 100 == kind for row in slices) for kind in (1, 2, 3)] == counts
    assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in slices)
    assert_nested(slices)


def test_events_of_two_threads_lie_on_two_threads():
    made = samples.clean()
    crossing = (Event("forward", "a.py", 1, 0.0, 2.0), Event("forward", "a.py", 2, 1.0, 3.0))
    window = replace(made.windows[0], events=crossing)
    slices = [row for row in rows(replace(made, windows=(window,)), "X") if row["tid"] >= 300]
    assert len({row["tid"] for row in slices}) == 2
    with pytest.raises(AssertionError):
        assert_nested([{**row, "tid": 0} for row in slices])


def test_times_are_microseconds_and_places_are_named():
    event = samples.clean().windows[0].events[1]
    row = next(row for row in rows(samples.clean(), "X") if row["cat"] == "backward")
    assert row["ts"] == pytest.approx(event.start * 1e6)
    assert row["args"]["line"] == "train.py:11"


def test_memory_and_norms_are_counters():
    counters = rows(samples.clean(), "C")
    names = {row["name"] for row in counters}
    assert names == {"memory, bytes", "gradient norm", "change of parameters"}
    assert sum(row["name"] == "memory, bytes" for row in counters) == len(samples.clean().memory)


def test_threads_have_names():
    named = {
        row["tid"]: row["args"]["name"]
        for row in rows(samples.clean(), "M")
        if row["name"] == "thread_name"
    }
    assert named == {100: "windows", 200: "micro-batches", 300: "events"}


def test_hostile_text_stays_strict_json():
    def refuse(word):
        raise AssertionError(word)

    table = json.loads(chrome_trace(samples.hostile()), parse_constant=refuse)
    assert "\x1b" not in table["otherData"]["verdict"]
