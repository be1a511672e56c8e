"""Helpers that the engine's tests share, handed out as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

collect_ignore = ["resume_script.py", "shortage_script.py"]  # programs that tests run
pytest.register_assert_rewrite("refusals", "ways")  # so that their asserts show values too

Trained = tuple[nn.Module, list[Optimizer]]


def everything(trained: Trained) -> dict[str, Any]:
    """Parameters, buffers and every value of the optimizers' states, by name; copies."""
    model, optimizers = trained
    found: dict[str, Any] = {f"model.{k}": v.clone() for k, v in model.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        for p, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                copied = value.clone() if isinstance(value, Tensor) else value
                found[f"optimizer {i}, parameter {p}, {name}"] = copied
    return found


def differences(one: Trained, other: Trained) -> list[str]:
    """Names of what is not equal to the bit: values, dtypes, shapes, presence."""
    left, right = everything(one), everything(other)
    return sorted(left.keys() ^ right.keys()) + [
        name for name in left.keys() & right.keys() if not _equal(left[name], right[name])
    ]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and left == right


def snap(parameters: Iterable[Tensor]) -> None:
    """Round to small integers, in place.

    Done after each update, on both sides, it keeps all arithmetic of the next one exact.
    """
    with torch.no_grad():
        for parameter in parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
                real.round_().clamp_(-2, 2)


@pytest.fixture(name="everything", scope="session")
def _everything() -> Callable[[Trained], dict[str, Any]]:
    return everything


@pytest.fixture(name="differences", scope="session")
def _differences() -> Callable[[Trained, Trained], list[str]]:
    return differences


@pytest.fixture(name="snap", scope="session")
def _snap() -> Callable[[Iterable[Tensor]], None]:
    return snap


@pytest.fixture
def truth() -> dict[str, Any]:
    """What a window of BATCHES makes of a fresh setup."""
    from refusals import Setup  # once its asserts are rewritten

    setup = Setup()
    setup.window()
    return setup.photograph()
