"""Memory that really runs out: a limit on the process's address space."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("shortage_script.py")
SAMPLES, CHANNELS, WIDTH = 64, 32, 2048  # of the script

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems do not hold RLIMIT_AS"
)


def train(mebibytes: int, every: int) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), str(mebibytes), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [60, 120])
def test_a_batch_too_large_for_the_memory_makes_the_update_of_the_sizes_that_fit(
    mebibytes: int,
) -> None:
    found = train(mebibytes, 1)
    first, *later = found["rows"]
    pieces = first["microbatches"]
    assert 1 < pieces < SAMPLES
    # one attempt failed; then two sizes were measured, and what was measured fitted
    assert first["calls"][0] == SAMPLES
    assert first["calls"].count(SAMPLES) == 1
    assert sum(first["calls"][-pieces:]) == SAMPLES
    assert sum(first["calls"][1:-pieces]) < SAMPLES / 4
    for row in later:
        assert sum(row["calls"]) == SAMPLES
        assert row["microbatches"] == pieces
    # to the bit what the right sizes make of it: parameters, buffers, random numbers
    truth = train(0, pieces)
    assert found["digests"] == truth["digests"]
    # Nothing is kept of what failed. The smallest thing that could be is the graph of a probe of 4
    # samples, with four activations at least; the failed attempt's would be 16 times as large. What
    # is seen is about 1 MiB, an arena of Python's own, of code that the other run never enters.
    graph = 4 * (4 * CHANNELS * WIDTH * 4)
    assert (found["after"] - truth["after"]) * 1024 < graph
    assert (found["after"] - found["before"]) * 1024 < graph
    # and without the limit the sizes grow back
    assert found["grown"][-1] == 1
