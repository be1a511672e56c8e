"""`gradaccum lint` as people use it: by process, with good and bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradaccum.faults import CATALOGUE

from .sarif_shape import SHAPE

BAD = f"{CATALOGUE['GA102'].prelude}\n{CATALOGUE['GA102'].bad}"
GOOD = f"{CATALOGUE['GA102'].prelude}\n{CATALOGUE['GA102'].good}"


def lint(*arguments: object, cwd: Path, stdin: str | None = None):
    return subprocess.run(
        [sys.executable, "-m", "gradaccum", "lint", *map(str, arguments)],
        cwd=cwd, input=stdin, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


def test_findings_exit_one_and_show_the_line(folder):
    done = lint("bad.py", cwd=folder)
    assert done.returncode == 1
    assert "bad.py:12:5: error GA102" in done.stdout
    assert "optimizer.zero_grad()" in done.stdout
    assert "^^^" in done.stdout
    assert "mend:" in done.stdout


def test_clean_exits_zero(folder):
    done = lint("good.py", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: "nothing.py", "a path that does not exist"),
        (lambda folder: (folder / "empty").mkdir() or "empty", "a folder without Python"),
        (lambda folder: (folder / "x.bin").write_bytes(b"\0\1") and "x.bin", "a binary file"),
        (lambda folder: (folder / "x.ipynb").write_text("{\n?") and "x.ipynb", "line 2 column 1"),
        (lambda folder: (folder / "x.ipynb").write_text("{}") and "x.ipynb", "no list of cells"),
        (lambda folder: "*.nothing", "a pattern that no file matches"),
    ],
)
def test_bad_input_is_one_clear_line_and_the_rest_is_linted(folder, make, says):
    done = lint(make(folder), "bad.py", cwd=folder)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "GA102" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(folder):
    (folder / "good.py").chmod(0)
    done = lint(".", cwd=folder)
    assert done.returncode == 2
    assert "permission denied" in done.stderr


def test_a_file_that_does_not_parse_is_one_finding(folder):
    (folder / "broken.py").write_text("def f(:\n")
    done = lint("--format", "json", "broken.py", "good.py", cwd=folder)
    table = json.loads(done.stdout)
    assert [item["code"] for item in table["findings"]] == ["GA001"]
    assert (table["version"], table["files"], done.returncode) == (1, 2, 1)


def test_unknown_codes_and_broken_settings(folder):
    done = lint("--select", "GA999", "bad.py", cwd=folder)
    assert done.returncode == 2
    assert "no fault has the code GA999" in done.stderr
    (folder / "pyproject.toml").write_text("[tool.gradaccum.lint]\nignore = 3\n")
    done = lint("bad.py", cwd=folder)
    assert done.returncode == 2
    assert "ignore of [tool.gradaccum.lint]" in done.stderr


def test_select_ignore_settings_and_noqa(folder):
    assert lint("--ignore", "GA1", "bad.py", cwd=folder).returncode == 0
    assert lint("--select", "GA2,GA3", "bad.py", cwd=folder).returncode == 0
    (folder / "pyproject.toml").write_text('[tool.gradaccum.lint]\nignore = ["GA102"]\n')
    assert lint("bad.py", cwd=folder).returncode == 0
    (folder / "pyproject.toml").unlink()
    for mark in ("# noqa", "# noqa: GA102", "# noqa: E501, GA102", "# noqa: GA1"):
        text = BAD.replace("optimizer.zero_grad()", f"optimizer.zero_grad()  {mark}")
        (folder / "quiet.py").write_text(text)
        assert lint("quiet.py", cwd=folder).returncode == 0, mark
    other = BAD.replace("optimizer.zero_grad()", "optimizer.zero_grad()  # noqa: GA101")
    (folder / "quiet.py").write_text(other)
    assert lint("quiet.py", cwd=folder).returncode == 1


def test_standard_input_and_patterns(folder):
    assert lint("-", cwd=folder, stdin=BAD).returncode == 1
    assert lint("b*.py", cwd=folder).returncode == 1
    assert "2 files" in lint(".", cwd=folder).stdout


@pytest.mark.parametrize("ending", ["\r\n", "\r"])
def test_other_line_endings(folder, ending):
    (folder / "bad.py").write_bytes(BAD.replace("\n", ending).encode())
    assert "bad.py:12:5" in lint("bad.py", cwd=folder).stdout


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_other_encodings(folder, encoding):
    mark = "# -*- coding: latin-1 -*-" if encoding == "latin-1" else "# plain"
    (folder / "bad.py").write_bytes(f"{mark}\n# caf\u00e9\n{BAD}".encode(encoding))
    assert "bad.py:14:5" in lint("bad.py", cwd=folder).stdout


def test_a_notebook_is_reported_by_cell(folder):
    first, second = BAD.split("for i", 1)
    cells = [
        {"cell_type": "markdown", "source": ["# text"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", first]},
        {"cell_type": "code", "source": "for i" + second},
    ]
    (folder / "train.ipynb").write_text(json.dumps({"cells": cells}))
    assert "train.ipynb:cell 2:2:5: error GA102" in lint("train.ipynb", cwd=folder).stdout


SCHEMA = os.environ.get("GRADACCUM_SARIF_SCHEMA", "")
"""OASIS's own `sarif-schema-2.1.0.json`, if at hand; it is theirs, so it is not kept here."""


def test_sarif_holds_to_the_standard(folder):
    log = json.loads(lint("--format", "sarif", "bad.py", cwd=folder).stdout)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert log["version"] == "2.1.0"
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "bad.py"
        assert place["region"]["startLine"] >= 1
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator(SHAPE).validate(log)
    if SCHEMA:
        official = json.loads(Path(SCHEMA).read_text())
        jsonschema.validators.validator_for(official)(official).validate(log)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: run["results"][0].pop("message"),
        lambda run: run["results"][0].update(level="fatal"),
        lambda run: run["results"][0]["locations"][0].update(path="bad.py"),
        lambda run: run["tool"]["driver"].pop("name"),
    ],
    ids=["no message", "no such level", "no such property", "no tool"],
)
def test_that_the_shape_of_sarif_refuses_what_is_none(folder, spoil):
    jsonschema = pytest.importorskip("jsonschema")
    log = json.loads(lint("--format", "sarif", "bad.py", cwd=folder).stdout)
    spoil(log["runs"][0])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SHAPE).validate(log)


def test_github_annotations_escape_what_they_must(folder):
    out = lint("--format", "github", "bad.py", cwd=folder).stdout
    assert out.startswith("::error file=bad.py,line=12,col=5,title=GA102 ")
    assert len(out.splitlines()) == 1


def test_fix_mends_what_is_certain_and_keeps_comments(folder):
    pytest.importorskip("libcst")
    fault = CATALOGUE["GA402"]
    bad = fault.bad.replace("    nn.utils", "    # keep me\n    nn.utils")
    (folder / "amp.py").write_text(f"{fault.prelude}\n{bad}")
    shown = lint("--diff", "amp.py", cwd=folder)
    assert "+    scaler.unscale_(optimizer)" in shown.stdout
    assert (folder / "amp.py").read_text().count("unscale_") == 0
    assert lint("--fix", "amp.py", cwd=folder).returncode == 0
    text = (folder / "amp.py").read_text()
    assert "    # keep me\n    scaler.unscale_(optimizer)\n    nn.utils" in text
    assert lint("amp.py", cwd=folder).returncode == 0


@pytest.mark.parametrize("mend", ["--fix", "--diff"])
def test_mending_tells_of_bad_input_as_well(folder, mend):
    pytest.importorskip("libcst")
    done = lint(mend, "nothing.py", "good.py", cwd=folder)
    assert done.returncode == 2
    assert "a path that does not exist" in done.stderr


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]})


def test_what_mending_leaves_is_reported_and_decides_the_exit_code(folder):
    pytest.importorskip("libcst")
    (folder / "train.ipynb").write_text(notebook(BAD))
    assert lint("train.ipynb", cwd=folder).returncode == 1
    done = lint("--fix", "--format", "json", "train.ipynb", "bad.py", cwd=folder)
    assert [item["path"] for item in json.loads(done.stdout)["findings"]] == ["train.ipynb:cell 1"]
    assert (done.returncode, done.stderr) == (1, "changed 1 file; 1 finding left.\n")
    assert lint("bad.py", cwd=folder).returncode == 0
    lint("--fix", "--output", "left.txt", "train.ipynb", cwd=folder)
    assert "GA102" in (folder / "left.txt").read_text()


def test_standard_input_is_mended_to_standard_output_and_no_file_is_touched(folder):
    pytest.importorskip("libcst")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = lint("--fix", "--stdin-name", "good.py", "-", cwd=folder, stdin=BAD)
    (folder / "mended.py").write_text(done.stdout)
    assert lint("mended.py", cwd=folder).returncode == 0
    assert done.stdout != BAD
    (folder / "mended.py").unlink()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    clean = lint("--fix", "-", cwd=folder, stdin=GOOD)
    assert (clean.stdout, clean.returncode) == (GOOD, 0)


def test_a_mend_is_judged_with_the_files_beside(folder):
    """`clear` lies elsewhere: alone, the mended file would look as if it never cleared."""
    pytest.importorskip("libcst")
    (folder / "helpers.py").write_text("def clear(o):\n    o.zero_grad()\n")
    fault = CATALOGUE["GA402"]
    bad = fault.bad.replace("optimizer.zero_grad()", "clear(optimizer)")
    text = f"{fault.prelude}\nfrom helpers import clear\n{bad}"
    assert "clear(optimizer)" in text
    (folder / "amp.py").write_text(text)
    assert lint("--fix", "amp.py", "helpers.py", cwd=folder).returncode == 0
    assert "unscale_" in (folder / "amp.py").read_text()


def test_a_gradient_that_is_read_is_not_cleared_earlier(folder):
    pytest.importorskip("libcst")
    text = BAD + "    print(model.weight.grad.norm())\n"
    (folder / "bad.py").write_text(text)
    assert lint("--fix", "bad.py", cwd=folder).returncode == 1
    assert (folder / "bad.py").read_text() == text


def test_a_notebook_on_standard_input(folder):
    done = lint("--stdin-name", "train.ipynb", "-", cwd=folder, stdin=notebook(BAD))
    assert "train.ipynb:cell 1:12:5: error GA102" in done.stdout
    said = lint("--format", "github", "--stdin-name", "a.ipynb", "-", cwd=folder,
                stdin=notebook("x = 1", BAD)).stdout  # fmt: skip
    assert "::In code cell 2, line 12: " in said


@pytest.mark.parametrize("mark", ["\x0c", "\u2028", "\x85", "\x1c"])
def test_lines_are_those_that_python_counts(folder, mark):
    text = BAD.replace("import torch", f"import torch  # a{mark}b", 1)
    (folder / "bad.py").write_text(text, encoding="utf-8")
    assert "    12 |     optimizer.zero_grad()" in lint("bad.py", cwd=folder).stdout
    (folder / "bad.py").write_text(
        text.replace("optimizer.zero_grad()", "optimizer.zero_grad()  # noqa: GA102"),
        encoding="utf-8",
    )
    assert lint("bad.py", cwd=folder).returncode == 0


def test_what_is_excluded_and_named(folder):
    (folder / "pyproject.toml").write_text('[tool.gradaccum.lint]\nexclude = ["old"]\n')
    (folder / "old").mkdir()
    (folder / "old" / "bad.py").write_text(BAD)
    assert "2 files" in lint(".", cwd=folder).stdout
    assert lint("old/bad.py", cwd=folder).returncode == 1
    assert lint("--force-exclude", "old/bad.py", cwd=folder).returncode == 0
    done = lint("old", cwd=folder)
    assert done.returncode == 1
    (folder / "pyproject.toml").write_text('[tool.gradaccum.lint]\nexclude = ["*.py"]\n')
    done = lint("old", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "`exclude` leaves nothing" in done.stderr


def test_one_file_by_two_names_is_one(folder):
    assert "1 file:" in lint("bad.py", folder / "bad.py", "./bad.py", cwd=folder).stdout


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with a name")
def test_a_pipe_in_a_folder_is_left_alone(folder):
    os.mkfifo(folder / "pipe.py")
    assert "2 files" in lint(".", cwd=folder).stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_output_that_takes_nothing(folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gradaccum", "lint", "bad.py"],
            cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("gradaccum: cannot write the report: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--select", ""], "--select names no code"),
        (["--ignore", " , "], "--ignore names no code"),
        (["--select", "GA102", "--ignore", "GA1"], "no code is left"),
        (["--jobs", "0"], "no number of processes"),
    ],
)
def test_options_that_would_find_nothing_are_refused(folder, arguments, says):
    done = lint(*arguments, "bad.py", cwd=folder)
    assert done.returncode == 2
    assert says in done.stderr


def test_the_command_line_is_over_the_settings(folder):
    (folder / "pyproject.toml").write_text('[tool.gradaccum.lint]\nignore = ["GA102"]\n')
    assert lint("--select", "GA1", "bad.py", cwd=folder).returncode == 1
    (folder / "pyproject.toml").write_text("[tool]\ngradaccum = 3\n")
    done = lint("bad.py", cwd=folder)
    assert done.returncode == 2
    assert "gradaccum = 3" in done.stderr


@pytest.mark.parametrize("code", ["GA000", "ga001"])
def test_codes_of_files_are_explained_as_well(code):
    done = subprocess.run(
        [sys.executable, "-m", "gradaccum", "explain", code],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert code.upper() in done.stdout


def test_explain():
    done = subprocess.run(
        [sys.executable, "-m", "gradaccum", "explain", "ga203"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "a mean of means" in done.stdout


def test_functions_are_followed_from_file_to_file(folder):
    head, loop = BAD.split("for i", 1)
    (folder / "helpers.py").write_text("def clear(o):\n    o.zero_grad()\n")
    text = head + "from helpers import clear\n\nfor i" + loop
    (folder / "main.py").write_text(text.replace("optimizer.zero_grad()", "clear(optimizer)"))
    out = lint("main.py", "helpers.py", cwd=folder).stdout
    assert "helpers.py:2:5: error GA102" in out


def test_hostile_text_does_not_reach_the_terminal(folder):
    text = BAD.replace("optimizer.zero_grad()", "optimizer.zero_grad()  # \x1b[31m\x07")
    (folder / "bad.py").write_text(text)
    assert "\x1b" not in lint("bad.py", cwd=folder).stdout
