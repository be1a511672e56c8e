"""A micro-batch whose gradients land apart from the sums can be undone wherever it failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from gradaccum.engine import wide
from gradaccum.engine.wide import Wide

OTHERS: list[Any] = [torch.float32, "compensated"]
KINDS = ["one term", "two terms", "sparse"]
MICROS, PARAMETERS = 4, 5


class Net(nn.Module):
    """An embedding, and two layers of which one stays in float32."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8, sparse=sparse).bfloat16()
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.wide = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(self.embed(x).mean(1)).tanh().float())


class Failing:
    """Raises at the `at`-th call, once."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("injected")


def micro_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 16, (2 + i, 3), generator=generator) for i in range(MICROS)]


def add(micro: ga.Microbatch[Tensor], net: Net, kind: str) -> None:
    loss = (net(micro.batch) - 1).square().sum()
    if kind == "two terms":
        size = net.wide.weight.abs().sum() + net.narrow.weight.float().square().sum()
        micro.backward({"fit": (loss, len(micro.batch)), "size": (size, 1)})
    else:
        micro.backward(loss, len(micro.batch))


def train(
    kind: str, accumulate: Any, fail: Callable[[Net, int], Any] | None = None
) -> tuple[list[Tensor], int]:
    """A window in which each micro-batch is tried again if it fails.

    Returns:
        The parameters after it, and how many micro-batches failed.
    """
    net, failed = Net(kind == "sparse"), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    acc = ga.Accumulator(net, optimizer, every=MICROS, accumulate_dtype=accumulate, restore=True)
    core = acc._core
    for micro in acc.microbatches(micro_batches()):
        before = acc.state_dict()
        try:
            if fail is None:
                add(micro, net, kind)
            else:
                with fail(net, micro.index):
                    add(micro, net, kind)
        except MemoryError:
            failed += 1
            assert all(p.grad is None for p in net.parameters())
            assert core.window is not None
            assert not core.window.broken
            if micro.index:
                held = core.gradients.held() + [
                    grad for grads in core.gradients.held_apart().values() for grad in grads
                ]
                kept = before["gradients"] + [g for gs in before["apart"].values() for g in gs]
                for one, other in zip(held, kept, strict=True):
                    assert (one is None) == (other is None)
                    if one is not None:
                        assert torch.equal(one.to_dense(), other.to(one.dtype).to_dense())
            add(micro, net, kind)
    return [p.detach().clone() for p in net.parameters()], failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", OTHERS, ids=str)
def test_a_backward_that_fails_at_any_gradients_arrival(kind: str, accumulate: Any) -> None:
    truth, _ = train(kind, accumulate)
    for bad in range(MICROS):
        for at in range(1, PARAMETERS + 1):

            @contextmanager
            def fail(net: Net, index: int, bad: int = bad, at: int = at) -> Iterator[None]:
                failing = Failing(at if index == bad else -1)
                hooks = [
                    p.register_post_accumulate_grad_hook(lambda _: failing())
                    for p in net.parameters()
                ]
                try:
                    yield
                finally:
                    for hook in hooks:
                        hook.remove()

            found, failed = train(kind, accumulate, fail)
            assert failed == 1
            assert all(map(torch.equal, found, truth)), (bad, at)


PLACES = ["_widened", "_appended", "rooms"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", OTHERS, ids=str)
def test_a_commit_that_finds_no_memory(
    kind: str, accumulate: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, _ = train(kind, accumulate)
    failures = 0
    for bad in range(MICROS - 1):  # the last one's commit is part of the update
        for at in range(1, PARAMETERS + 1):

            @contextmanager
            def fail(net: Net, index: int, bad: int = bad, at: int = at) -> Iterator[None]:
                failing = Failing(at if index == bad else -1)
                target, name = (wide._Rooms, "__init__") if place == "rooms" else (Wide, place)
                whole = getattr(target, name)

                def limited(*args: Any, **kwargs: Any) -> Any:
                    result = whole(*args, **kwargs)
                    failing()
                    return result

                with monkeypatch.context() as patch:
                    patch.setattr(target, name, limited)
                    yield

            found, failed = train(kind, accumulate, fail)
            failures += failed
            assert all(map(torch.equal, found, truth)), (bad, at)
    # nothing is appended where no gradient is sparse
    assert (failures > 0) == (place != "_appended" or kind == "sparse")


def test_an_interrupt_while_sums_are_added_to_cannot_be_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Net(sparse=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    acc = ga.Accumulator(net, optimizer, every=MICROS, accumulate_dtype=torch.float32)
    loop = acc.microbatches(micro_batches())
    add(next(loop), net, "one term")

    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wide._Rooms, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            add(next(loop), net, "one term")
    with pytest.raises(ga.GradaccumError, match="cut short by an error"):
        acc.state_dict()
    acc.discard()
    loop.close()
    for micro in acc.microbatches(micro_batches()):
        add(micro, net, "one term")
    fresh, _ = train("one term", torch.float32)
    assert all(map(torch.equal, net.parameters(), fresh))
