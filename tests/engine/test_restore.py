"""In a loop of the user's own, a micro-batch that fails leaves the window as it was before."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradaccum as ga
from gradaccum.engine.grads import outside
from gradaccum.errors import InputError, LoopError, ShortageError
from shortage import Countdown, FailingForward, failing_arrivals

SIZES = (3, 5, 2, 4)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.1},
    "two terms": {},
    "sparse": {},
    "sparse, two terms": {},
    "zero": {"on_stale": "zero"},
    "zero, two terms": {"on_stale": "zero"},
    "pooled": {"batchnorm": "pooled"},
    "raising": {"on_nonfinite": "raise"},
    "dropping, two terms": {"on_nonfinite": "drop"},
    "scaled": {"scaler": True},
    "wide": {"accumulate_dtype": torch.float64},
    "wide, two terms": {"accumulate_dtype": torch.float64},
    "compensated, sparse": {"accumulate_dtype": "compensated"},
}


class Net(nn.Module):
    """All that a forward may change: torch's generator, Python's, buffers, a plain counter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 4, sparse="sparse" in kind)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5))
        self.last = nn.Linear(6, 1)
        self.register_buffer("rebound", torch.zeros(()))
        self.calls = 0
        if "compensated" in kind:
            self.embed.bfloat16()
            self.last.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        embedded = self.embed(x).mean(1).float()
        self.rebound = self.rebound * 0.5 + embedded.detach().mean()
        hidden = self.layers(embedded) * (self.calls + random.random())
        return self.last(hidden.to(self.last.weight.dtype)).float()


class Training:
    """A window of four micro-batches of other sizes, all of which may fail."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.net = Net(kind)
        self.kind = kind
        chosen = {"batchnorm": "microbatch", "restore": True, **KINDS[kind], **options}
        if chosen.get("scaler"):
            chosen["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.acc = ga.Accumulator(self.net, optimizer, every=len(SIZES), **chosen)
        generator = torch.Generator().manual_seed(1)
        self.data = [torch.randint(0, 16, (size, 3), generator=generator) for size in SIZES]
        torch.manual_seed(2)
        random.seed(3)

    def forward(self, micro: Any) -> Any:
        loss = (self.net(micro.batch) - 1).square().sum()
        scaler = self.acc._core.scaling.scaler
        if "two terms" not in self.kind:
            return loss, len(micro.batch)
        assert scaler is None
        size = self.net.last.weight.float().square().sum() + self.net.layers[0].weight.abs().sum()
        return {"fit": (loss, len(micro.batch)), "size": (size, 1)}

    def backward(self, micro: Any, loss: Any) -> None:
        micro.backward(*loss) if isinstance(loss, tuple) else micro.backward(loss)

    def photograph(self) -> list[Any]:
        """All that a micro-batch might have left: state, generators, buffers, gradients."""
        found: list[Any] = [torch.get_rng_state(), random.getstate(), self.net.calls]
        found += [value.clone() for value in self.net.state_dict().values()]
        found += [p.grad if p.grad is None else p.grad.clone() for p in self.net.parameters()]
        window = self.acc._core.window
        if window is not None:
            state = self.acc.state_dict()
            del state["random"]
            found += _leaves(state)
        return found


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in (key, *_leaves(value[key]))]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_equal, one, other))


def _equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a == b)
    if a.is_sparse and b.is_sparse:
        a, b = a.double().coalesce(), b.double().coalesce()
        return torch.equal(a.indices(), b.indices()) and torch.equal(a.values(), b.values())
    # a sum that has been made wide, and got nothing, is what it was
    return a.layout == b.layout and torch.equal(a.double(), b.double())


class FailingOperations(TorchDispatchMode):
    """Ticks before every operator that needs new memory, autograd's own included."""

    def __init__(self, countdown: Countdown) -> None:
        super().__init__()
        self.countdown = countdown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = any("Tensor" in str(one.type) for one in func._schema.returns)
        if tensors and not func._schema.is_mutable and not func.is_view:
            self.countdown.tick()
        return func(*args, **(kwargs or {}))


@contextmanager
def failing(place: str, training: Training, countdown: Countdown) -> Generator[None]:
    if place == "operations":
        with FailingOperations(countdown):
            yield
    else:
        with failing_arrivals(training.net, countdown):
            yield


def run(training: Training, bad: int, place: str, at: int) -> tuple[list[Any], Countdown]:
    """A window whose micro-batch `bad` fails at a place, and is tried again."""
    countdown, said = Countdown(at), []
    for micro in training.acc.microbatches(training.data):
        before = training.photograph()
        loss = training.forward(micro)
        try:
            if micro.index == bad:
                with failing(place, training, countdown):
                    training.backward(micro, loss)
            else:
                training.backward(micro, loss)
        except ShortageError as error:
            said.append(str(error))
            assert same(training.photograph(), before)
            training.backward(micro, training.forward(micro))
    assert all("is as it was before" in text for text in said)
    return training.photograph(), countdown


# In the last micro-batch the update follows in the same call, and running out in a step is no
# matter of a micro-batch; its arrivals all come before.
PLACES = [(bad, "arrivals") for bad in range(4)] + [(bad, "operations") for bad in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_that_fails_anywhere_leaves_the_window_as_it_was(kind: str) -> None:
    truth, _ = run(Training(kind), -1, "arrivals", -1)
    # what is done for it moves no bit
    assert same(run(Training(kind, restore=None), -1, "arrivals", -1)[0], truth)
    failures = 0
    for bad, place in PLACES:
        _, counted = run(Training(kind), bad, place, -1)
        assert counted.seen >= 5
        for at in range(1, counted.seen + 1):
            found, countdown = run(Training(kind), bad, place, at)
            assert countdown.raised == 1, (bad, place, at)
            assert same(found, truth), (bad, place, at)
            failures += 1
    assert failures > 40


@pytest.mark.parametrize("kind", ["plain", "two terms", "pooled", "wide"])
def test_a_forward_that_fails_anywhere_and_is_skipped_never_was(kind: str) -> None:
    for bad in range(4):
        training = Training(kind)
        for micro in training.acc.microbatches(training.data):
            if micro.index == bad and micro.batch is training.data[bad]:
                micro.skip()
            else:
                training.backward(micro, training.forward(micro))
        truth = training.photograph()
        for at in range(1, 100):
            training, countdown = Training(kind), Countdown(at)
            for micro in training.acc.microbatches(training.data):
                if micro.batch is not training.data[bad]:
                    training.backward(micro, training.forward(micro))
                    continue
                with suppress(torch.OutOfMemoryError), FailingForward(countdown):
                    training.forward(micro)
                micro.skip()
            assert same(training.photograph(), truth), (bad, at)
            if not countdown.raised:
                break
        assert 10 < at < 99


def arrivals_fail(training: Training, bad: int, at: int) -> ShortageError:
    """Go on to a micro-batch whose backward fails; the loop is left there."""
    for micro in training.acc.microbatches(training.data):
        loss = training.forward(micro)
        if micro.index < bad:
            training.backward(micro, loss)
            continue
        with failing_arrivals(training.net, Countdown(at)), pytest.raises(ShortageError) as caught:
            training.backward(micro, loss)
        break
    return caught.value


@pytest.mark.filterwarnings("ignore::gradaccum.errors.OpenWindowWarning")
@pytest.mark.parametrize("kind", ["plain", "wide", "compensated, sparse", "zero"])
def test_without_a_choice_it_begins_when_memory_has_run_out(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "_SMALL", 1)  # wide sums are added to by every gradient
    training = Training(kind, restore=None)
    error = arrivals_fail(training, 1, 3)
    assert "the window is broken" in str(error)
    assert "from now on each micro-batch's gradients are kept apart" in str(error)
    with pytest.raises(LoopError, match="cut short"):
        training.acc.flush()
    training.acc.discard()
    assert "is as it was before" in str(arrivals_fail(training, 1, 3))
    assert training.acc.pending == 1
    assert training.acc.flush() is not None


@pytest.mark.filterwarnings("ignore::gradaccum.errors.OpenWindowWarning")
@pytest.mark.parametrize("restore", [None, False])
def test_small_gradients_that_wait_for_one_another_are_taken_back(restore: bool | None) -> None:
    """Wide sums have been added to by none of them yet."""
    training = Training("wide", restore=restore)
    assert "is as it was before" in str(arrivals_fail(training, 1, 3))
    training.acc.flush()
    whole = Training("wide", restore=restore)
    for micro in whole.acc.microbatches(whole.data):
        whole.backward(micro, whole.forward(micro))
        break
    whole.acc.flush()
    assert all(map(torch.equal, training.net.parameters(), whole.net.parameters()))


@pytest.mark.filterwarnings("ignore::gradaccum.errors.OpenWindowWarning")
def test_it_can_be_declined() -> None:
    training = Training("plain", restore=False)
    for _ in range(2):
        error = arrivals_fail(training, 1, 3)
        assert "the window is broken" in str(error)
        assert "without restore=False" in str(error)
        training.acc.discard()


@pytest.mark.filterwarnings("ignore::gradaccum.errors.OpenWindowWarning")
def test_what_had_not_arrived_breaks_no_window() -> None:
    training = Training("plain", restore=False)
    assert "is as it was before" in str(arrivals_fail(training, 1, 1))
    assert training.acc.flush() is not None


def test_another_choice_is_refused() -> None:
    net = nn.Linear(1, 1)
    with pytest.raises(InputError, match="`restore` has no such value"):
        ga.Accumulator(net, torch.optim.SGD(net.parameters(), lr=0.1), restore="yes")  # type: ignore[arg-type]
