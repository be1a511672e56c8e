"""Every entry that a run can show: its bad loop is told by its code, its good one is quiet."""

import pytest

pytest.importorskip("torch")

from runs import found

from gradaccum.doctor.checks import DETECTORS
from gradaccum.faults import CATALOGUE
from gradaccum.lint.files.program import Program
from gradaccum.lint.judge import judge

RUNS = [pytest.param(fault, id=code) for code, fault in CATALOGUE.items() if fault.runtime]


def test_the_detectors_are_those_that_the_catalogue_names():
    assert {code for code, fault in CATALOGUE.items() if fault.runtime} == DETECTORS


@pytest.mark.parametrize("fault", RUNS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_bad_loop_is_found(fault, tmp_path):
    codes = [code for code, _ in found(f"{fault.prelude}\n{fault.bad}", tmp_path)]
    assert codes == [fault.code]


@pytest.mark.parametrize("fault", RUNS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_good_loop_is_quiet(fault, tmp_path):
    assert found(f"{fault.prelude}\n{fault.good}", tmp_path) == []


ONE_LINE = [
    code
    for code, fault in CATALOGUE.items()
    if fault.static and fault.runtime and code not in ("GA105", "GA204", "GA603")
]
"""Of the others the linter names the loss, the clip or the backward, the doctor what it saw."""


@pytest.mark.parametrize("code", ONE_LINE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_linter_and_doctor_name_the_same_line(code, tmp_path):
    text = f"{CATALOGUE[code].prelude}\n{CATALOGUE[code].bad}"
    program = Program({"loop.py": text})
    module = program.load("loop.py")
    assert module is not None
    assert {(one.code, one.line) for one in judge(program, module)} == set(found(text, tmp_path))
