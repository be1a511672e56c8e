"""Functions of torch's, with the modes that are active seen by their parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch

__all__ = ["RUNS_BACKWARD", "opened"]

RUNS_BACKWARD = frozenset({torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward})
"""What runs a backward, in which activation checkpointing runs forwards again."""

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@lru_cache(maxsize=64)
def opened(func: FunctionType) -> Callable[..., Any]:
    """A copy of a function that does not ask a mode before it runs.

    A mode that has a function to run is off meanwhile, and the function hands itself back to one
    that is on. A copy that does not ask can be run with the mode on, which then sees its parts.
    """
    known = {**func.__globals__, **dict.fromkeys(_ASKS, _never)}
    copy = FunctionType(func.__code__, known, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(*_: object) -> bool:
    return False
