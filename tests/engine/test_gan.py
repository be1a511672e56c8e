"""Two losses that meet in one model: each keeps to its own window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import gradaccum as ga
from cases import CASES, micro_batches, owned, whole
from models import WIDTH, Pair, whole_numbers


class Gan:
    """Generator and discriminator, polynomial and small, with the sums of both losses."""

    def __init__(self) -> None:
        self.generator = whole_numbers(nn.Linear(WIDTH, WIDTH))
        self.discriminator = whole_numbers(nn.Linear(WIDTH, 1))
        self.generator_sgd = SGD(self.generator.parameters(), lr=0.25, momentum=0.5)
        self.discriminator_sgd = SGD(self.discriminator.parameters(), lr=0.25, momentum=0.5)

    def judge(self, x: Tensor, *, detach: bool) -> Pair:
        fake = self.generator(x.flip(1))
        fake = fake.detach() if detach else fake
        real_loss = (self.discriminator(x) - 1).square().sum()
        return real_loss + self.discriminator(fake).square().sum(), len(x)

    def forge(self, x: Tensor) -> Pair:
        return (self.discriminator(self.generator(x)) - 1).square().sum(), len(x)

    def trained(self) -> tuple[nn.Module, list[Optimizer]]:
        both = nn.ModuleList([self.generator, self.discriminator])
        return both, [self.generator_sgd, self.discriminator_sgd]


@dataclass
class ByHand:
    """Sums `autograd.grad` over a window's micro-batches; never looks at what is in `.grad`."""

    optimizer: Optimizer
    every: int
    snap: Callable[[Any], None]

    def __post_init__(self) -> None:
        self.parameters = owned([self.optimizer])
        self.sums = [torch.zeros_like(p) for p in self.parameters]
        self.count = self.seen = 0

    def add(self, total: Tensor, count: int) -> None:
        for held, grad in zip(
            self.sums, torch.autograd.grad(total, self.parameters, retain_graph=True), strict=True
        ):
            held += grad
        self.count, self.seen = self.count + count, self.seen + 1
        if self.seen == self.every:
            for parameter, held in zip(self.parameters, self.sums, strict=True):
                parameter.grad = held / self.count
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.snap(self.parameters)
            self.__post_init__()


def gan_batches(every: int) -> list[Tensor]:
    """Micro-batches of which any window counts to a power of two."""
    return micro_batches(2, 2, 2, 2)[:8] if every == 1 else micro_batches(1, 3, 1, 3)[:8]


@pytest.mark.parametrize("detach", [True, False], ids=["detached", "not detached"])
@pytest.mark.parametrize(("every_d", "every_g"), [(1, 1), (4, 4), (2, 4), (4, 2)])
def test_a_gan_with_interleaved_windows_keeps_each_loss_to_its_own(
    every_d: int,
    every_g: int,
    detach: bool,
    differences: Callable[..., list[str]],
    snap: Callable[[Any], None],
) -> None:
    truth = Gan()
    judge = ByHand(truth.discriminator_sgd, every_d, snap)
    forge = ByHand(truth.generator_sgd, every_g, snap)
    batches = gan_batches(every_d)
    for batch in batches:
        judge.add(*truth.judge(batch, detach=detach))
        forge.add(*truth.forge(batch))

    gan = Gan()
    acc_d = ga.Accumulator(
        gan.discriminator,
        gan.discriminator_sgd,
        every=every_d,
        on_stale="zero",
        on_update=lambda update: snap(gan.discriminator.parameters()),
    )
    acc_g = ga.Accumulator(
        gan.generator,
        gan.generator_sgd,
        every=every_g,
        on_stale="raise" if detach else "zero",
        on_update=lambda update: snap(gan.generator.parameters()),
    )
    loops = zip(acc_d.microbatches(batches), acc_g.microbatches(batches), strict=True)
    for judged, forged in loops:
        judged.backward(*gan.judge(judged.batch, detach=detach))
        forged.backward(*gan.forge(forged.batch))

    assert acc_d.updates == 8 // every_d
    assert acc_g.updates == 8 // every_g
    assert differences(gan.trained(), truth.trained()) == []


def test_a_gan_that_forgets_the_leftovers_trains_otherwise(
    differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    def train(forget: bool) -> Gan:
        gan = Gan()
        for batch in gan_batches(1):
            if not forget:
                gan.discriminator_sgd.zero_grad()
            total, count = gan.judge(batch, detach=True)
            (total / count).backward()
            gan.discriminator_sgd.step()
            gan.discriminator_sgd.zero_grad()
            snap(gan.discriminator.parameters())
            total, count = gan.forge(batch)
            (total / count).backward()
            gan.generator_sgd.step()
            gan.generator_sgd.zero_grad()
            snap(gan.generator.parameters())
        return gan

    assert differences(train(forget=True).trained(), train(forget=False).trained()) != []


@pytest.mark.parametrize(
    ("every", "slug"), [(1, "stale-gradient"), (2, "gradients-changed")], ids=["start", "within"]
)
def test_a_gan_with_on_stale_raise_is_told_of_the_other_loss(every: int, slug: str) -> None:
    gan = Gan()
    acc_d = ga.Accumulator(gan.discriminator, gan.discriminator_sgd, every=every)
    acc_g = ga.Accumulator(gan.generator, gan.generator_sgd, every=every)
    judging, forging = (
        acc_d.microbatches(gan_batches(every)),
        acc_g.microbatches(gan_batches(every)),
    )
    judged, forged = next(judging), next(forging)
    judged.backward(*gan.judge(judged.batch, detach=True))
    forged.backward(*gan.forge(forged.batch))
    before = {k: v.clone() for k, v in gan.discriminator.state_dict().items()}

    judged = next(judging)
    with pytest.raises(ga.GradaccumError) as caught:
        judged.backward(*gan.judge(judged.batch, detach=True))

    assert caught.value.slug == slug
    assert 'on_stale="zero"' in caught.value.do
    assert "`weight`" in caught.value.got
    after = gan.discriminator.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    acc_d.discard()
    acc_g.discard()


def test_an_evaluation_of_another_loss_between_micro_batches_is_dropped_with_on_stale_zero(
    differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    case = CASES["mlp"]
    reference, reference_optimizers, _ = whole(case, snap)
    model = case.model()
    optimizers = case.optimizers(model)
    acc = ga.Accumulator(
        model,
        optimizers,
        every=4,
        on_stale="zero",
        on_update=lambda update: snap(owned(optimizers)),
    )
    for micro in acc.microbatches(micro_batches(4, 2, 1, 1)):
        model(micro.batch).sum().backward()
        micro.backward(*case.loss(model, micro.batch))
        model(micro.batch).sum().backward()

    assert differences((model, optimizers), (reference, reference_optimizers)) == []
