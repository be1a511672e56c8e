"""Every message says what we got, what we expected and what to do, and has its entry."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gradaccum as ga
from gradaccum import errors

SOURCES = Path(ga.__file__).parent


def _raised() -> Iterator[tuple[str, ast.Call]]:
    """Every place in the package where one of our errors is made, and the call."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            # what `kind_of` returns is a ShortageError that other code catches too
            name = "ShortageError" if name == "kind_of(error)" else name
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, errors.GradaccumError):
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", node


RAISED = dict(_raised())


def test_the_search_for_messages_finds_them() -> None:
    assert len(RAISED) > 40


def test_every_message_says_what_it_got_what_it_expected_and_what_to_do() -> None:
    silent = {}
    for place, call in RAISED.items():
        missing = {"got", "expected", "do"} - {keyword.arg for keyword in call.keywords}
        # one for a missing package is a sentence with the command to type
        if missing and ast.unparse(call.func) != "MissingExtraError":
            silent[place] = sorted(missing)
    assert silent == {}


def test_every_slug_has_its_entry_in_the_docs() -> None:
    text = (SOURCES.parents[1] / "docs" / "messages.md").read_text("utf-8")
    entries = set(re.findall(r"^#+ `?([a-z-]+)`?", text, re.MULTILINE))
    slugs = {
        call.args[0].value
        for call in RAISED.values()
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    assert slugs - entries == set()


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.GradaccumError)
]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_a_copy_and_the_way_between_processes(
    kind: type[errors.GradaccumError], copied: Callable[[Any], Any]
) -> None:
    error = kind("slug", "A problem.", got="this", expected="that", do="so")
    again = copied(error)
    assert type(again) is kind
    assert str(again) == str(error)
    assert (again.slug, again.problem) == ("slug", "A problem.")
    assert (again.got, again.expected, again.do) == ("this", "that", "so")
