"""Notebooks, columns and flake8: the same findings by other ways in."""

import ast
import json

from gradaccum.faults import CATALOGUE
from gradaccum.lint.command import run
from gradaccum.lint.files.notebooks import code_of
from gradaccum.lint.flake8 import Checker

BAD = f"{CATALOGUE['GA102'].prelude}\n{CATALOGUE['GA102'].bad}"
TEXT = """\
  x = 1
  y = '''
!not a command
'''
"""
CELLS = [
    "files = !ls\n!pip install \\\n    torch\nlen?\n",
    "%%bash\nfor x in *; do echo $x; done\n",
    TEXT,
    "def broken(:\n",
    BAD,
]


def notebook(sources: list[str]) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": one} for one in sources]})


def test_a_notebook_is_read_cell_by_cell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.ipynb").write_text(notebook(CELLS))
    assert run(["train.ipynb"]) == 1
    out = capsys.readouterr().out
    assert "train.ipynb:cell 4:1:12: error GA001" in out
    assert "train.ipynb:cell 5:12:5: error GA102" in out
    assert out.count(": error ") == 2


def test_what_only_ipython_understands_is_taken_out_and_text_is_not():
    code = code_of(notebook(CELLS[:3]).encode())
    assert code.broken == []
    ast.parse(code.text)
    assert "!not a command" in code.text
    assert "pip" not in code.text
    assert [first for _, first in code.starts] == [1, 6, 9]


def test_a_cell_of_plain_python_is_left_as_it_is():
    plain = "a = 7\nb = a % 3\nc = '''\n%matplotlib\n'''"
    assert code_of(notebook([plain]).encode()).text == plain + "\n"


def test_columns_count_characters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = BAD.replace("    optimizer.zero_grad()", "    '\u00e9\u00e9'; optimizer.zero_grad()")
    (tmp_path / "wide.py").write_text(text, encoding="utf-8")
    run(["wide.py"])
    assert "wide.py:12:11: error GA102" in capsys.readouterr().out


def test_flake8_is_told_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checker = Checker(ast.parse(BAD), "bad.py", BAD.splitlines(keepends=True))
    (found,) = checker.run()
    assert found[:2] == (12, 4)
    assert found[2].startswith("GA102 ")
