"""The text of a diagnosis: the verdict first, one quiet line where all is well."""

import re
from dataclasses import replace

import pytest

from gradaccum.report.terminal import text
from tests.report import samples


@pytest.mark.parametrize("name", ["clean", "large", "nothing"])
def test_one_quiet_line_where_all_is_well(name):
    made = samples.ALL[name]()
    assert text(made, colour=True) == f"gradaccum doctor: {made.verdict}"


def test_the_verdict_comes_first_and_the_findings_show_their_lines():
    said = text(samples.undivided()).splitlines()
    assert said[0] == f"gradaccum doctor: {samples.undivided().verdict}"
    assert said[2].startswith("train.py:10:5: error GA201 loss not divided: each micro-batch")
    assert said[3] == "    10 |     loss = criterion(out, y)  # the mean over this micro-batch"
    assert set(said[4]) == {" ", "|", "^"}
    assert said[5].endswith("loss.backward()   <- 96 backward passes, weight 1 each")
    assert said[-1].startswith("98 backward passes, 24 updates in 1.7 s: 1 error, 1 warning.")


def test_the_weights_that_are_off_stand_beside_what_they_should_be():
    said = text(samples.undivided())
    assert "update 0, weights of loss: 1 (4 times); should be 0.25 (4 times)" in said
    assert said.count("weights of loss") == 3
    assert "4 more like these" in said


def test_how_the_run_ended_is_said_and_notes_take_one_line_each():
    said = text(samples.killed()).splitlines()
    assert said[0].endswith("(killed, exit code -9)")
    assert said[1].startswith("gradaccum doctor: train.py:4: note GA701")
    assert len(said) == 2


def test_evidence_in_another_file_or_without_source_names_its_place():
    made = samples.undivided()
    first = made.findings[0]
    elsewhere = replace(first.evidence[0], path="lib/loop.py", line=7)
    said = text(replace(made, findings=(replace(first, evidence=(elsewhere,)),)))
    assert "       = lib/loop.py:7: 96 backward passes, weight 1 each" in said


@pytest.mark.parametrize("colour", [False, True])
def test_hostile_text_commands_no_terminal(colour):
    said = text(samples.hostile(), colour)
    ours = re.compile(r"\x1b\[1;3[136]m|\x1b\[0m")
    assert bool(ours.search(said)) is colour
    rest = ours.sub("", said)
    assert [char for char in rest if not char.isprintable() and char != "\n"] == []
    assert "<U+202E>" in rest
    # a line break inside a text would forge a line of the report
    assert len(said.splitlines()) == len(text(samples.hostile()).splitlines())


def test_a_line_break_in_a_text_forges_no_line():
    made = replace(samples.clean(), verdict="bad\ngradaccum doctor: all is well")
    assert text(made) == "gradaccum doctor: bad gradaccum doctor: all is well"


def test_more_findings_than_fit_are_counted():
    made = samples.undivided()
    many = tuple(replace(made.findings[0], line=line) for line in range(1, 51))
    said = text(replace(made, findings=many))
    assert said.count("error GA201") == 20
    assert "30 more findings" in said
