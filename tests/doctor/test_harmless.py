"""The outputs of training scripts with and without the doctor are the same, byte for byte."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from doctor_harness import DOCTOR, Out, run
from doctor_scripts import END, ENDS, SCRIPTS, START, together


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Out, Out]]:
    """All scripts, both ways; two at a time, for most of each is importing torch."""
    folder = tmp_path_factory.mktemp("scripts")
    sources = {name: START + SCRIPTS[name] + END for name in ENDS}
    sources["the others"] = together()

    def one(item: tuple[str, str]) -> tuple[str, tuple[Out, Out]]:
        name, source = item
        path = folder / f"script_{list(sources).index(name)}.py"
        path.write_text(source)
        plain = run([sys.executable, path.name], folder)
        return name, (plain, run([*DOCTOR, "-q", path.name], folder))

    with ThreadPoolExecutor(2) as pool:
        found = dict(pool.map(one, sources.items()))
    plain, under = found.pop("the others")
    for name in SCRIPTS:
        if name not in ENDS:
            found[name] = (_part(plain, name), _part(under, name))
    return found


def _part(out: Out, name: str) -> Out:
    """What one of several scripts printed."""
    mark = f"# {name}\n".encode()
    streams = (stream.partition(mark)[2].split(b"\n# ")[0] for stream in (out.stdout, out.stderr))
    return Out(out.code, *streams)


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
def test_that_comparison_can_fail(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(START + "import sys; print('gradaccum.doctor' in sys.modules)")
    plain = run([sys.executable, "a.py"], tmp_path)
    under = run([*DOCTOR, "-q", "a.py"], tmp_path)
    assert (plain.stdout, under.stdout) == (b"False\n", b"True\n")
