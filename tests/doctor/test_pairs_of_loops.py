"""A wrong loop is found at its line, and alone; its right twin is left alone."""

import re

import pytest
from pairs_of_loops import HEAD, PAIRS
from pairs_of_loops_later import LATER
from pairs_of_loops_more import MORE
from right_loops_later import RIGHT
from runs import diagnose

ALL = {**PAIRS, **MORE, **LATER}
MARK = re.compile(r"\s*#(bad|good)?(!?)$")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def part(text: str, left_out: str) -> tuple[str, int]:
    """One of the two loops, and the line that is marked."""
    lines: list[str] = []
    marked = 0
    for line in text.splitlines():
        found = MARK.search(line)
        kind, mark = (found[1], found[2]) if found and (found[1] or found[2]) else (None, "")
        if kind == left_out:
            continue
        lines.append(line[: found.start()] if found and (kind or mark) else line)
        marked = len(lines) if mark else marked
    return "\n".join(lines) + "\n", marked


@pytest.mark.parametrize("name", ALL)
def test_the_wrong_loop_is_found_at_its_line(name, tmp_path):
    code, text = ALL[name]
    loop, line = part(text, "good")
    seen = diagnose(HEAD + loop, tmp_path)
    found = [(one.code, one.line - HEAD.count("\n")) for one in seen.findings]
    assert line
    assert found == [(code, line)]


@pytest.mark.parametrize("name", ALL)
def test_its_right_twin_is_left_alone(name, tmp_path):
    seen = diagnose(HEAD + part(ALL[name][1], "bad")[0], tmp_path)
    assert [(one.code, one.line, one.message) for one in seen.findings] == []


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_is_left_alone(name, tmp_path):
    seen = diagnose(HEAD + RIGHT[name], tmp_path)
    assert [(one.code, one.line, one.message) for one in seen.findings] == []
