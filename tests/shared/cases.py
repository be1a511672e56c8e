"""Models with a loss and optimizers each, and what plain torch makes of their whole batches.

All counts are powers of two, and parameters are rounded to integers after each update: no rounding
is left to hide a wrong factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam

from models import (
    SAMPLES,
    UPDATES,
    WIDTH,
    Checkpointed,
    Complex,
    LoRA,
    Overlapping,
    Pair,
    Scalar,
    Shared,
    Sometimes,
    Tied,
    TiedSparsely,
    convolution,
    embedding,
    frozen,
    hooked,
    integers,
    mlp,
    parametrized,
    sgd,
    squared,
    whole_numbers,
)


@dataclass(frozen=True)
class Case:
    """A model, the summed loss of some rows, and the optimizers of that loss."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Pair] = lambda m, x: squared(m, x)
    optimizers: Callable[[nn.Module], list[Optimizer]] = lambda m: [sgd(m)]
    clips: bool = True
    """Whether torch can clip its gradients."""
    exact_loss: bool = True
    """Whether the value of the loss has no rounding either, as its gradient has none."""


# --- losses and optimizers --------------------------------------------------------------------


def penalised(model: nn.Module, x: Tensor) -> Pair:
    """WGAN-GP's shape: the loss has a gradient in it."""
    x = x.clone().requires_grad_()
    out = model(x).square().sum(1)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.sum() + (slope.square().sum(1) - 1).sum(), len(x)


def shared_encoder(model: nn.Module, x: Tensor) -> Pair:
    """Two heads' losses meet in one encoder."""
    hidden = model.get_submodule("0")(x)
    head = model.get_submodule("2")
    return head(hidden.relu()).square().sum() + 2 * head(-hidden).sum(), len(x)


def as_images(model: nn.Module, x: Tensor) -> Pair:
    images = torch.stack([x, x.flip(1)], 1).view(len(x), 2, 2, 2)
    images = F.pad(images, (1, 0, 1, 0)).contiguous(memory_format=torch.channels_last)
    return (model(images) - 1).square().sum(), len(x)


def several_groups(model: nn.Module) -> list[Optimizer]:
    first, second = model.get_submodule("0"), model.get_submodule("2")
    groups = [
        {"params": []},
        {"params": list(first.parameters()), "lr": 0.25, "weight_decay": 0.5},
        {"params": [second.weight], "momentum": 0.0},
        {"params": [second.bias]},
    ]
    return [SGD(groups, lr=0.5, momentum=0.5)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    # torch has Muon from 2.9 on; two optimizers for one loss are what is shown here
    first = getattr(torch.optim, "Muon", SGD)
    return [first(matrices, lr=0.5), AdamW(others, lr=0.5)]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.5)]


def linear_in_weights(model: nn.Module, x: Tensor) -> Pair:
    """Its gradient does not depend on the weights, which `max_norm` makes irrational."""
    return (model(x) * x).sum(), len(x)


CASES: dict[str, Case] = {
    "mlp": Case(mlp),
    "adamw": Case(mlp, optimizers=adamw),
    "for-loop optimizer": Case(mlp, optimizers=lambda m: [sgd(m, foreach=False)]),
    "fused float64": Case(mlp, optimizers=lambda m: [sgd(m, fused=True)]),
    "fused float32": Case(
        lambda: mlp().float(),
        lambda m, x: squared(m, x.float()),
        lambda m: [AdamW(m.parameters(), lr=0.5, fused=True)],
    ),
    "fused with an empty first group": Case(
        lambda: mlp().float(),
        lambda m, x: squared(m, x.float()),
        lambda m: [SGD([{"params": []}, {"params": [*m.parameters()]}], lr=0.5, fused=True)],
    ),
    "amsgrad, maximize": Case(
        mlp,
        optimizers=lambda m: [Adam(m.parameters(), lr=0.5, amsgrad=True, maximize=True)],
    ),
    "tied weights": Case(lambda: whole_numbers(Tied())),
    "frozen parameters": Case(frozen, optimizers=adamw),
    "lora, all parameters in the optimizer": Case(lambda: whole_numbers(LoRA())),
    "lora, its own in the optimizer": Case(
        lambda: whole_numbers(LoRA()),
        optimizers=lambda m: [AdamW([p for p in m.parameters() if p.requires_grad], lr=0.5)],
    ),
    "an optimizer over a part": Case(
        mlp, optimizers=lambda m: [AdamW(m.get_submodule("2").parameters(), lr=0.5)]
    ),
    "several groups, one empty": Case(mlp, optimizers=several_groups),
    "two optimizers": Case(mlp, optimizers=muon_and_adamw),
    "sparse embedding, SGD": Case(
        embedding(sparse=True),
        optimizers=lambda m: [SGD(m.parameters(), lr=0.5)],
        clips=False,
    ),
    "sparse embedding, SparseAdam": Case(
        embedding(sparse=True),
        optimizers=lambda m: [SparseAdam(m.parameters(), lr=0.5)],
        clips=False,
    ),
    "sparse, then dense": Case(
        lambda: whole_numbers(TiedSparsely(dense_at=6.0)),
        optimizers=lambda m: [SGD(m.parameters(), lr=0.5)],
        clips=False,
    ),
    "dense, then sparse": Case(
        lambda: whole_numbers(TiedSparsely(dense_at=5.0)),
        optimizers=lambda m: [SGD(m.parameters(), lr=0.5)],
        clips=False,
    ),
    "max_norm embedding": Case(embedding(max_norm=1.5), linear_in_weights, exact_loss=False),
    "complex parameters": Case(Complex, optimizers=lambda m: [sgd(m)]),
    "complex parameters, Adam": Case(Complex, optimizers=lambda m: [Adam(m.parameters(), lr=0.5)]),
    "gradient penalty": Case(mlp, penalised),
    "checkpoint, re-entrant": Case(lambda: whole_numbers(Checkpointed(True))),
    "checkpoint, not re-entrant": Case(lambda: whole_numbers(Checkpointed(False))),
    "used in the first micro-batch only": Case(
        lambda: whole_numbers(Sometimes(5.0)), optimizers=adamw
    ),
    "used in the last micro-batch only": Case(
        lambda: whole_numbers(Sometimes(6.0)), optimizers=adamw
    ),
    "used in none": Case(lambda: whole_numbers(Sometimes(9.0)), optimizers=adamw),
    "shared encoder": Case(mlp, shared_encoder),
    "parametrized weight": Case(parametrized),
    "gradient hooks of the user": Case(hooked),
    "gradients that share memory": Case(lambda: whole_numbers(Shared()), clips=False),
    "gradients that overlap in memory": Case(lambda: whole_numbers(Overlapping()), clips=False),
    "scalar parameter": Case(lambda: whole_numbers(Scalar())),
    "channels_last convolution": Case(convolution, as_images),
}


# --- the whole batch --------------------------------------------------------------------------


def whole_batches() -> list[Tensor]:
    """Batches whose first row is marked 5 and whose last is marked 6."""
    batches = [integers(SAMPLES, WIDTH, seed=10 + i) for i in range(UPDATES)]
    for batch in batches:
        batch[0, 0], batch[-1, 0] = 5.0, 6.0
    return batches


def micro_batches(*sizes: int) -> list[Tensor]:
    return [micro for batch in whole_batches() for micro in batch.split(list(sizes))]


def owned(optimizers: list[Optimizer]) -> list[Tensor]:
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def whole(
    case: Case, snap: Callable[[Any], None], clip: float | None = None
) -> tuple[nn.Module, list[Optimizer], list[float]]:
    """Plain torch, with the undivided batch."""
    model, losses = case.model(), []
    optimizers = case.optimizers(model)
    for batch in whole_batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, count = case.loss(model, batch)
        (total / count).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(owned(optimizers), clip)
        for optimizer in optimizers:
            optimizer.step()
        losses.append((total / count).item())
        snap(owned(optimizers))
    return model, optimizers, losses
