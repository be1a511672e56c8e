"""What people met who used the library on models of their own."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from gradaccum.errors import BatchError, InputError, StateError


def build(**options: Any) -> tuple[nn.Module, ga.Accumulator]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, ga.Accumulator(model, optimizer, every=2, **options)


def samples(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(int(n), 3, generator=generator) for n in (1, 5, 2, 4)]


@pytest.mark.parametrize("how", ["lengths", "counts"])
def test_a_gathered_window_is_not_resumed_on_other_batches(how: str) -> None:
    options: dict[str, Any] = {"lengths": len, "budget": 5, "collate": torch.cat}
    data: list[Any] = [samples(0), samples(1)[:3], samples(2)[1:], samples(3)[:2]]
    if how == "counts":
        options, data = {"counts": len}, [torch.cat(some) for some in data]
    model, acc = build()
    loop = acc.microbatches(data, **options)
    micro = next(loop)
    micro.backward(model(micro.batch).sum(), len(micro.batch))
    state = acc.state_dict()
    with pytest.warns(ga.OpenWindowWarning):
        loop.close()

    model, acc = build()
    acc.load_state_dict(state)
    wrong = acc.microbatches(islice(data, 1, None), **options)
    with pytest.warns(ga.OpenWindowWarning), pytest.raises(StateError, match="does not give"):
        next(wrong)
    acc.load_state_dict(state)
    for micro in acc.microbatches(data, **options):
        micro.backward(model(micro.batch).sum(), len(micro.batch))
    assert acc.updates == 2


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(4, 2)] * 8,
        [(torch.ones(4), 1)] * 4,
        [[torch.ones(4), torch.ones(4)]] * 4,
    ],
    ids=["tensors", "tuples", "lists"],
)
def test_a_list_of_samples_without_collate_is_not_cut_in_the_middle(batch: Any) -> None:
    _, acc = build()
    with pytest.raises(BatchError, match="how single samples come"):
        acc.step(batch, lambda m, b: (m(b[0]).sum(), 1))


@pytest.mark.parametrize("kind", [list, tuple])
def test_inputs_and_targets_in_a_list_are_a_batch(kind: Any) -> None:
    _, acc = build()
    batch = kind([torch.ones(6, 3), torch.zeros(6, 3)])
    update = acc.step(batch, lambda m, b: (m(b[0] - b[1]).sum(), len(b[0])))
    assert update.count == 6


def test_step_takes_the_means_that_models_return() -> None:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    updates = []
    for reduction in ("sum", "mean"):
        model, acc = build()

        def loss_fn(net: nn.Module, batch: Tensor, reduction: str = reduction) -> Any:
            losses = net(batch).square()
            return (losses.sum() if reduction == "sum" else losses.mean()), len(batch)

        update = acc.step(x, loss_fn, reduction=reduction)
        updates.append((float(update.loss), model.weight.detach()))
    assert updates[0][0] == pytest.approx(updates[1][0], rel=1e-6)
    torch.testing.assert_close(updates[0][1], updates[1][1])
    with pytest.raises(InputError, match="'sum' or 'mean'"):
        build()[1].step(x, lambda m, b: (m(b).sum(), len(b)), reduction="avg")


def test_an_autocast_region_around_updates_does_not_keep_old_weights() -> None:
    x = torch.ones(4, 3)
    losses: dict[bool, list[float]] = {}
    for outer in (False, True):
        _, acc = build()

        def loss_fn(net: nn.Module, batch: Tensor, outer: bool = outer) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
                return net(batch).float().square().sum(), len(batch)

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outer):
            losses[outer] = [float(acc.step(x, loss_fn).loss) for _ in range(3)]
    assert losses[True] == losses[False]
    assert len(set(losses[True])) == 3


def test_a_wrapper_that_decides_itself_when_to_step_is_refused() -> None:
    class Wrapper(torch.optim.Optimizer):
        """As in Accelerate: a subclass that never calls the base class's constructor."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> Any:
            return self.optimizer.param_groups

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="wraps an optimizer") as caught:
        ga.Accumulator(model, Wrapper(optimizer))
    assert "wrapper.optimizer" in caught.value.do


def test_an_accumulator_says_where_it_stands() -> None:
    model, acc = build()
    loop = acc.microbatches([torch.ones(1, 3)] * 4)
    for _ in range(3):
        micro = next(loop)
        micro.backward(model(micro.batch).sum(), 1)
    assert repr(acc) == "Accumulator(Linear, SGD, updates=1, pending=1)"
    acc.discard()
    loop.close()
