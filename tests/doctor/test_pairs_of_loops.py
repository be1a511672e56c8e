"""A wrong loop is found at its line, and alone; its right twin is left alone."""

import pairs_beside
import pairs_clipping
import pairs_graphs
import pairs_kept
import pairs_objectives
import pairs_parameters
import pairs_schedules
import pairs_stepping
import pairs_sums
import pairs_terms
import pairs_weights
import pairs_windows
import pairs_zeroing
import pytest
from loops import TRAINED, part
from runs import diagnose

FILES = (
    pairs_zeroing,
    pairs_weights,
    pairs_stepping,
    pairs_schedules,
    pairs_parameters,
    pairs_clipping,
    pairs_graphs,
    pairs_objectives,
    pairs_kept,
    pairs_terms,
    pairs_sums,
    pairs_beside,
    pairs_windows,
)
ALL = {name: pair for file in FILES for name, pair in file.PAIRS.items()}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_no_pair_hides_another():
    assert len(ALL) == sum(len(file.PAIRS) for file in FILES)


@pytest.mark.parametrize("name", ALL)
def test_the_wrong_loop_is_found_at_its_line(name, tmp_path):
    code, text = ALL[name]
    loop, line = part(text, "good")
    seen = diagnose(TRAINED + loop, tmp_path)
    found = [(one.code, one.line - TRAINED.count("\n")) for one in seen.findings]
    assert line
    assert found == [(code, line)]


@pytest.mark.parametrize("name", ALL)
def test_its_right_twin_is_left_alone(name, tmp_path):
    seen = diagnose(TRAINED + part(ALL[name][1], "bad")[0], tmp_path)
    assert [(one.code, one.line, one.message) for one in seen.findings] == []
