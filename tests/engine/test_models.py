"""Any model: its update equals the whole batch's to the bit, parameters and optimizer state.

Weights and data are small integers, every activation is exact (ReLU, products), all counts are
powers of two, and both sides round their parameters to integers after each update: no rounding is
left to hide a wrong factor. What cannot be exact has a derived bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import gradaccum as ga
from cases import CASES, adamw, micro_batches, owned, whole, whole_batches
from models import SAMPLES, UPDATES, WIDTH, Sometimes, mlp, sgd, squared, whole_numbers
from ways import WAYS

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("way_name", WAYS)
@pytest.mark.parametrize("case_name", CASES)
def test_every_model_in_every_loop_equals_its_whole_batch(
    case_name: str,
    way_name: str,
    differences: Callable[..., list[str]],
    snap: Callable[[Any], None],
) -> None:
    case = CASES[case_name]
    run, options = WAYS[way_name]
    if "clip_norm" in options and not case.clips:
        options = {**options, "clip_norm": math.inf}  # torch itself cannot clip sparse gradients
    clip = options.get("clip_norm")
    reference, reference_optimizers, losses = whole(
        case, snap, None if clip in (None, math.inf) else clip
    )
    model = case.model()
    optimizers = case.optimizers(model)
    acc = ga.Accumulator(
        model, optimizers, on_update=lambda update: snap(owned(optimizers)), **options
    )

    updates = list(run(acc, model, case))

    assert differences((model, optimizers), (reference, reference_optimizers)) == []
    # SAMPLES * WIDTH products of size below 64 are added up in one order or another
    slack = 0.0 if case.exact_loss else SAMPLES * WIDTH * 64 * EPS
    assert [float(update.loss) for update in updates] == pytest.approx(losses, rel=0, abs=slack)
    assert [update.index for update in updates] == list(range(UPDATES))
    assert all(parameter.grad is None for parameter in owned(optimizers))


@pytest.mark.parametrize("case_name", CASES)
def test_a_mean_of_means_gives_another_update(
    case_name: str, differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    case = CASES[case_name]
    reference, reference_optimizers, _ = whole(case, snap)
    model = case.model()
    optimizers = case.optimizers(model)
    for batch in whole_batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in batch.split([4, 2, 1, 1]):
            total, count = case.loss(model, micro)
            (total / count / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
        snap(owned(optimizers))

    assert differences((model, optimizers), (reference, reference_optimizers)) != []


def test_the_comparison_sees_one_unit_in_the_last_place(
    differences: Callable[..., list[str]],
) -> None:
    one, other = mlp(), mlp()
    assert differences((one, [sgd(one)]), (other, [sgd(other)])) == []
    with torch.no_grad():
        weight = other.get_parameter("0.weight")
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0, dtype=torch.float64))
    assert differences((one, [sgd(one)]), (other, [sgd(other)])) == ["model.0.weight"]


@pytest.mark.parametrize("mark", [5.0, 6.0], ids=["first micro-batch", "last micro-batch"])
def test_a_parameter_that_no_row_used_has_no_gradient_and_no_state(mark: float) -> None:
    model = whole_numbers(Sometimes(mark))
    assert isinstance(model, Sometimes)
    (optimizer,) = adamw(model)
    seen: list[dict[str, bool]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append({n: p.grad is not None for n, p in model.named_parameters()})
    )
    acc = ga.Accumulator(model, optimizer, every=4)

    for micro in acc.microbatches(whole_batches()[0].split([4, 2, 1, 1])):
        micro.backward(*squared(model, micro.batch))

    assert seen == [{n: not n.startswith("never") for n, _ in model.named_parameters()}]
    assert model.rare.weight in optimizer.state
    assert model.never.weight not in optimizer.state


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_an_update_without_any_gradient_changes_nothing(clip: Any, fused: bool) -> None:
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = sgd(nn.ModuleList([model.get_submodule("2")]), fused=fused)
    acc = ga.Accumulator(model, optimizer, every=4, **clip)
    for micro in acc.microbatches(micro_batches(4, 2, 1, 1)[:4]):
        hidden = model.get_submodule("0")(micro.batch)
        micro.backward(hidden.sum(), len(micro.batch))
    assert micro.update is not None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["state"] == {}


def test_a_layer_frozen_in_mid_window_keeps_the_gradient_it_had_by_then(
    differences: Callable[..., list[str]],
) -> None:
    model, truth = mlp(), mlp()
    optimizer, reference = sgd(model), sgd(truth)
    batch = whole_batches()[0]
    squared(truth, batch[:6])[0].div(8).backward()
    truth.get_submodule("0").requires_grad_(False)
    squared(truth, batch[6:])[0].div(8).backward()
    reference.step()

    acc = ga.Accumulator(model, optimizer, every=4)
    for micro in acc.microbatches(batch.split([4, 2, 1, 1])):
        micro.backward(*squared(model, micro.batch))
        if micro.index == 1:
            model.get_submodule("0").requires_grad_(False)
    assert differences((model, [optimizer]), (truth, [reference])) == []


def test_a_parameter_group_added_between_windows_is_accumulated_from_then_on(
    differences: Callable[..., list[str]],
) -> None:
    def train(whole_batch: bool) -> tuple[nn.Module, list[Optimizer]]:
        model = mlp()
        optimizer = SGD(model.get_submodule("2").parameters(), lr=0.5)
        acc = ga.Accumulator(model, optimizer, every=1 if whole_batch else 4)
        sizes = [SAMPLES] if whole_batch else [4, 2, 1, 1]
        for micro in acc.microbatches(micro_batches(*sizes)[: 2 * len(sizes)]):
            micro.backward(*squared(model, micro.batch))
            if micro.update and micro.update.index == 0:
                model.zero_grad()  # the first layer's gradients belonged to nobody so far
                optimizer.add_param_group({"params": [*model.get_submodule("0").parameters()]})
        return model, [optimizer]

    assert differences(train(whole_batch=False), train(whole_batch=True)) == []
