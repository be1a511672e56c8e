"""The pytest plugin: a test that asks for `training_doctor` fails if its loop has a fault.

pytest loads it in every run where gradaccum is installed, so it imports torch only in tests that
ask for the fixture.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradaccum.doctor.watch import Watch

__all__ = ["training_doctor"]


@pytest.fixture
def training_doctor() -> Generator[Watch]:
    """Watch the training that this test runs; the test fails if its loop has a fault.

    Errors and warnings count, notes do not.

    Example:
        ```python
        def test_training(training_doctor):
            train(model, optimizer, loader)
        ```
    """
    from gradaccum.doctor.watch import watch  # noqa: PLC0415 - loads torch

    with watch() as trace:
        yield trace


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Judge while the test runs: what a fixture finds after it would be an error of its own."""
    result = yield
    trace: Any = pyfuncitem.funcargs.get("training_doctor")
    if trace is not None:
        trace.close()
        if any(finding.severity != "note" for finding in trace.findings):
            pytest.fail(trace.report(), pytrace=False)
    return result
