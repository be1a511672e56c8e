"""The corpus is read once: that takes longer than most tests."""

from __future__ import annotations

import pytest

from gradaccum.demo.data import Corpus, load


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return load(1024)
