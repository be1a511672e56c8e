"""A small training to make mistakes in, and what a refusal owes: its words, and no change."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import gradaccum as ga
from gradaccum import errors

BATCHES = [torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[0.0, 1.0]]), torch.ones(1, 2)]
POSITIONS = pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "within", "last"])


class Setup:
    """A small model with momentum in its optimizer, an accumulator, and a photograph of both."""

    def __init__(self, optimizer: Callable[..., Optimizer] | None = None, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).double()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1.0)
        make = optimizer or partial(SGD, lr=2**-8, momentum=0.5)
        self.optimizer = make(self.model.parameters())
        self.acc = ga.Accumulator(self.model, self.optimizer, **{"every": 3, **options})

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(batch.double()).square().sum()

    def add(self, micro: ga.Microbatch[Tensor]) -> None:
        micro.backward(self.loss(micro.batch), len(micro.batch))

    def window(self) -> None:
        """A whole window, as it should be."""
        for micro in self.acc.microbatches(BATCHES):
            self.add(micro)

    def photograph(self) -> dict[str, Any]:
        found: dict[str, Any] = {"updates": self.acc.updates, "pending": self.acc.pending}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().tolist()
            found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.tolist()
            found[f"{name}.hooks"] = len(parameter._post_accumulate_grad_hooks or {})
        for i, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                found[f"{i}.{name}"] = value.tolist() if isinstance(value, Tensor) else value
        return found


def refused(
    action: Callable[[], object], kind: type[errors.GradaccumError], slug: str, problem: str
) -> errors.GradaccumError:
    """Assert that an action is refused, with all that a message owes."""
    with pytest.raises(kind, match=re.escape(problem)) as caught:
        action()
    error = caught.value
    assert type(error) is kind
    assert error.slug == slug
    assert problem in error.problem
    for field in ("got", "expected", "do"):
        assert getattr(error, field), f"the message does not say `{field}`"
    lines = str(error).splitlines()
    assert lines[0] == error.problem
    assert lines[1:] == [
        f"  Got:      {error.got}",
        f"  Expected: {error.expected}",
        f"  Do this:  {error.do}",
        f"  More:     docs/messages.md#{slug}",
    ]
    return error


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def build(module: Any = None, optimizer: Any = None, **options: Any) -> ga.Accumulator:
    module = model() if module is None else module
    optimizer = SGD(module.parameters(), lr=0.5) if optimizer is None else optimizer
    return ga.Accumulator(module, optimizer, **options)


NOT_A_DENOMINATOR = "the count of loss terms cannot be used as a denominator."
NO_COUNT = "the loss comes without the count of its terms"
NO_GRAPH = "the loss has no graph, so it has no gradient."
NO_TENSOR = "the loss is not a tensor."


def another_backward(setup: Setup) -> None:
    setup.loss(torch.ones(1, 2)).backward()
