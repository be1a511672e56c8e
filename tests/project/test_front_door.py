"""The front door: what is public, and what works without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradaccum as ga

NO_TORCH = "import sys; sys.modules['torch'] = None\n"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )


def test_the_public_names_are_exactly_these() -> None:
    assert ga.__all__ == [
        "Accumulator",
        "Fit",
        "GradaccumError",
        "Microbatch",
        "OpenWindowWarning",
        "Plan",
        "Report",
        "SplitWarning",
        "Update",
        "__version__",
        "assert_splittable",
        "check",
        "fit",
        "plan",
        "watch",
    ]
    for name in ga.__all__:
        assert getattr(ga, name) is not None
    assert dir(ga) == ga.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Acumulator'"):
        ga.Acumulator  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import gradaccum; gradaccum.__version__; print(gradaccum.plan([1, 2, 3], budget=4))",
        "import sys; sys.argv = ['gradaccum', '--help']; import gradaccum.cli as c; c.main()",
        "import sys; sys.argv = ['gradaccum', 'plan', sys.argv[1]]; "
        "import gradaccum.cli as c; c.main()",
    ],
    ids=["import and plan", "--help", "plan"],
)
def test_it_works_without_torch(code: str, tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("3 4 5\n")
    done = python(NO_TORCH + code, str(tmp_path / "lengths"))
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_engine_without_torch_is_one_sentence_with_the_command() -> None:
    done = python(NO_TORCH + "import gradaccum; gradaccum.Accumulator")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()
    assert any("pip install 'gradaccum[torch]'" in line for line in last)
    assert "No module named" not in done.stderr


def test_the_demo_without_torch_is_one_message_and_no_traceback() -> None:
    code = "import sys; sys.argv = ['gradaccum', 'demo']; import gradaccum.cli as c; c.main()"
    done = python(NO_TORCH + code)
    assert done.returncode == 2
    assert "pip install 'gradaccum[demo]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["plan", "--help"], ["plan", "-"]])
def test_the_command_line_never_imports_torch(command: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['gradaccum', *{command!r}]\n"
        "import gradaccum.cli as c\n"
        "try: c.main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="3 4", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_that_test_can_fail() -> None:
    done = python("import sys, gradaccum; gradaccum.Accumulator; assert 'torch' not in sys.modules")
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_the_options_of_the_command_line_are_these() -> None:
    def options(*command: str) -> set[str]:
        done = python("import gradaccum.cli as c; c.main()", *command, "--help")
        return set(re.findall(r"--[a-z-]+", done.stdout))

    assert options() == {"--help", "--version"}
    assert options("plan") == {
        "--budget",
        "--help",
        "--json",
        "--microbatches",
        "--overhead",
        "--size",
    }
    assert options("demo") == {
        "--batch",
        "--device",
        "--help",
        "--max-length",
        "--out",
        "--seed",
        "--updates",
    }
