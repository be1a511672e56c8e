"""What is refused, in which words, and that nothing had changed before."""

from __future__ import annotations

import ast
import copy
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

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


@pytest.fixture
def truth() -> dict[str, Any]:
    """What a window of BATCHES makes of a fresh setup."""
    setup = Setup()
    setup.window()
    return setup.photograph()


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


def test_a_photograph_sees_a_change_of_one_bit() -> None:
    setup = Setup()
    before = setup.photograph()
    assert setup.photograph() == before
    with torch.no_grad():
        weight = setup.model.get_parameter("0.weight")
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(2.0, dtype=torch.float64))
    assert setup.photograph() != before


# --- the arguments of backward ----------------------------------------------------------------

Call = Callable[[ga.Microbatch[Tensor], Tensor], None]


def call(loss: Callable[[Tensor], Any] = lambda x: x, *args: Any, **kwargs: Any) -> Call:
    return lambda micro, x: micro.backward(loss(x), *args, **kwargs)


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x + 1


def with_count(count: Any) -> Call:
    return call(lambda x: x, count)


NOT_A_DENOMINATOR = "the count of loss terms cannot be used as a denominator."
NO_COUNT = "the loss comes without the count of its terms"
NO_GRAPH = "the loss has no graph, so it has no gradient."
NO_TENSOR = "the loss is not a tensor."
PAIR = "a term is a pair of a loss and its count under a name."
SEVERAL = "several terms carry each their own count."

BAD_CALLS: dict[str, tuple[Call, str, str]] = {
    "mean without count": (call(reduction="mean"), "loss-without-count", NO_COUNT),
    "sum without count": (call(), "loss-without-count", NO_COUNT),
    "count None": (with_count(None), "loss-without-count", NO_COUNT),
    "negative": (with_count(-1), "count", NOT_A_DENOMINATOR),
    "negative float": (with_count(-0.5), "count", NOT_A_DENOMINATOR),
    "NaN": (with_count(math.nan), "count", NOT_A_DENOMINATOR),
    "infinite": (with_count(math.inf), "count", NOT_A_DENOMINATOR),
    "larger than a float": (with_count(10**400), "count", NOT_A_DENOMINATOR),
    "bool": (with_count(True), "count", NOT_A_DENOMINATOR),
    "string": (with_count("8"), "count", NOT_A_DENOMINATOR),
    "complex": (with_count(1j), "count", NOT_A_DENOMINATOR),
    "list": (with_count([4]), "count", NOT_A_DENOMINATOR),
    "tensor of shape (1,)": (with_count(torch.ones(1)), "count", NOT_A_DENOMINATOR),
    "mask": (with_count(torch.ones(2, 3)), "count", NOT_A_DENOMINATOR),
    "bool tensor": (with_count(torch.tensor(True)), "count", NOT_A_DENOMINATOR),
    "complex tensor": (with_count(torch.tensor(1j)), "count", NOT_A_DENOMINATOR),
    "tensor NaN": (with_count(torch.tensor(math.nan)), "count", NOT_A_DENOMINATOR),
    "tensor below 0": (with_count(torch.tensor(-3)), "count", NOT_A_DENOMINATOR),
    "tensor that needs grad": (
        with_count(torch.tensor(2.0, requires_grad=True)),
        "count",
        NOT_A_DENOMINATOR,
    ),
    "array": (with_count(np.array([4])), "count", NOT_A_DENOMINATOR),
    "numpy bool": (with_count(np.True_), "count", NOT_A_DENOMINATOR),
    "numpy NaN": (with_count(np.float32("nan")), "count", NOT_A_DENOMINATOR),
    "no loss": (call(lambda x: None, 2), "loss-without-graph", NO_TENSOR),
    "float": (call(lambda x: x.item(), 2), "loss-without-graph", NO_TENSOR),
    "array loss": (call(lambda x: x.detach().numpy(), 2), "loss-without-graph", NO_TENSOR),
    "list of losses": (call(lambda x: [x, x], 2), "loss-without-graph", NO_TENSOR),
    "detached": (call(lambda x: x.detach(), 2), "loss-without-graph", NO_GRAPH),
    "under no_grad": (call(under_no_grad, 2), "loss-without-graph", NO_GRAPH),
    "integer": (call(lambda x: (x > 0).sum(), 2), "loss-without-graph", NO_GRAPH),
    "shape (1,)": (
        call(lambda x: x[None], 2),
        "loss-not-scalar",
        "the loss has shape (1,), but it must be a scalar.",
    ),
    "shape (2, 3)": (
        call(lambda x: x.expand(2, 3), 6),
        "loss-not-scalar",
        "the loss has shape (2, 3), but it must be a scalar.",
    ),
    "complex loss": (
        call(lambda x: torch.complex(x, x), 2),
        "loss-not-scalar",
        "the loss is complex, so it has no smallest value.",
    ),
    "reduction avg": (
        call(lambda x: x, 2, reduction="avg"),
        "reduction",
        "`reduction` must be 'sum' or 'mean'.",
    ),
    "reduction None": (
        call(lambda x: x, 2, reduction=None),
        "reduction",
        "`reduction` must be 'sum' or 'mean'.",
    ),
    "no terms": (call(lambda x: {}), "loss-terms", SEVERAL),
    "terms and a count": (call(lambda x: {"a": (x, 2)}, 2), "loss-terms", SEVERAL),
    "term without count": (call(lambda x: {"a": x}), "loss-terms", PAIR),
    "term of one": (call(lambda x: {"a": (x,)}), "loss-terms", PAIR),
    "term of three": (call(lambda x: {"a": (x, 2, "sum")}), "loss-terms", PAIR),
    "term with a number for a name": (call(lambda x: {1: (x, 2)}), "loss-terms", PAIR),
    "term with a bad count": (
        call(lambda x: {"a": (x, 2), "b": (x, -2)}),
        "count",
        NOT_A_DENOMINATOR,
    ),
    "term with count None": (
        call(lambda x: {"a": (x, 2), "b": (x, None)}),
        "count",
        NOT_A_DENOMINATOR,
    ),
    "detached term": (
        call(lambda x: {"a": (x, 2), "b": (x.detach(), 2)}),
        "loss-without-graph",
        NO_GRAPH,
    ),
    "term that is a float": (
        call(lambda x: {"a": (x, 2), "b": (x.item(), 2)}),
        "loss-without-graph",
        NO_GRAPH,
    ),
    "term of shape (1,)": (
        call(lambda x: {"a": (x[None], 2)}),
        "loss-not-scalar",
        "term 'a': the loss has shape (1,), but it must be a scalar.",
    ),
}


@POSITIONS
@pytest.mark.parametrize("on_stale", ["raise", "zero"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_argument_is_refused_and_the_right_one_is_taken_after_it(
    name: str, on_stale: Any, bad: int, truth: dict[str, Any]
) -> None:
    wrong, slug, problem = BAD_CALLS[name]
    setup = Setup(on_stale=on_stale)
    for i, micro in enumerate(setup.acc.microbatches(BATCHES)):
        if i == bad:
            before = setup.photograph()
            loss = setup.loss(micro.batch)
            error = refused(partial(wrong, micro, loss), errors.InputError, slug, problem)
            assert isinstance(error, ValueError)
            assert f"micro-batch {i + 1} of 3" in error.problem
            assert setup.photograph() == before
        setup.add(micro)
    assert setup.photograph() == truth


@pytest.mark.parametrize(
    "two",
    [
        2,
        2.0,
        np.int64(2),
        np.int32(2),
        np.float32(2),
        np.float64(2),
        Fraction(2),
        torch.tensor(2),
        torch.tensor(2, dtype=torch.int32),
        torch.tensor(2, dtype=torch.uint8),
        torch.tensor(2.0, dtype=torch.float16),
        torch.tensor([1, 1, 0], dtype=torch.int16).sum(dtype=torch.int16),
    ],
    ids=repr,
)
def test_every_kind_of_number_is_taken_for_a_count(two: Any, truth: dict[str, Any]) -> None:
    setup = Setup()
    for micro in setup.acc.microbatches(BATCHES):
        count = two if len(micro.batch) == 2 else 1
        micro.backward(setup.loss(micro.batch), count)
    assert micro.update is not None
    assert micro.update.count == 4
    assert type(micro.update.count) in (int, float)
    assert setup.photograph() == truth


@pytest.mark.parametrize("how", ["last", "flush", "only", "terms", "skip"])
@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_a_window_without_a_count_is_refused_and_kept(
    how: str, on_stale: Any, truth: dict[str, Any]
) -> None:
    setup = Setup(on_stale=on_stale, every=1 if how == "only" else 2)
    problem = "The window holds no loss term, so its mean is undefined."
    nothing = torch.zeros(1, 2)

    def give(micro: ga.Microbatch[Tensor]) -> None:
        loss = setup.loss(micro.batch) * 0
        if how == "terms":
            micro.backward({"a": (loss, 0), "b": (loss, torch.tensor(0))})
        else:
            micro.backward(loss, 0)

    batches = [nothing] if how == "only" else [nothing, nothing, nothing]
    loop = setup.acc.microbatches(batches)
    micro = next(loop)
    if how != "only":
        give(micro)
    if how in ("last", "terms", "skip"):
        micro = next(loop)
    before = setup.photograph()
    action: Callable[[], object] = lambda: give(micro)  # noqa: E731 - one of three actions
    if how == "flush":
        action = setup.acc.flush
    if how == "skip":
        action = micro.skip
    refused(action, errors.InputError, "window-without-count", problem)
    assert setup.photograph() == before

    setup.acc.discard()
    loop.close()
    assert all(p.grad is None for p in setup.model.parameters())
    after = Setup()
    after.model, after.optimizer, after.acc = setup.model, setup.optimizer, setup.acc
    for micro in setup.acc.microbatches([torch.cat(BATCHES)]):
        after.add(micro)
    assert after.photograph()["0.weight"] == truth["0.weight"]


def test_after_a_window_without_count_was_refused_its_last_micro_batch_may_bring_one(
    truth: dict[str, Any],
) -> None:
    setup = Setup(every=1)
    (batch,) = [torch.cat(BATCHES)]
    for micro in setup.acc.microbatches([batch]):
        with pytest.raises(errors.InputError):
            micro.backward({"mistyped": (setup.loss(batch), 0)})
        micro.backward({"ce": (setup.loss(batch), 4)})
    assert micro.update is not None
    assert micro.update.count == {"ce": 4}
    assert set(micro.update.terms) == {"ce"}
    assert setup.photograph()["0.weight"] == truth["0.weight"]


def test_a_refusal_with_on_stale_zero_lets_no_other_loss_into_the_held_gradients() -> None:
    setup = Setup(on_stale="zero", every=2)
    clean = Setup(on_stale="zero", every=2)
    for one in (setup, clean):
        for i, micro in enumerate(one.acc.microbatches([BATCHES[0][:1], BATCHES[0][1:]])):
            if i == 0:
                micro.backward(one.loss(micro.batch) * 0, 0)
                continue
            if one is setup:
                with pytest.raises(errors.InputError):
                    micro.backward(one.loss(micro.batch), 0)
                one.loss(torch.full((1, 2), 9.0)).backward()  # another loss passes through
            micro.backward(one.loss(micro.batch), 2)
    assert setup.photograph() == clean.photograph()


# --- the order of calls -----------------------------------------------------------------------


def test_backward_twice_is_refused(truth: dict[str, Any]) -> None:
    setup = Setup()
    for micro in setup.acc.microbatches(BATCHES):
        loss = setup.loss(micro.batch)
        micro.backward(loss, len(micro.batch), retain_graph=True)
        before = setup.photograph()
        for again in (partial(micro.backward, loss, 1), micro.skip):
            refused(
                again,
                errors.LoopError,
                "backward-twice",
                "backward was called twice, so its samples would count twice.",
            )
            assert setup.photograph() == before
    assert setup.photograph() == truth


def test_backward_after_skip_is_refused() -> None:
    setup = Setup()
    for micro in setup.acc.microbatches(BATCHES):
        micro.skip()
        with pytest.raises(errors.LoopError) as caught:
            setup.add(micro)
        assert caught.value.slug == "backward-twice"
    assert setup.acc.updates == 0


@POSITIONS
def test_a_micro_batch_without_a_backward_is_refused(bad: int) -> None:
    setup = Setup()

    def forget() -> None:
        for i, micro in enumerate(setup.acc.microbatches(BATCHES)):
            if i != bad:
                setup.add(micro)

    with pytest.warns(ga.OpenWindowWarning) if bad else nullcontext():
        error = refused(
            forget,
            errors.LoopError,
            "backward-never",
            f"micro-batch {bad + 1} of 3 was left without a backward.",
        )
    assert isinstance(error, RuntimeError)
    assert "micro.skip()" in error.do
    assert setup.acc.pending == bad
    assert setup.acc.updates == 0
    setup.acc.discard()
    setup.window()
    assert setup.acc.updates == 1


@pytest.mark.parametrize("when", ["the next came", "the loop ended", "discarded", "flushed"])
def test_a_micro_batch_whose_time_is_over_is_refused(when: str) -> None:
    setup = Setup()
    loop = setup.acc.microbatches(BATCHES)
    setup.add(next(loop))
    micro = next(loop)
    if when == "the next came":
        # the loop raises, because this micro-batch had no backward
        with pytest.warns(ga.OpenWindowWarning), pytest.raises(errors.LoopError):
            next(loop)
    elif when == "the loop ended":
        with pytest.warns(ga.OpenWindowWarning):
            loop.close()
    elif when == "discarded":
        setup.acc.discard()
    else:
        setup.acc.flush()
    before = setup.photograph()
    late = [lambda: setup.add(micro)]
    if when in ("discarded", "flushed"):
        micro.skip()  # it is left out already
    else:
        late.append(micro.skip)
    for action in late:
        refused(
            action,
            errors.LoopError,
            "loop-over",
            "its loop has gone on or ended, or its window was flushed or discarded.",
        )
        assert setup.photograph() == before
    setup.acc.discard()
    loop.close()


# --- somebody else in the window --------------------------------------------------------------


def another_backward(setup: Setup) -> None:
    setup.loss(torch.ones(1, 2)).backward()


def in_place(setup: Setup) -> None:
    with torch.no_grad():
        setup.model.get_parameter("2.weight").mul_(0.5)


def clip(setup: Setup) -> None:
    nn.utils.clip_grad_norm_(setup.model.parameters(), 1e-3)


def one_grad_to_none(setup: Setup) -> None:
    setup.model.get_parameter("2.bias").grad = None


def one_grad_replaced(setup: Setup) -> None:
    parameter = setup.model.get_parameter("2.bias")
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def group_added(setup: Setup) -> None:
    setup.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


GRADIENTS = "Gradients changed in the middle of a window"
PARAMETERS = "Parameters changed in the middle of a window"

INTRUDERS: dict[str, tuple[Callable[[Setup], object], str, str]] = {
    "zero_grad to None": (lambda s: s.optimizer.zero_grad(), "gradients-changed", GRADIENTS),
    "zero_grad to zeros": (
        lambda s: s.optimizer.zero_grad(set_to_none=False),
        "gradients-changed",
        GRADIENTS,
    ),
    "model.zero_grad": (lambda s: s.model.zero_grad(), "gradients-changed", GRADIENTS),
    "another backward": (another_backward, "gradients-changed", GRADIENTS),
    "a clip": (clip, "gradients-changed", GRADIENTS),
    "one gradient to None": (one_grad_to_none, "gradients-changed", GRADIENTS),
    "one gradient replaced": (one_grad_replaced, "gradients-changed", GRADIENTS),
    "optimizer.step": (lambda s: s.optimizer.step(), "parameters-changed", PARAMETERS),
    "a change in place": (in_place, "parameters-changed", PARAMETERS),
    "load_state_dict": (
        lambda s: s.model.load_state_dict(s.model.state_dict()),
        "parameters-changed",
        PARAMETERS,
    ),
    "a parameter group": (group_added, "parameters-changed", PARAMETERS),
}


@pytest.mark.parametrize(
    ("name", "at"),
    [
        (name, at)
        for name in INTRUDERS
        for at in ("next micro-batch", "last micro-batch", "flush")
        # what the optimizers hold is counted once per window, when they are about to step
        if (name, at) != ("a parameter group", "next micro-batch")
    ],
)
def test_an_intruder_in_mid_window_is_noticed_before_the_update(name: str, at: str) -> None:
    intrude, slug, problem = INTRUDERS[name]
    setup = Setup()
    loop = setup.acc.microbatches(BATCHES)
    setup.add(next(loop))
    if at == "last micro-batch":
        setup.add(next(loop))
    intrude(setup)
    before = setup.photograph()
    if at == "flush":
        action: Callable[[], object] = setup.acc.flush
    else:
        micro = next(loop)
        action = lambda: setup.add(micro)  # noqa: E731 - one of two actions
    error = refused(action, errors.InterferenceError, slug, problem)
    assert isinstance(error, RuntimeError)
    assert setup.photograph() == before

    setup.acc.discard()
    loop.close()
    assert (setup.acc.pending, setup.acc.updates) == (0, 0)
    assert all(p.grad is None for p in setup.model.parameters())
    setup.window()
    assert setup.acc.updates == 1


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("on_stale", ["raise", "zero"])
def test_a_step_in_mid_window_is_noticed_for_every_kernel(
    kind: Callable[..., Optimizer], how: dict[str, bool], on_stale: Any
) -> None:
    setup = Setup(partial(kind, lr=0.5, **how), on_stale=on_stale)
    loop = setup.acc.microbatches(BATCHES)
    setup.add(next(loop))
    if on_stale == "zero":
        another_backward(setup)  # there must be something to step with
    setup.optimizer.step()
    micro = next(loop)
    refused(lambda: setup.add(micro), errors.InterferenceError, "parameters-changed", PARAMETERS)
    setup.acc.discard()
    loop.close()


@pytest.mark.parametrize("when", ["before the first micro-batch", "after an update"])
def test_a_zero_grad_or_a_step_between_windows_is_harmless(when: str) -> None:
    setup, clean = Setup(every=2), Setup(every=2)
    batches = [*BATCHES[:2], *BATCHES[:2]]
    for micro in clean.acc.microbatches(batches):
        clean.add(micro)
    for micro in setup.acc.microbatches(batches):
        if when == "before the first micro-batch" and micro.index == 0:
            setup.optimizer.zero_grad()
        setup.add(micro)
        if micro.update and when == "after an update":
            setup.optimizer.step()  # no gradients, so nothing moves
            setup.optimizer.zero_grad(set_to_none=False)
    assert setup.photograph() == clean.photograph()


def test_a_gradient_that_appears_in_mid_window_is_noticed() -> None:
    setup = Setup()
    lonely = nn.Linear(1, 1, dtype=torch.float64)
    both = nn.ModuleList([setup.model, lonely])
    acc = ga.Accumulator(both, SGD(both.parameters(), lr=0.5), every=3)
    loop = acc.microbatches(BATCHES)
    setup.add(next(loop))
    lonely.weight.grad = torch.ones(1, 1, dtype=torch.float64)
    micro = next(loop)
    error = refused(
        lambda: setup.add(micro), errors.InterferenceError, "gradients-changed", GRADIENTS
    )
    assert "`1.weight` appeared" in error.got
    acc.discard()
    loop.close()


@pytest.mark.parametrize("how", ["update", "load_state_dict"])
@pytest.mark.parametrize("at", ["micro-batch", "flush"])
def test_a_scale_that_changes_in_mid_window_is_noticed(how: str, at: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    setup = Setup(scaler=scaler)
    loop = setup.acc.microbatches(BATCHES)
    setup.add(next(loop))
    if how == "update":
        scaler.update(new_scale=4.0)
    else:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    before = setup.photograph()
    micro = next(loop)
    refused(
        setup.acc.flush if at == "flush" else lambda: setup.add(micro),
        errors.InterferenceError,
        "scaler-updated",
        "The scaler's scale changed in the middle of a window",
    )
    assert setup.photograph() == before
    setup.acc.discard()
    loop.close()
    setup.window()
    assert setup.acc.updates == 1


# --- gradients that were there before ---------------------------------------------------------

STALE = "A gradient stands in the parameters though no micro-batch has been added"


@pytest.mark.parametrize("updates", [0, 1])
def test_a_stale_gradient_is_refused_and_left_as_it_was(updates: int) -> None:
    setup = Setup()
    for _ in range(updates):
        setup.window()
    another_backward(setup)
    before = setup.photograph()
    loop = setup.acc.microbatches(BATCHES)
    micro = next(loop)
    error = refused(lambda: setup.add(micro), errors.StaleGradientError, "stale-gradient", STALE)
    assert setup.photograph() == before
    assert "4 of 4 parameters" in error.got
    assert "`0.weight`" in error.got
    assert ("since update 0" if updates else "before the first window") in error.got
    assert "`loss.backward()` of your own" in error.got
    assert 'on_stale="zero"' in error.do
    setup.optimizer.zero_grad()
    setup.add(micro)  # the same micro-batch, once what was stale is gone
    setup.acc.discard()
    loop.close()


def test_a_stale_gradient_in_some_parameters_points_to_another_loss() -> None:
    setup = Setup()
    setup.model.get_submodule("2")(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    with pytest.raises(errors.StaleGradientError) as caught:
        setup.window()
    assert "2 of 4 parameters" in caught.value.got
    assert "another loss" in caught.value.got


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_gradient_of_zeros_is_not_stale(value: float, truth: dict[str, Any]) -> None:
    setup = Setup()
    for parameter in setup.model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    setup.window()
    assert setup.photograph() == truth


@pytest.mark.parametrize("value", [math.nan, math.inf, 5e-324])
def test_a_gradient_of_nan_or_of_the_least_number_is_stale(value: float) -> None:
    setup = Setup()
    bias = setup.model.get_parameter("2.bias")
    bias.grad = torch.full_like(bias, value)
    with pytest.raises(errors.StaleGradientError, match=re.escape(STALE)):
        setup.window()


def test_a_stale_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    acc = ga.Accumulator(embedding, SGD(embedding.parameters(), lr=0.5), every=1)
    embedding(torch.tensor([1])).sum().backward()
    loop = acc.microbatches([torch.tensor([2])])
    micro = next(loop)
    with pytest.raises(errors.StaleGradientError, match=re.escape(STALE)):
        micro.backward(embedding(micro.batch).sum(), 1)


def test_a_stale_gradient_is_dropped_where_that_was_asked(truth: dict[str, Any]) -> None:
    setup = Setup(on_stale="zero")
    another_backward(setup)
    setup.window()
    assert setup.photograph() == truth


# --- numbers that are none --------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1, 3], ids=["first", "within", "last"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["loss", "term", "mean"])
def test_a_loss_that_is_not_finite_is_refused_where_that_was_asked_and_can_be_skipped(
    form: str, value: float, bad: int, truth: dict[str, Any]
) -> None:
    setup = Setup(on_nonfinite="raise", every=4)
    batches = [*BATCHES]
    batches.insert(bad, torch.ones(1, 2))
    for i, micro in enumerate(setup.acc.microbatches(batches)):
        if i != bad:
            setup.add(micro)
            continue
        before = setup.photograph()
        loss = setup.loss(micro.batch) * value
        problem = "The loss is not finite."
        action: Callable[[], object] = partial(micro.backward, loss, 1)
        if form == "mean":
            action = partial(micro.backward, loss, 1, reduction="mean")
        if form == "term":
            problem = "The loss of term 'b' is not finite."
            action = partial(micro.backward, {"a": (setup.loss(micro.batch), 1), "b": (loss, 1)})
        error = refused(action, errors.NonFiniteError, "non-finite", problem)
        assert isinstance(error, ArithmeticError)
        assert f"micro-batch {i + 1} of 4" in error.got
        assert setup.photograph() == before
        micro.skip()
    assert setup.photograph() == truth


def test_a_gradient_that_is_not_finite_is_refused_before_the_step() -> None:
    setup = Setup(on_nonfinite="raise")
    loop = setup.acc.microbatches(BATCHES)
    for _ in range(2):
        setup.add(next(loop))
    micro = next(loop)
    # sqrt has an infinite slope at 0, and the loss itself is 0
    loss = (setup.model.get_parameter("2.bias") - 1).sqrt().sum()
    before = setup.photograph()
    error = refused(
        lambda: micro.backward(loss, 1),
        errors.NonFiniteError,
        "non-finite",
        "The window's gradient of `2.bias` is not finite.",
    )
    after = setup.photograph()
    assert "acc.discard()" in error.do
    kept = [name for name in before if name != "pending" and not name.endswith(".grad")]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    setup.acc.discard()
    loop.close()
    setup.window()
    assert setup.acc.updates == 1


def test_without_being_asked_nobody_looks() -> None:
    setup = Setup()
    for micro in setup.acc.microbatches([BATCHES[0]]):
        micro.backward(setup.loss(micro.batch) * math.nan, 2)
    assert micro.update is not None
    assert math.isnan(setup.model.get_parameter("2.bias").item())


# --- counts known ahead -----------------------------------------------------------------------


@pytest.mark.parametrize("declared", [1, 3, 1000])
def test_counts_known_ahead_that_do_not_add_up_are_refused_before_the_update(declared: int) -> None:
    setup = Setup()
    loop = setup.acc.microbatches(BATCHES, counts=lambda batch: declared)
    for _ in range(2):
        setup.add(next(loop))
    micro = next(loop)
    before = setup.photograph()
    error = refused(
        lambda: setup.add(micro),
        errors.InputError,
        "declared-count",
        "The counts that came with the losses do not add up to the count known ahead.",
    )
    assert setup.photograph() == before
    assert f"{3 * declared} declared" in error.got
    setup.acc.discard()
    loop.close()


@pytest.mark.parametrize("count", [-1, math.nan, None, "4", [1], torch.ones(2)], ids=repr)
def test_a_bad_count_known_ahead_is_refused_before_the_first_micro_batch(count: Any) -> None:
    setup = Setup()
    before = setup.photograph()
    refused(
        lambda: next(setup.acc.microbatches(BATCHES, counts=lambda batch: count)),
        errors.InputError,
        "count",
        NOT_A_DENOMINATOR,
    )
    assert setup.photograph() == before
    setup.window()


def test_a_term_that_was_declared_and_never_came_is_refused() -> None:
    setup = Setup(every=1)
    loop = setup.acc.microbatches([BATCHES[0]], counts=lambda batch: {"a": 2, "b": 2})
    micro = next(loop)
    loss = setup.loss(micro.batch)
    before = setup.photograph()
    error = refused(
        lambda: micro.backward({"a": (loss, 2)}),
        errors.InputError,
        "declared-count",
        "The counts that came with the losses do not add up to the count known ahead.",
    )
    assert "of 'b'" in error.got
    assert setup.photograph() == before


# --- the constructor --------------------------------------------------------------------------


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def build(module: Any = None, optimizer: Any = None, **options: Any) -> ga.Accumulator:
    module = model() if module is None else module
    optimizer = SGD(module.parameters(), lr=0.5) if optimizer is None else optimizer
    return ga.Accumulator(module, optimizer, **options)


class NeedsClosure(Optimizer):
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Callable[[], float]) -> float:
        return closure()


def _lbfgs() -> None:
    module = model()
    build(module, LBFGS(module.parameters()))


def _closure() -> None:
    module = model()
    build(module, NeedsClosure(module.parameters()))


def _of_a_replaced_model() -> None:
    old = model()
    optimizer = SGD(old.parameters(), lr=0.5)
    build(copy.deepcopy(old), optimizer)


def _second_of_another_model() -> None:
    module = model()
    ours, other = SGD(module.parameters(), lr=0.5), SGD(model().parameters(), lr=0.5)
    build(module, [ours, other])


def _shared_parameter() -> None:
    module = model()
    build(module, [SGD(module.parameters(), lr=0.5), SGD([next(module.parameters())], lr=0.5)])


def _foreign_scheduler() -> None:
    build(scheduler=ExponentialLR(SGD(model().parameters(), lr=0.5), 0.5))


def _plateau() -> None:
    module = model()
    optimizer = SGD(module.parameters(), lr=0.5)
    build(module, optimizer, scheduler=[ReduceLROnPlateau(optimizer)])


NO_OPTIMIZER = "That is no optimizer of torch."
NO_PARAMETERS = "holds none of the model's parameters, so no update could change the model."
WINDOW = "A window needs at least one micro-batch."
CLOSURE = "evaluates the loss several times inside each step"

BAD_BUILDS: dict[str, tuple[Callable[[], object], str, str]] = {
    "a list of models": (
        lambda: ga.Accumulator([model()], SGD(model().parameters())),
        "model",
        "The model is not a module.",
    ),
    "parameters for a model": (
        lambda: ga.Accumulator(model().parameters(), SGD(model().parameters())),
        "model",
        "The model is not a module.",
    ),
    "optimizer and model swapped": (
        lambda: ga.Accumulator(SGD(model().parameters()), model()),
        "model",
        "The model is not a module.",
    ),
    "no optimizer": (lambda: ga.Accumulator(model(), None), "optimizer", NO_OPTIMIZER),
    "an empty list of optimizers": (lambda: build(optimizer=[]), "optimizer", NO_OPTIMIZER),
    "parameters for an optimizer": (
        lambda: build(optimizer=list(model().parameters())),
        "optimizer",
        NO_OPTIMIZER,
    ),
    "a class for an optimizer": (lambda: build(optimizer=SGD), "optimizer", NO_OPTIMIZER),
    "a scheduler for an optimizer": (
        lambda: build(optimizer=ExponentialLR(SGD(model().parameters()), 0.5)),
        "optimizer",
        NO_OPTIMIZER,
    ),
    "a parameter in two optimizers": (
        _shared_parameter,
        "optimizer",
        "A parameter belongs to two optimizers, so it would be stepped twice per update.",
    ),
    "LBFGS": (_lbfgs, "optimizer-closure", CLOSURE),
    "an optimizer that needs a closure": (_closure, "optimizer-closure", CLOSURE),
    "an optimizer of a model that was replaced": (
        _of_a_replaced_model,
        "optimizer-without-model",
        NO_PARAMETERS,
    ),
    "a second optimizer of another model": (
        _second_of_another_model,
        "optimizer-without-model",
        NO_PARAMETERS,
    ),
    **{
        f"every={every!r}": (partial(build, every=every), "every", WINDOW)
        for every in (0, -1, 1.5, 2.0, "4", True, None, math.nan, math.inf, [4])
    },
    **{
        f"{name}={limit!r}": (
            partial(build, **{name: limit}),
            "clip",
            f"`{name}` must be greater than 0",
        )
        for name in ("clip_norm", "clip_value")
        for limit in (0, 0.0, -1.0, math.nan, "1.0", True, [1.0], 1j, -math.inf)
    },
    "both clips": (
        lambda: build(clip_norm=1.0, clip_value=1.0),
        "clip",
        "Clip by norm or by value",
    ),
    "ReduceLROnPlateau": (
        _plateau,
        "scheduler",
        "ReduceLROnPlateau needs a metric, which an update does not have.",
    ),
    "a scheduler of another optimizer": (
        _foreign_scheduler,
        "scheduler",
        "The scheduler drives another optimizer than the accumulator's.",
    ),
    "a function for a scheduler": (
        lambda: build(scheduler=lambda step: 0.5),
        "scheduler",
        "That is no scheduler.",
    ),
    "a name for a scheduler": (
        lambda: build(scheduler="cosine"),
        "scheduler",
        "That is no scheduler.",
    ),
    "on_stale": (lambda: build(on_stale="ignore"), "choice", "`on_stale` has no such value."),
    "on_stale None": (lambda: build(on_stale=None), "choice", "`on_stale` has no such value."),
    "on_nonfinite": (
        lambda: build(on_nonfinite="stop"),
        "choice",
        "`on_nonfinite` has no such value.",
    ),
    "a scaler that is none": (lambda: build(scaler=True), "choice", "scaler"),
    "an on_update that cannot be called": (lambda: build(on_update=5), "choice", "on_update"),
}


@pytest.mark.parametrize("name", BAD_BUILDS)
def test_an_accumulator_that_cannot_work_is_not_built(name: str) -> None:
    action, slug, problem = BAD_BUILDS[name]
    error = refused(action, errors.InputError, slug, problem)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("number", [0, 2.5, None, "2", True])
@pytest.mark.parametrize("how", ["loop", "counts", "step"])
def test_a_function_for_every_that_returns_no_whole_number_is_refused(
    how: str, number: Any
) -> None:
    setup = Setup(every=lambda update: 1 if update == 0 else number)
    setup.acc.step(BATCHES[0], lambda m, b: (setup.loss(b), len(b)))
    before = setup.photograph()
    actions: dict[str, Callable[[], object]] = {
        "loop": lambda: next(setup.acc.microbatches(BATCHES)),
        "counts": lambda: next(setup.acc.microbatches(BATCHES, counts=len)),
        "step": lambda: setup.acc.step(BATCHES[0], lambda m, b: (setup.loss(b), len(b))),
    }
    error = refused(actions[how], errors.InputError, "every", WINDOW)
    assert f"every(1) = {number!r}" in error.got
    assert setup.photograph() == before


# --- optimizers that step inside backward -----------------------------------------------------

IN_BACKWARD = "An optimizer already steps inside backward, so no gradient is left to accumulate."


def tutorial(module: nn.Module) -> None:
    """The hook of torch's tutorial on fusing the step into the backward."""
    optimizers = {p: SGD([p], lr=0.5) for p in module.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def from_torch(module: nn.Module) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.5})


def _free_hook(parameter: Tensor, optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _each(hook: Callable[[Optimizer], Callable[[Tensor], None]]) -> Callable[[nn.Module], None]:
    def install(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(hook(SGD([parameter], lr=0.5)))

    return install


class Stepper:
    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    def method(self, parameter: Tensor) -> None:
        self.inner.step()
        self.inner.zero_grad()

    __call__ = method


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    def method(self, parameter: Tensor) -> None:
        self.inner.step()
        self.inner.zero_grad()


def defaulted(optimizer: Optimizer) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor, inner: Optimizer = optimizer) -> None:
        inner.step()
        inner.zero_grad()

    return hook


HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "the tutorial's dict": tutorial,
    "_apply_optimizer_in_backward": from_torch,
    "a partial": _each(lambda o: partial(_free_hook, optimizer=o)),
    "a partial of a partial": _each(lambda o: partial(partial(_free_hook, optimizer=o))),
    "a bound method": _each(lambda o: Stepper(o).method),
    "a bound method with slots": _each(lambda o: Slotted(o).method),
    "an object that can be called": _each(Stepper),
    "a default argument": _each(defaulted),
    "a lambda": _each(lambda o: lambda p: o.step()),
}


@pytest.mark.parametrize("name", HOOKS)
def test_an_optimizer_that_steps_inside_backward_is_refused_before_anything_runs(
    name: str,
) -> None:
    module = model()
    HOOKS[name](module)
    refused(lambda: build(module), errors.InputError, "optimizer-in-backward", IN_BACKWARD)


class Opaque:
    """Hides its optimizer where no inspection finds it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.find = iter([optimizer] * 99).__next__

    def __call__(self, parameter: Tensor) -> None:
        self.find().step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_hook_that_hides_its_optimizer_is_caught_by_what_it_did(fused: bool) -> None:
    module = model()
    optimizer = SGD(module.parameters(), lr=0.5, fused=fused)
    module.get_parameter("0.weight").register_post_accumulate_grad_hook(Opaque(optimizer))
    acc = build(module, optimizer, every=2)
    loop = acc.microbatches(BATCHES)
    micro = next(loop)
    refused(
        lambda: micro.backward(module(micro.batch).sum(), 2),
        errors.InterferenceError,
        "optimizer-in-backward",
        "inside backward: an optimizer steps there, so there is nothing left to accumulate.",
    )
    acc.discard()
    assert acc.updates == 0


def _reads_the_rate(optimizer: Optimizer) -> Callable[[Tensor], None]:
    return lambda parameter: print(optimizer.param_groups[0]["lr"], end="")  # noqa: T201


def _undefined(optimizer: Optimizer) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.ndim > 9:
            assert later

    if optimizer is None:
        later = 1
    return hook


@pytest.mark.parametrize("hook", [_reads_the_rate, _undefined])
def test_a_hook_that_steps_nothing_is_no_reason_to_refuse(
    hook: Callable[[Optimizer], Callable[[Tensor], None]],
) -> None:
    module = model()
    optimizer = SGD(module.parameters(), lr=0.5)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook(optimizer))
    acc = build(module, optimizer, every=2)
    acc.step(BATCHES[0], lambda m, b: (m(b).sum(), len(b)))
    assert acc.updates == 1


# --- batches ----------------------------------------------------------------------------------


def steps(batch: Any, **options: Any) -> Callable[[Setup], object]:
    def loss_fn(module: nn.Module, micro: Any) -> tuple[Tensor, int]:
        x = micro["x"] if isinstance(micro, dict) else micro
        return module(x.double()).square().sum(), len(x)

    return lambda setup: setup.acc.step(batch, loss_fn, **options)


BAD_BATCHES: dict[str, tuple[Callable[[Setup], object], type[errors.GradaccumError], str]] = {
    "sizes that disagree": (
        steps({"x": torch.ones(4, 2), "y": torch.ones(3)}),
        errors.BatchError,
        "Tensors of the batch disagree about the number of samples.",
    ),
    "no samples": (steps(torch.ones(0, 2)), errors.BatchError, "The batch holds no samples."),
    "an empty dict": (steps({}), errors.BatchError, "The batch holds no samples."),
    "an empty list": (
        steps([], collate=torch.stack),
        errors.BatchError,
        "The batch holds no samples.",
    ),
    "a sample longer than the budget": (
        steps(torch.ones(2, 2), lengths=[2, 2], budget=1),
        errors.PlanError,
        "budget",
    ),
    "a length missing": (
        steps(torch.ones(2, 2), lengths=[2], budget=8),
        errors.BatchError,
        "There must be one length for each sample of the batch.",
    ),
    "a budget of 0": (steps(torch.ones(2, 2), budget=0), errors.GradaccumError, "budget"),
    "a budget of 1.5": (steps(torch.ones(2, 2), budget=1.5), errors.GradaccumError, "budget"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_batch_that_cannot_be_split_is_refused_before_anything_runs(name: str) -> None:
    action, kind, words = BAD_BATCHES[name]
    setup = Setup()
    setup.window()
    before = setup.photograph()
    with pytest.raises(kind) as caught:
        action(setup)
    assert words in str(caught.value)
    assert all((caught.value.got, caught.value.expected, caught.value.do)), str(caught.value)
    assert setup.photograph() == before
    setup.window()


NO_PAIR = "`loss_fn` did not return a loss and its count."

BAD_RESULTS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "a loss alone": (lambda x: x, "loss-without-count", NO_COUNT),
    "nothing": (lambda x: None, "loss-fn-result", NO_PAIR),
    "a tuple of one": (lambda x: (x,), "loss-fn-result", NO_PAIR),
    "a tuple of three": (lambda x: (x, 1, 2), "loss-fn-result", NO_PAIR),
    "a list": (lambda x: [x, 1], "loss-fn-result", NO_PAIR),
    "None for a count": (lambda x: (x, None), "loss-without-count", NO_COUNT),
    "count and loss swapped": (lambda x: (1, x), "loss-without-graph", NO_TENSOR),
    "a loss without graph": (lambda x: (x.detach(), 1), "loss-without-graph", NO_GRAPH),
    "a count below 0": (lambda x: (x, -1), "count", NOT_A_DENOMINATOR),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_loss_fn_that_returns_something_else_is_refused_and_leaves_nothing(name: str) -> None:
    result, slug, problem = BAD_RESULTS[name]
    setup = Setup()
    before = setup.photograph()
    calls = []

    def loss_fn(module: nn.Module, batch: Tensor) -> Any:
        calls.append(1)
        loss = module(batch.double()).square().sum()
        return result(loss) if len(calls) == 2 else (loss, len(batch))

    error = refused(
        lambda: setup.acc.step(torch.ones(3, 2), loss_fn), errors.InputError, slug, problem
    )
    assert "micro-batch 2 of 3" in error.problem
    assert setup.photograph() == before


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        ({"budget": 8}, "lengths-missing"),
        ({"collate": list}, "lengths-missing"),
        ({"lengths": len}, "budget-missing"),
    ],
)
def test_options_of_a_loop_that_do_not_fit_together_are_refused_at_the_call(
    options: dict[str, Any], slug: str
) -> None:
    setup = Setup()
    refused(
        lambda: setup.acc.microbatches(BATCHES, **options),
        errors.InputError,
        slug,
        "Regrouping a stream needs to know how l",
    )


def test_step_with_a_stale_gradient_leaves_it_where_it_was() -> None:
    setup = Setup()
    another_backward(setup)
    before = setup.photograph()
    with pytest.raises(errors.StaleGradientError, match=re.escape(STALE)):
        setup.acc.step(BATCHES[0], lambda m, b: (setup.loss(b), len(b)))
    assert setup.photograph() == before


# --- the messages themselves ------------------------------------------------------------------

SOURCES = Path(ga.__file__).parent


def _raised() -> Iterator[tuple[str, ast.Call]]:
    """Every place in the package where one of our errors is made, and the call."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            kind = getattr(errors, node.func.id, None)
            if isinstance(kind, type) and issubclass(kind, errors.GradaccumError):
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", node


RAISED = dict(_raised())


def test_the_search_for_messages_finds_them() -> None:
    assert len(RAISED) > 40


def test_every_message_says_what_it_got_what_it_expected_and_what_to_do() -> None:
    silent = {}
    for place, call in RAISED.items():
        missing = {"got", "expected", "do"} - {keyword.arg for keyword in call.keywords}
        # one for a missing package is a sentence with the command to type
        if missing and ast.unparse(call.func) != "MissingExtraError":
            silent[place] = sorted(missing)
    assert silent == {}


def test_every_slug_has_its_entry_in_the_docs() -> None:
    text = (SOURCES.parents[1] / "docs" / "messages.md").read_text("utf-8")
    entries = set(re.findall(r"^#+ `?([a-z-]+)`?", text, re.MULTILINE))
    slugs = {
        call.args[0].value
        for call in RAISED.values()
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    assert slugs - entries == set()


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.GradaccumError)
]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_a_copy_and_the_way_between_processes(
    kind: type[errors.GradaccumError], copied: Callable[[Any], Any]
) -> None:
    error = kind("slug", "A problem.", got="this", expected="that", do="so")
    again = copied(error)
    assert type(again) is kind
    assert str(again) == str(error)
    assert (again.slug, again.problem) == ("slug", "A problem.")
    assert (again.got, again.expected, again.do) == ("this", "that", "so")
