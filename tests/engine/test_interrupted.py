"""An interrupt between any two lines leaves a window that can be dropped, and nothing else."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from gradaccum.engine.grads import Gradients
from gradaccum.errors import LoopError


def build(**options: Any) -> tuple[nn.Module, ga.Accumulator]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, ga.Accumulator(model, optimizer, every=2, **options)


def window(model: nn.Module, acc: ga.Accumulator) -> None:
    for micro in acc.microbatches([torch.ones(1, 2), torch.ones(3, 2)]):
        micro.backward(model(micro.batch).sum(), len(micro.batch))


def after_one_window() -> list[Tensor]:
    model, acc = build()
    window(model, acc)
    return [p.detach() for p in model.parameters()]


def assert_next_window_is_right(model: nn.Module, acc: ga.Accumulator) -> None:
    acc.discard()
    window(model, acc)
    for one, other in zip(model.parameters(), after_one_window(), strict=True):
        assert torch.equal(one, other)


def test_an_interrupt_while_hooks_are_installed_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, acc = build()
    register, calls = Tensor.register_post_accumulate_grad_hook, []

    def interrupted(self: Tensor, hook: Any) -> Any:
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return register(self, hook)

    monkeypatch.setattr(Tensor, "register_post_accumulate_grad_hook", interrupted)
    with pytest.warns(ga.OpenWindowWarning), pytest.raises(KeyboardInterrupt):
        window(model, acc)
    monkeypatch.undo()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert_next_window_is_right(model, acc)


def interrupt_in(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Gradients, *arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Gradients, place, interrupt)


@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_an_interrupt_behind_the_last_backward_breaks_the_window(
    monkeypatch: pytest.MonkeyPatch, on_stale: Any
) -> None:
    model, acc = build(on_stale=on_stale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # loops that other tests left open say so when they are collected
    with monkeypatch.context() as patch:
        interrupt_in("release", patch)
        with pytest.warns(ga.OpenWindowWarning) as caught, pytest.raises(KeyboardInterrupt):
            window(model, acc)
    assert "flush" not in str(caught[0].message)
    for attempt in (acc.flush, acc.state_dict, lambda: acc.step(torch.ones(1, 2), None)):
        with pytest.raises(LoopError, match="cut short by an error"):
            attempt()
    assert_next_window_is_right(model, acc)


@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_an_interrupt_behind_the_first_backward_leaves_an_empty_window(
    monkeypatch: pytest.MonkeyPatch, on_stale: Any
) -> None:
    model, acc = build(on_stale=on_stale)
    with monkeypatch.context() as patch:
        interrupt_in("seal", patch)
        with pytest.raises(KeyboardInterrupt):
            window(model, acc)
    assert acc.pending == 0
    assert all(p.grad is None for p in model.parameters())
    window(model, acc)
    for one, other in zip(model.parameters(), after_one_window(), strict=True):
        assert torch.equal(one, other)


def test_a_scaled_update_that_fails_can_be_dropped_and_the_next_one_made() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, acc = build(scaler=scaler)
    (optimizer,) = acc._core.optimizers

    def fail(*_: Any) -> None:
        raise MemoryError

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.warns(ga.OpenWindowWarning), pytest.raises(MemoryError):
        window(model, acc)
    hook.remove()
    assert_next_window_is_right(model, acc)
