"""The catalogue: unique, documented, exercised; its figures are what its loops print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradaccum.faults import CATALOGUE, Fault, find
from gradaccum.lint.files.program import Program
from gradaccum.lint.judge import judge

ROOT = Path(__file__).parents[2]
EVERY = [pytest.param(fault, id=fault.code) for fault in CATALOGUE.values()]


def codes(text: str) -> set[str]:
    program = Program({"loop.py": text})
    module = program.load("loop.py")
    assert module is not None
    return {one.code for one in judge(program, module)}


def figure(fault: Fault, loop: str) -> float:
    torch = pytest.importorskip("torch")
    names: dict[str, object] = {"__name__": "example"}
    state = torch.get_rng_state()
    try:
        exec(compile(f"{fault.prelude}\n{loop}", fault.code, "exec"), names)
    finally:
        torch.set_rng_state(state)
    value = names["figure"]
    assert isinstance(value, (int, float))
    return value


def test_codes_are_the_families_of_the_design():
    assert len(CATALOGUE) == len({fault.title for fault in CATALOGUE.values()})
    assert all(re.fullmatch(r"GA[1-8]\d\d", code) for code in CATALOGUE)
    wanted = {
        *range(101, 106), *range(201, 206), *range(301, 310), *range(401, 406),
        *range(501, 504), 601, 602, 701, 702, 703, 801,
    }  # fmt: skip
    assert {int(code[2:]) for code in CATALOGUE} >= wanted


@pytest.mark.parametrize("fault", EVERY)
def test_every_entry_says_what_why_and_how(fault):
    assert fault.severity in ("error", "warning", "note")
    for text in (fault.what, fault.reason, fault.mend):
        assert text.endswith((".", ")`", "`.")), text
        assert "{" not in text
    bad, good = (f"{value:g}" for value in fault.figures)
    if "{bad}" in fault.why:
        assert bad in fault.reason
    if "{good}" in fault.why:
        assert good in fault.reason
    assert find(fault.code.lower()) is fault


@pytest.mark.parametrize("fault", EVERY)
def test_every_entry_has_a_page(fault):
    page = (ROOT / "docs" / "faults" / f"{fault.name}.md").read_text()
    assert page == render(fault)


def render(fault: Fault) -> str:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from faults_pages import page

        return page(fault)
    finally:
        sys.path.remove(str(ROOT / "docs"))


@pytest.mark.parametrize("fault", EVERY)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning")
def test_the_figures_are_those_of_the_loops(fault):
    assert (figure(fault, fault.bad), figure(fault, fault.good)) == pytest.approx(fault.figures)
    assert fault.figures[0] != fault.figures[1]


@pytest.mark.parametrize("fault", EVERY)
def test_the_linter_finds_the_bad_loop_and_leaves_the_good_one(fault):
    found = codes(f"{fault.prelude}\n{fault.bad}")
    assert found == ({fault.code} if fault.static else set())
    assert codes(f"{fault.prelude}\n{fault.good}") == set()


def run_without_torch(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


WATCH = """
import sys
from gradaccum.lint import command
command.main("lint", [{path!r}])
{extra}
sys.exit(9 if "torch" in sys.modules else 0)
"""


def test_lint_does_not_import_torch(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"{CATALOGUE['GA102'].prelude}\n{CATALOGUE['GA102'].bad}")
    assert run_without_torch(WATCH.format(path=str(path), extra="")).returncode == 0


def test_that_test_can_fail(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("x = 1\n")
    (tmp_path / "torch.py").write_text("")
    extra = f"sys.path.insert(0, {str(tmp_path)!r}); import torch"
    assert run_without_torch(WATCH.format(path=str(path), extra=extra)).returncode == 9
