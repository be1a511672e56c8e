"""Every entry that a run can show: its bad loop is told by its code, its good one is quiet."""

import pytest

pytest.importorskip("torch")

from runs import found

from gradaccum.doctor.checks import DETECTORS
from gradaccum.faults import CATALOGUE

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
