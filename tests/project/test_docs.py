"""The documents' examples run, and every error has its entry."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "docs/index.md", "docs/check.md", "docs/coupling.md"]


def examples() -> list[tuple[str, str]]:
    found = []
    for name in DOCUMENTS:
        blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.M | re.S)
        found += [(f"{name}, example {i + 1}", block) for i, block in enumerate(blocks)]
    return found


def test_there_are_examples() -> None:
    assert sum(name.startswith("README") for name, _ in examples()) == 3
    assert len(examples()) == 9


@pytest.mark.parametrize(("name", "code"), examples(), ids=[name for name, _ in examples()])
def test_example_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "example"})  # what a reader would type


def slugs_in_source() -> set[str]:
    """First arguments of the errors that are raised, read off the source."""
    found = set()
    for path in (ROOT / "src" / "gradaccum").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                found.update(d.value for a, d in named if a.arg == "slug" and d is not None)
            if not isinstance(node, ast.Call):
                continue
            # `kind_of(error)` is the class of a ShortageError
            name = ast.unparse(node.func)
            made = name.endswith("Error") or name == "kind_of(error)"
            given = node.args[:1] if made else []
            given += [keyword.value for keyword in node.keywords if keyword.arg == "slug"]
            slugs = [one.value for one in given if isinstance(one, ast.Constant)]
            found.update(slug for slug in slugs if re.fullmatch(r"[a-z-]+", str(slug)))
    return found


def test_every_error_has_an_entry_and_every_entry_an_error() -> None:
    entries = re.findall(r"^## (\S+)$", (ROOT / "docs" / "messages.md").read_text(), re.M)
    assert len(entries) == len(set(entries))
    warnings = {"open-window", "split-batchnorm", "split-dropout"}
    assert slugs_in_source() - set(entries) == set()
    assert set(entries) - slugs_in_source() - warnings == set()
    assert len(slugs_in_source()) > 40


def test_readme_shows_both_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
