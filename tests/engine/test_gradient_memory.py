"""Gradients as autograd stores them: sparse, in shared memory, as views of something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import gradaccum as ga
from cases import micro_batches, whole_batches
from models import Overlapping, Shared, embedding, squared, whole_numbers


@pytest.mark.parametrize("clip", [{"clip_norm": 0.5}, {"clip_value": 0.5}], ids=str)
def test_a_sparse_gradient_is_clipped_as_its_dense_twin(
    clip: dict[str, float], differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    def build(sparse: bool) -> tuple[nn.Module, list[Optimizer]]:
        model = embedding(sparse=sparse)()
        return model, [SGD(model.parameters(), lr=0.5)]

    dense, sparse = build(sparse=False), build(sparse=True)
    for batch in whole_batches():
        total, count = squared(dense[0], batch)
        (total / count).backward()
        if "clip_norm" in clip:
            nn.utils.clip_grad_norm_(dense[0].parameters(), clip["clip_norm"])
        else:
            nn.utils.clip_grad_value_(dense[0].parameters(), clip["clip_value"])
        dense[1][0].step()
        dense[1][0].zero_grad()
        snap(dense[0].parameters())

    acc = ga.Accumulator(
        *sparse, every=4, on_update=lambda update: snap(sparse[0].parameters()), **clip
    )
    for micro in acc.microbatches(micro_batches(4, 2, 1, 1)):
        micro.backward(*squared(sparse[0], micro.batch))
    assert differences(sparse, dense) == []


@pytest.mark.parametrize("functional", [False, True], ids=["module", "function"])
def test_sparse_gradients_do_not_grow_with_the_micro_batches(functional: bool) -> None:
    # torch itself coalesces only where there are more rows than the dense gradient has numbers
    embedding = nn.Embedding(8, 64, sparse=True)
    acc = ga.Accumulator(embedding, SGD(embedding.parameters(), lr=1.0), every=300)
    rows_held = []
    for micro in acc.microbatches([torch.arange(8)] * 200):
        if functional:
            out = F.embedding(micro.batch, embedding.weight, sparse=True)
        else:
            out = embedding(micro.batch)
        micro.backward(out.sum(), 8)
        if embedding.weight.grad is not None:
            rows_held.append(embedding.weight.grad._nnz())
    assert len(rows_held) == 199
    assert max(rows_held) <= 3 * 8


@pytest.mark.parametrize("sizes", [[8], [4, 2, 1, 1]], ids=str)
@pytest.mark.parametrize("clip", [{"clip_norm": 0.5}, {"clip_value": 0.5}], ids=str)
@pytest.mark.parametrize("kind", [Shared, Overlapping])
def test_gradients_in_one_memory_are_clipped_once(
    kind: Callable[[], nn.Module], clip: dict[str, float], sizes: list[int]
) -> None:
    model, truth = whole_numbers(kind()), whole_numbers(kind())
    batch = whole_batches()[0]
    total, count = squared(truth, batch)
    grads = torch.autograd.grad(total / count, list(truth.parameters()))
    for parameter, grad in zip(truth.parameters(), grads, strict=True):
        parameter.grad = grad.clone()
    if "clip_norm" in clip:
        nn.utils.clip_grad_norm_(truth.parameters(), clip["clip_norm"])
    else:
        nn.utils.clip_grad_value_(truth.parameters(), clip["clip_value"])
    SGD(truth.parameters(), lr=1.0).step()

    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1.0), every=len(sizes), **clip)
    for micro in acc.microbatches(batch.split(sizes)):
        micro.backward(*squared(model, micro.batch))
    for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda p: p.squeeze(),
        lambda p: p.reshape(()),
        lambda p: p.view(()),
        lambda p: p[0],
        lambda p: p.sum(),
        lambda p: p.unsqueeze(0).squeeze(),
        lambda p: p.expand(1).squeeze(),
    ],
    ids=["squeeze", "reshape", "view", "index", "sum", "twice", "expand"],
)
def test_what_enters_a_loss_is_not_taken_for_a_gradient(
    view: Callable[[Tensor], Tensor], scaled: bool
) -> None:
    """Autograd may keep a view of the tensor that a backward began with, and add to it in place."""
    model = nn.Module()
    model.one = nn.Parameter(torch.zeros(1))
    model.other = nn.Parameter(torch.zeros(()))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1.0), every=4, scaler=scaler)
    for micro in acc.microbatches([1] * 8):
        micro.backward(view(model.one) + model.other, 1)
    assert acc.updates == 2
    assert (model.one.item(), model.other.item()) == (-2.0, -2.0)
