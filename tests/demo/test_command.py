from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradaccum.demo.options import DemoOptions
from gradaccum.errors import InputError, MissingExtraError


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradaccum", "demo", *arguments]
    # Two threads that wait for each other on a busy machine would take minutes.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=env
    )


@pytest.mark.slow
def test_a_small_demo_prints_the_verdict_and_writes_everything(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    done = demo("--updates", "1", "--batch", "24", "--max-length", "48", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    record = json.loads((out / "results.json").read_text())
    assert record["same"]
    assert " ".join(done.stdout.split()).count(record["verdict"]) == 1
    for title in ("whole batch", "usual loop", "gradaccum"):
        assert re.search(rf"^ {title} .* ms|^ {title} .* s ", done.stdout, re.MULTILINE)
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "Written" not in line)
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "demo.svg").read_text().startswith("<?xml")
    assert {path.name for path in out.iterdir()} == {"demo.png", "demo.svg", "results.json"}
    runs = record["runs"]
    assert runs["ours"]["distance"] < 1e-5 < runs["usual"]["distance"]
    assert runs["ours"]["tokens"] <= runs["ours"]["padded"] < runs["usual"]["padded"]
    assert record["settings"]["updates"] == len(runs["ours"]["seconds"]) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--batch", "0"),
        ("--updates", "0"),
        ("--updates", "-3"),
        ("--max-length", "1"),
        ("--seed", "-1"),
        ("--seed", str(2**63)),
        ("--device", "tpu"),
        ("--device", "cuda:x"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_loaded(option: str, value: str) -> None:
    name = option[2:].replace("-", "_")
    options = DemoOptions(**{name: value if name == "device" else int(value)})
    with pytest.raises(InputError, match=re.escape(f"{option} {value}")):
        options.check()


def test_the_command_line_says_it_in_one_sentence_and_exits_with_2(tmp_path: Path) -> None:
    done = demo("--batch", "0", "--out", str(tmp_path / "never"))
    assert done.returncode == 2
    assert "gradaccum: --batch is out of range." in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "never").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        DemoOptions(out=tmp_path / "file" / "out").check()
    with pytest.raises(InputError, match="cannot be written"):
        DemoOptions(out=tmp_path / "file").check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = demo("--device", "cuda", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "torch sees no CUDA" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("module", ["torch", "matplotlib"])
def test_a_missing_extra_names_the_install_command(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gradaccum.demo.options.find_spec", lambda name: None if name == module else object()
    )
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'gradaccum[demo]'")):
        DemoOptions(out=tmp_path).check()


def test_two_minutes_end_a_demo_only_where_no_number_was_asked() -> None:
    assert not DemoOptions().enough(7, 100.0)
    assert DemoOptions().enough(1, 121.0)
    assert DemoOptions().enough(8, 1.0)
    assert not DemoOptions(updates=9).enough(8, 1000.0)
    assert DemoOptions(updates=9).enough(9, 1.0)
