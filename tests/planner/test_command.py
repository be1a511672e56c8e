"""`gradaccum plan`: what it prints, and that users see one message and no traceback."""

import json
import subprocess
import sys

import pytest

from gradaccum.planner.pack import plan
from gradaccum.records import Plan


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "gradaccum", "plan", *arguments], input=stdin, capture_output=True
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def test_the_plan_and_the_usual_loop_beside_it(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("7, 100\n9 90\n\n8\n", encoding="utf-8")
    done = run(str(path), "--budget", "200", "--overhead", "10", "--size", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(str(plan([7, 100, 9, 90, 8], budget=200, overhead=10)))
    assert "The usual loop, 2 samples in random order padded to their longest:" in done.stdout


def test_json_is_a_plan_with_the_usual_loop(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[7, 100, 9, 90, 8]", encoding="utf-8")
    done = run(str(path), "--microbatches", "2", "--json")
    assert Plan.from_json(done.stdout) == plan([7, 100, 9, 90, 8], microbatches=2)
    usual = json.loads(done.stdout)["usual"]
    assert usual == {"size": 8, "padded": 500.0, "waste": 500 / 214, "shuffles": 20}


def test_without_a_budget_it_is_that_of_the_usual_loop():
    done = run("-", "--json", "--size", "4", stdin=b"1 2 3 4 5 6 7 8")
    assert json.loads(done.stdout)["budget"] == 32


@pytest.mark.parametrize(
    ("content", "arguments", "text"),
    [
        (b"", (), "There are no lengths"),
        (b" \n,\n", (), "There are no lengths"),
        (b"3\n4\nfive\n", (), "line 3: 'five'"),
        (b"3.5", (), "line 1: '3.5'"),
        (b"1_000", (), "line 1: '1_000'"),
        (b"--5", (), "line 1: '--5'"),
        (b"9" * 5000, (), "line 1: '99999"),
        (b"3 0", (), "lengths[1] = 0 (int)"),
        (b"[3, 2.5]", (), "lengths[1] = 2.5 (float)"),
        (b"[3, NaN]", (), "lengths[1] = nan (float)"),
        (b"[3, true]", (), "lengths[1] = True (bool)"),
        (b"[3,", (), "starts like a JSON list and is none"),
        (b"[" * 100_000, (), "starts like a JSON list and is none"),
        (b"\xff\xfe\x00", (), "not UTF-8 text"),
        (b"3 400", ("--budget", "300"), "Sample 1 alone is larger than the budget"),
        (b"3", ("--size", "0"), "`size` must be a whole number of at least 1"),
        (b"3", ("--overhead", "-1"), "`overhead` must be a whole number of at least 0"),
        (b"5 5", ("--budget", "5", "--microbatches", "1"), "microbatches >= 2"),
    ],
)
def test_input_that_cannot_be_meant(content, arguments, text):
    done = run("-", *arguments, stdin=content)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gradaccum: ")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / ("long" * 200)):
        done = run(str(path))
        assert done.returncode == 2
        assert "The file of lengths cannot be read." in done.stderr
        assert "Traceback" not in done.stderr


def test_a_file_with_a_byte_order_mark_and_windows_lines():
    assert json.loads(run("-", "--json", stdin=b"\xef\xbb\xbf3\r\n4\r\n").stdout)["real"] == 7
