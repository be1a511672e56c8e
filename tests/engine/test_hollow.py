"""Tensors without numbers are refused, and a default device is nobody's but the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from gradaccum.errors import InputError


def loss_fn(model: nn.Module, x: Any) -> tuple[Tensor, int]:
    x = x["x"] if isinstance(x, dict) else x
    return model(x).square().sum(), len(x)


def build(**options: Any) -> tuple[nn.Module, ga.Accumulator]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, device="cpu", dtype=options.pop("dtype", torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, ga.Accumulator(model, optimizer, every=2, **options)


HOLLOW: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tensor": (torch.ones(4, 3, device="meta"), {}, "`batch`"),
    "dict": ({"x": torch.ones(4, 3, device="meta")}, {}, "`batch['x']`"),
    "samples": ([torch.ones(3, device="meta")] * 4, {"collate": torch.stack}, "`batch`"),
    "lengths": (torch.ones(4, 3, device="meta"), {"lengths": [3, 1, 2, 3]}, "`batch`"),
    "memory": (torch.ones(4, 3, device="meta"), {"memory": "1MiB"}, "`batch`"),
}


@pytest.mark.parametrize("name", HOLLOW)
def test_a_batch_without_numbers_is_refused_by_name(name: str) -> None:
    batch, options, named = HOLLOW[name]
    model, acc = build()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InputError, match="The batch has tensors on the meta device") as caught:
        acc.step(batch, loss_fn, **options)
    assert caught.value.slug == "on-meta"
    assert named in caught.value.got
    assert acc.pending == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def test_an_optimizer_over_parameters_without_numbers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(InputError, match="The model has parameters on the meta device") as caught:
        ga.Accumulator(model, optimizer)
    assert caught.value.slug == "on-meta"
    assert caught.value.got == "`1.weight`, `1.bias`"


def test_parameters_that_nobody_steps_may_be_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(3, 1, device="meta"))
    ga.Accumulator(model, torch.optim.SGD(model[0].parameters(), lr=0.5))


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "even": ({}, {}),
    "budget": ({}, {"lengths": [3, 1, 2, 3, 3, 1, 2, 3], "budget": 9}),
    "memory": ({}, {"memory": "1MiB"}),
    "wide": ({"accumulate_dtype": torch.float32, "dtype": torch.bfloat16}, {}),
    "compensated": ({"accumulate_dtype": "compensated", "dtype": torch.bfloat16}, {}),
    "clip": ({"clip_norm": 0.1}, {}),
    "drop": ({"on_nonfinite": "drop"}, {}),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_default_device_does_not_move_what_is_the_accumulators_own(name: str) -> None:
    """`torch.set_default_device` is for the tensors that the user makes."""
    found = []
    for default in ("cpu", "meta"):
        options, how = WAYS[name]
        model, acc = build(**options)
        batch = torch.ones(8, 3, dtype=options.get("dtype", torch.float32))
        batch[1:, 1:] = 0
        how = how | {"trim": None} if "lengths" in how else how
        with torch.device(default):
            update = acc.step(batch, loss_fn, **how)
        assert update.loss.device.type == "cpu"
        found.append([update.loss, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_fit_and_check_run_under_another_default_device() -> None:
    model = nn.Linear(3, 1)
    batch = torch.randn(8, 3)
    with torch.device("meta"):
        assert ga.fit(model, loss_fn, batch, memory="1GiB").fits
        assert ga.check(model, loss_fn, batch).equal
