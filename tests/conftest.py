"""What every test starts from."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import settings

collect_ignore = ["typing_use.py"]  # for type checkers

# A parallel sum has an order of its own, and many tests compare to the bit.
torch.set_num_threads(1)
# `benchmarks/gpu.sh` runs tests that name no device on one.
if os.environ.get("GRADACCUM_DEVICE"):
    torch.set_default_device(os.environ["GRADACCUM_DEVICE"])
# The same examples on every machine, and no failure because a machine was busy.
settings.register_profile("gradaccum", deadline=None, derandomize=True)
settings.load_profile("gradaccum")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)
