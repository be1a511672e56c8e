"""`--fix`: the mended loop is right, its comments stand, and what is not certain stays."""

import re
from pathlib import Path

import pytest

from gradaccum.errors import MissingExtraError
from gradaccum.faults import CATALOGUE
from gradaccum.lint.command import run
from gradaccum.lint.engine import lint
from gradaccum.lint.files.sources import Source
from gradaccum.lint.settings import load

pytest.importorskip("libcst")

from gradaccum.lint.mends.apply import mend
from gradaccum.lint.mends.edits import CERTAIN

OFF_BY_ONE = """\
for i, (x, y) in enumerate(loader):
    loss = nn.functional.mse_loss(model(x), y) / every
    loss.backward()
    if i % every == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
LOADER = "loader = torch.utils.data.DataLoader(data)\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def relint(source: Source):
    return lint([source], load([], []), 1).findings


def bad(code: str) -> str:
    fault = CATALOGUE[code]
    loop = LOADER + OFF_BY_ONE if code == "GA303" else fault.bad
    lines = f"{fault.prelude}\n{loop}".splitlines()
    marked = [
        f"{line}  # keep {number}" if line.strip() and '"""' not in line else line
        for number, line in enumerate(lines)
    ]
    return "\n".join(marked) + "\n"


@pytest.mark.parametrize("code", sorted(CERTAIN))
def test_what_is_certain_is_mended_and_every_comment_stands(code):
    text = bad(code)
    source = Source("train.py", text.encode())
    before = relint(source)
    assert [item.code for item in before].count(code) >= 1
    new, left = mend(source, before, relint)
    assert code not in [item.code for item in left]
    assert [item.code for item in relint(Source("train.py", new))] == [item.code for item in left]
    marks = re.compile(r"# keep \d+")
    assert sorted(marks.findall(new.decode())) == sorted(marks.findall(text))
    assert mend(Source("train.py", new), left, relint)[0] == new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # the clip hides in a condition of its own, so moving it would leave an empty block
        ("    nn.utils.clip_grad_norm_", "    if True:\n        nn.utils.clip_grad_norm_"),
        # its result is used before the step
        ("    nn.utils.clip_grad_norm_", "    norm = nn.utils.clip_grad_norm_"),
    ],
)
def test_what_is_not_certain_stays(old, new):
    fault = CATALOGUE["GA401"]
    text = f"{fault.prelude}\n{fault.bad}".replace(old, new, 1)
    assert text != f"{fault.prelude}\n{fault.bad}"
    source = Source("train.py", text.encode())
    found = relint(source)
    assert "GA401" in [item.code for item in found]
    assert mend(source, found, relint) == (source.data, found)


def test_a_mend_that_brings_another_fault_is_not_made():
    fault = CATALOGUE["GA303"]  # nine batches: with the right condition the ninth is lost
    source = Source("train.py", f"{fault.prelude}\n{fault.bad}".encode())
    found = relint(source)
    assert [item.code for item in found] == ["GA303"]
    assert mend(source, found, relint)[0] == source.data


def test_line_endings_and_encodings_stay(tmp_path):
    text = f"# -*- coding: latin-1 -*-\n# caf\u00e9\n{bad('GA101')}"
    path = tmp_path / "train.py"
    path.write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    assert run(["--fix", str(path)]) == 0
    data = path.read_bytes()
    assert b"caf\xe9" in data
    assert data.count(b"\n") == data.count(b"\r\n")
    assert data.count(b"zero_grad()") == 1


def test_without_libcst_it_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(bad("GA101"))
    monkeypatch.setitem(__import__("sys").modules, "gradaccum.lint.mends.everywhere", None)
    with pytest.raises(MissingExtraError, match=re.escape("gradaccum[fix]")):
        run(["--fix", "train.py"])
    assert Path("train.py").read_text() == bad("GA101")
