"""The command: what it prints and writes, whatever ends the script and whatever it is given."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from doctor_harness import DOCTOR, Out, run

TRAIN = """\
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(12):
    model(torch.ones(3, 2)).square().mean().backward()
    optimizer.step()
print('trained')
"""
REPORT = [sys.executable, "-m", "gradaccum", "report"]


def test_help_and_options() -> None:
    for command in ("doctor", "report"):
        done = subprocess.run(
            [sys.executable, "-m", "gradaccum", command, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert all(option in done.stdout for option in ("--json", "--html", "--perfetto"))


@pytest.mark.parametrize("arguments", [[], ["-q"], ["-m"], ["--json", "x.json"], ["--"]])
def test_nothing_to_run(arguments: list[str], tmp_path: Path) -> None:
    done = run([*DOCTOR, *arguments], tmp_path)
    assert done.code == 2
    assert b"there is nothing to run" in done.stderr
    assert b"Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_option_is_ours_before_the_script_and_the_scripts_after(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import sys\nprint(sys.argv)\n")
    assert run([*DOCTOR, "--jsn", "a.py"], tmp_path).code == 2
    done = run([*DOCTOR, "-q", "a.py", "--jsn", "-q"], tmp_path)
    assert (done.code, done.stdout) == (0, b"['a.py', '--jsn', '-q']\n")


@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_an_isolated_interpreter_is_refused(flag: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    done = run([sys.executable, flag, "-m", "gradaccum", "doctor", "a.py"], tmp_path)
    assert done.code == 2
    assert b"without -I, -E and -S" in done.stderr


def test_a_script_that_does_not_train_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    done = run([*DOCTOR, "a.py"], tmp_path)
    assert done.stdout == b"1\n"
    assert done.stderr.startswith(b"gradaccum doctor: no training was seen")
    assert done.stderr.count(b"\n") == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "train.py").write_text(TRAIN)
    files = ["--json", "r.json", "--html", "r.html", "--trace", "t.jsonl", "--perfetto", "p.json"]
    done = run([*DOCTOR, *files, "train.py"], folder)
    assert (done.code, done.stdout) == (0, b"trained\n")
    assert b"GA101" in done.stderr
    return folder


@pytest.mark.slow
def test_all_files_are_written_and_the_report_can_be_shown_again(trained: Path) -> None:
    assert [f["code"] for f in json.loads((trained / "r.json").read_text())["findings"]] == [
        "GA101"
    ]
    assert "GA101" in (trained / "r.html").read_text()
    assert json.loads((trained / "p.json").read_text())["traceEvents"]
    for source in ("r.json", "t.jsonl"):
        shown = run([*REPORT, source], trained)
        assert shown.code == 0, shown.stderr
        assert b"GA101" in shown.stdout
        again = run([*REPORT, source, "--html", "again.html", "--json", "again.json"], trained)
        assert (again.code, again.stdout) == (0, b"")
        assert json.loads((trained / "again.json").read_text())["findings"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0.0, 0.3, 0.6, 0.99])
def test_a_trace_that_was_cut_is_read_up_to_there(cut: float, trained: Path) -> None:
    whole = (trained / "t.jsonl").read_bytes()
    size = max(int(len(whole) * cut), whole.index(b"\n") + 1)
    (trained / "cut.jsonl").write_bytes(whole[:size])
    shown = run([*REPORT, "cut.jsonl"], trained)
    assert shown.code == 0, shown.stderr
    assert shown.stdout


@pytest.mark.slow
def test_what_is_no_trace_is_one_clear_error(trained: Path) -> None:
    lines = (trained / "t.jsonl").read_text().splitlines()
    newer = json.dumps({**json.loads(lines[0]), "version": 99})
    cases = {
        "newer": ("\n".join([newer, *lines[1:]]), "was written by a newer gradaccum"),
        "broken": ("\n".join([lines[0], "{", *lines[1:]]), "is not a trace: line 2"),
        "wrong": ("\n".join([lines[0], '["a list"]', *lines[1:]]), "is not a trace: line 2"),
        "odd": ("\n".join([lines[0], '{"t": "segment"}', *lines[1:]]), "is not a trace: line 2"),
        "bare": ("\n".join([lines[0], '{"t": "segment", "i": 0}']), "a record lacks"),
        "empty": ("", "is not whole, or not JSON"),
        "binary": ("\x00\x01", "is not whole, or not JSON"),
    }
    for name, (text, message) in cases.items():
        (trained / name).write_text(text)
        shown = run([*REPORT, name], trained)
        assert shown.code == 2, name
        assert message in shown.stderr.decode(), name
        assert b"Traceback" not in shown.stderr
    assert b"cannot read" in run([*REPORT, "missing.json"], trained).stderr
    assert b"cannot read" in run([*REPORT, "."], trained).stderr


@pytest.mark.slow
def test_a_report_that_cannot_be_written_loses_neither_trace_nor_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "sys.exit(7)\n")
    (tmp_path / "folder").mkdir()
    files = ["--json", "no/where.json", "--html", "r.html", "--perfetto", "folder"]
    done = run([*DOCTOR, *files, "train.py"], tmp_path, TMPDIR=str(tmp_path))
    assert (done.code, done.stdout) == (7, b"trained\n")
    assert b"cannot write no/where.json" in done.stderr
    assert b"cannot write folder" in done.stderr
    assert b"GA101" in done.stderr
    assert (tmp_path / "r.html").exists()
    (kept,) = tmp_path.glob("gradaccum-*/*.jsonl")
    assert str(kept.parent).encode() in done.stderr
    assert b"GA101" in run([*REPORT, str(kept)], tmp_path).stdout


ENDINGS = {
    "1 / 0": ({1}, "raised"),
    "sys.exit('no')": ({1}, "exited"),
    "import os; os._exit(3)": ({3}, "exited"),
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": ({-signal.SIGKILL}, "killed"),
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": ({-signal.SIGTERM}, "killed"),
    # the compiler, which torch's optimizers load, makes it an exit code of 1
    "raise KeyboardInterrupt": ({1, -signal.SIGINT}, "interrupted"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Out]]:
    """The folder and outcome of each ending; two at a time, for most of each is importing torch."""

    def one(ending: str) -> tuple[Path, Out]:
        folder = tmp_path_factory.mktemp("ending")
        (folder / "train.py").write_text(TRAIN + ending + "\n")
        done = run([*DOCTOR, "--json", "r.json", "train.py"], folder, TMPDIR=str(folder))
        return folder, done

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ENDINGS, pool.map(one, ENDINGS), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_it_ends_there_is_a_report(ending: str, ended: dict[str, tuple[Path, Out]]) -> None:
    folder, done = ended[ending]
    codes, how = ENDINGS[ending]
    assert done.code in codes
    report = json.loads((folder / "r.json").read_text())
    assert report["run"]["ended"] == how
    assert [finding["code"] for finding in report["findings"]] == ["GA101"]
    assert list(folder.glob("gradaccum-*")) == []


LONG = """\
import sys, random, torch
torch.set_num_threads(1)
random.seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(count):
    for i in range(count):
        x = torch.ones(1, 2, requires_grad=i % 3 == 0)
        (model(x).square().mean() / 4).backward()
        if random.random() < 0.3:
            optimizer.step()
            optimizer.zero_grad()
import gradaccum as ga, gc, tracemalloc
with ga.watch() as trace:
    train(1000)
    gc.collect()
    tracemalloc.start()
    train(1000)
    gc.collect()
    first = tracemalloc.get_traced_memory()[0]
    train(4000)
    gc.collect()
    print(first, tracemalloc.get_traced_memory()[0])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """Windows of any length, leaves new in each batch: all is counted, little is kept."""
    (tmp_path / "long.py").write_text(LONG)
    done = run([sys.executable, "long.py"], tmp_path)
    assert done.code == 0, done.stderr
    early, late = map(int, done.stdout.split())
    # four times as many windows again; a record of each would be many times this
    assert late - early < 150_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00\x01", "is not text in UTF-8"),
        (b'{"version": 1, "findings": ' + b"[" * 100_000, "nested too deeply"),
        (b"", "an empty file"),
    ],
    ids=["binary", "deep", "empty"],
)
def test_no_report_at_all_is_one_clear_error(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(content)
    done = run([*REPORT, str(file), "--html", "x.html"], tmp_path)
    assert done.code == 2
    assert said in done.stderr.decode()
    assert b"Traceback" not in done.stderr
