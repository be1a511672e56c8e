"""The outputs of training scripts with and without the doctor are the same, byte for byte."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from doctor_harness import DOCTOR, Out, run
from doctor_scripts import END, ENDS, SCRIPTS, START, WATCHED, together

OTHERS = "the others"
"""Those that share a process."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Out, Out]]:
    """All scripts, both ways; two at a time, for most of each is importing torch.

    Each script has a folder of its own, and each run one for temporary files.
    """
    sources = {OTHERS: together(), **{name: START + SCRIPTS[name] + END for name in ENDS}}
    ways = {"plain": [sys.executable], "under": [*DOCTOR, "-q"]}

    def one(folder: Path, way: str) -> Out:
        return run([*ways[way], "script.py"], folder, TMPDIR=str(tmp_path_factory.mktemp(way)))

    with ThreadPoolExecutor(2) as pool:
        runs = {}
        for name, source in sources.items():
            folder = tmp_path_factory.mktemp("script")
            (folder / "script.py").write_text(source)
            runs[name] = [pool.submit(one, folder, way) for way in ways]
        found = {name: (plain.result(), under.result()) for name, (plain, under) in runs.items()}
    for name in SCRIPTS:
        if name not in ENDS:
            found[name] = (_part(found[OTHERS][0], name), _part(found[OTHERS][1], name))
    return found


def _part(out: Out, name: str) -> Out:
    """What one of several scripts printed."""
    mark = f"# {name}\n".encode()
    streams = (stream.partition(mark)[2].split(b"\n# ")[0] for stream in (out.stdout, out.stderr))
    return Out(0, *streams)  # how they ended together is a test of its own


@pytest.mark.slow
def test_those_in_one_process_all_ran(outcomes: dict[str, tuple[Out, Out]]) -> None:
    for out in outcomes[OTHERS]:
        assert out.code == 0, (out.code, out.stderr.decode()[-3000:])
        assert all(f"# {name}\n" in out.stdout.decode() for name in SCRIPTS if name not in ENDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_byte_for_byte(name: str, outcomes: dict[str, tuple[Out, Out]]) -> None:
    plain, under = outcomes[name]
    assert plain.stdout or plain.stderr
    assert under.stdout.decode() == plain.stdout.decode()
    assert under.stderr.decode() == plain.stderr.decode()
    assert under.code == plain.code


def test_there_are_twenty() -> None:
    assert len(SCRIPTS) >= 20


@pytest.mark.slow
def test_that_comparison_can_fail(outcomes: dict[str, tuple[Out, Out]]) -> None:
    plain, under = (_part(out, WATCHED) for out in outcomes[OTHERS])
    assert (plain.stdout, under.stdout) == (b"False\n", b"True\n")
