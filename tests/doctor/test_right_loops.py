"""Right loops are left alone: no error, no warning, and no note but the one that is named."""

import pytest
from right_loops import HEAD, LOOPS
from right_loops_more import MORE
from runs import diagnose

ALL = {**LOOPS, **MORE}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_right_loop_is_left_alone(name, tmp_path):
    seen = diagnose(HEAD + ALL[name], tmp_path)
    assert seen.run.error == ""
    assert [(one.code, one.line, one.message) for one in seen.findings] == []
    assert seen.verdict.startswith("No fault found.")
