"""Right loops are left alone: no error, no warning, and no note."""

import pytest
import right_graphs
import right_methods
import right_models
import right_objectives
import right_parameters
import right_terms
import right_windows
from runs import diagnose

FILES = (
    right_windows,
    right_terms,
    right_methods,
    right_models,
    right_parameters,
    right_objectives,
    right_graphs,
)
ALL = {name: file.HEAD + loop for file in FILES for name, loop in file.LOOPS.items()}


def test_no_loop_hides_another():
    assert len(ALL) == sum(len(file.LOOPS) for file in FILES)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_right_loop_is_left_alone(name, tmp_path):
    seen = diagnose(ALL[name], tmp_path)
    assert seen.run.error == ""
    assert [(one.code, one.line, one.message) for one in seen.findings] == []
    assert seen.verdict.startswith("No fault found.")
