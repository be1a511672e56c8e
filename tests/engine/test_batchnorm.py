"""BatchNorm's running estimates and statistics, under each policy, against plain torch.

A normalisation that comes first sees the data themselves, so that what the whole batch makes of its
running estimates is what a window must make of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import gradaccum as ga
from gradaccum import errors
from refusals import refused

EPS = torch.finfo(torch.float64).eps
SAMPLES, CHANNELS, UPDATES = 12, 3, 3
SPLITS = {"even": [3, 3, 3, 3], "ragged": [5, 2, 4, 1], "one": [12]}
NORMS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d with a length": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (2, 3)),
    "3d": (nn.BatchNorm3d, (2, 1, 3)),
    "instances": (lambda c, **o: nn.InstanceNorm2d(c, track_running_stats=True, **o), (2, 3)),
}
MOMENTA = [0.1, 0.5, 1.0, None]


class First(nn.Module):
    """A normalisation of the data, and something to learn after it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.head = nn.Conv1d(CHANNELS, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).flatten(2) if x.dim() > 2 else self.norm(x)[..., None])


def made(kind: str = "2d", **options: Any) -> First:
    torch.manual_seed(0)
    return First(NORMS[kind][0](CHANNELS, **options)).double()


def batches(kind: str = "2d", seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (SAMPLES, CHANNELS, *NORMS[kind][1])
    scale = torch.arange(1.0, 1 + SAMPLES, dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) * scale + update
        for update in range(UPDATES)
    ]


def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def accumulator(model: nn.Module, **options: Any) -> ga.Accumulator:
    return ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=64, **options)


def in_a_loop(acc: ga.Accumulator, model: nn.Module, batch: Tensor, sizes: list[int]) -> None:
    for micro in acc.microbatches(iter(batch.split(sizes))):
        micro.backward(*loss(model, micro.batch))


def begin(acc: ga.Accumulator, model: nn.Module, micros: list[Tensor], after: int) -> None:
    """Leave a loop once `after` micro-batches are in."""
    for i, micro in enumerate(acc.microbatches(iter(micros))):
        micro.backward(*loss(model, micro.batch))
        if i + 1 == after:
            break


def in_a_step(acc: ga.Accumulator, model: nn.Module, batch: Tensor, sizes: list[int]) -> None:
    acc.step(batch, loss, budget=max(sizes))


def estimates(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def assert_alike(model: nn.Module, truth: nn.Module) -> None:
    """Numbers of size below 100 summed in another order, a rounding for each of some 500 terms."""
    for (name, one), (_, other) in zip(model.named_buffers(), truth.named_buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=600 * EPS, atol=600 * EPS, msg=name)


@pytest.mark.parametrize("way", [in_a_loop, in_a_step], ids=["loop", "step"])
@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("kind", NORMS)
def test_pooled_moves_the_estimates_as_the_whole_batch_does(
    kind: str, momentum: float | None, sizes: list[int], way: Callable[..., None]
) -> None:
    if kind == "1d" and 1 in sizes:
        pytest.skip("torch itself refuses one value for each channel")
    model, truth = made(kind, momentum=momentum), made(kind, momentum=momentum)
    acc = accumulator(model, batchnorm="pooled")
    for batch in batches(kind):
        way(acc, model, batch, sizes)
        truth(batch)

    assert_alike(model, truth)
    assert not torch.equal(model.norm.running_mean, torch.zeros(CHANNELS)) or momentum is None
    assert hooks(model) == 0
    assert model.norm.momentum == momentum


def test_that_comparison_can_fail() -> None:
    model, truth = made(), made()
    acc = accumulator(model, batchnorm="microbatch")
    in_a_loop(acc, model, batches()[0], SPLITS["ragged"])
    truth(batches()[0])
    with pytest.raises(AssertionError):
        assert_alike(model, truth)


def test_microbatch_is_what_torch_does_to_the_bit() -> None:
    model, truth = made(), made()
    acc = accumulator(model, batchnorm="microbatch")
    in_a_loop(acc, model, batches()[0], SPLITS["ragged"])
    for micro in batches()[0].split(SPLITS["ragged"]):
        truth(micro)
    for one, other in zip(model.buffers(), truth.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", [in_a_loop, in_a_step], ids=["loop", "step"])
def test_frozen_is_the_whole_batch_in_eval_mode_and_moves_no_estimate(
    way: Callable[..., None],
) -> None:
    model, truth = made(), made()
    for one in (model, truth):
        one(batches(seed=1)[0])  # estimates that are not the initial ones
    before = estimates(model)
    acc = accumulator(model, batchnorm="frozen")
    truth.norm.eval()
    optimizer = SGD(truth.parameters(), lr=1e-3)
    for batch in batches():
        way(acc, model, batch, SPLITS["ragged"])
        optimizer.zero_grad()
        total, count = loss(truth, batch)
        (total / count).backward()
        optimizer.step()

    for one, other in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=600 * EPS, atol=600 * EPS)
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())
    assert model.norm.training
    assert hooks(model) == 0


def test_estimates_stay_until_the_window_closes_and_evaluation_in_between_sees_them() -> None:
    model = made()
    before = estimates(model)
    acc = accumulator(model, batchnorm="pooled")
    for micro in acc.microbatches(iter(batches()[0].split(3))):
        assert all(torch.equal(before[n], b) for n, b in model.named_buffers())
        micro.backward(*loss(model, micro.batch))
        if not micro.update:
            model.eval()
            model(torch.ones_like(micro.batch))
            model.train()
    truth = made()
    truth(batches()[0])
    assert_alike(model, truth)


def test_a_skipped_micro_batch_is_in_no_statistic() -> None:
    model, truth = made(), made()
    acc = accumulator(model, batchnorm="pooled")
    for i, micro in enumerate(acc.microbatches(iter(batches()[0].split([3, 4, 5])))):
        result = loss(model, micro.batch)
        if i == 1:
            micro.skip()
        else:
            micro.backward(*result)
    truth(torch.cat([batches()[0][:3], batches()[0][7:]]))
    assert_alike(model, truth)


def test_a_window_left_and_flushed_counts_what_was_in_it() -> None:
    model, truth = made(), made()
    acc = accumulator(model, batchnorm="pooled")
    with pytest.warns(ga.OpenWindowWarning):
        begin(acc, model, [*batches()[0].split(3)], after=2)
    assert hooks(model) == 0
    acc.flush()
    truth(batches()[0][:6])
    assert_alike(model, truth)


def test_a_window_left_and_gone_on_with_counts_both_parts() -> None:
    model, truth = made(), made()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=4, batchnorm="pooled")
    rest = iter(batches()[0].split(3))
    first = [next(rest), next(rest)]
    with pytest.warns(ga.OpenWindowWarning):
        begin(acc, model, [*first, first[0]], after=2)
    model(batches()[1])  # between the loops: as torch does, the policy has nothing to say
    truth(batches()[1])
    for micro in acc.microbatches(rest):
        micro.backward(*loss(model, micro.batch))
    truth(batches()[0])
    assert_alike(model, truth)


@pytest.mark.parametrize("choice", ["pooled", "frozen"])
def test_a_discarded_window_leaves_nothing(choice: Any) -> None:
    model = made()
    before = estimates(model)
    acc = accumulator(model, batchnorm=choice)
    for i, micro in enumerate(acc.microbatches(iter(batches()[0].split(3)))):
        micro.backward(*loss(model, micro.batch))
        if i == 1:
            acc.discard()
            break
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())
    assert hooks(model) == 0
    assert model.norm.training


@pytest.mark.parametrize("where", ["before the norm", "after the norm"])
@pytest.mark.parametrize("choice", ["pooled", "frozen"])
def test_an_error_in_a_forward_leaves_nothing(choice: Any, where: str) -> None:
    model = made()
    before, momentum = estimates(model), model.norm.momentum
    identities = {name: id(value) for name, value in model.named_buffers()}
    acc = accumulator(model, batchnorm=choice)

    def failing(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        if where == "before the norm":
            return loss(model, x[:, :2])  # two channels, where three are expected
        model(x)
        raise MemoryError("out of it")

    with pytest.raises((MemoryError, RuntimeError)):
        acc.step(batches()[0], failing, budget=3)
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())
    assert identities == {name: id(value) for name, value in model.named_buffers()}
    assert (model.norm.momentum, model.norm.training, hooks(model)) == (momentum, True, 0)


def test_two_accumulators_over_one_layer_have_a_window_each() -> None:
    """As a GAN's, which meet in a part: windows overlap, micro-batches do not."""
    model, truth = made(), made()
    one, two = (
        ga.Accumulator(
            model,
            SGD(part.parameters(), lr=1e-3),
            every=64,
            batchnorm="pooled",
            on_stale="zero",
        )
        for part in (model.norm, model.head)
    )
    first = one.microbatches(iter(batches()[0].split(6)))
    second = two.microbatches(iter(batches()[1].split(6)))
    for loop in (first, second, first, second):
        micro = next(loop)
        micro.backward(*loss(model, micro.batch))
    assert (list(first), list(second)) == ([], [])
    truth(batches()[0])
    truth(batches()[1])
    assert_alike(model, truth)
    assert hooks(model) == 0


@pytest.mark.parametrize("choice", ["pooled", "frozen"])
def test_an_interrupt_within_the_layer_leaves_nothing(choice: Any) -> None:
    class Interrupted(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyboardInterrupt

    model = First(Interrupted(CHANNELS)).double()
    before, identities = estimates(model), [id(value) for value in model.buffers()]
    acc = accumulator(model, batchnorm=choice)
    with pytest.raises(KeyboardInterrupt):
        acc.step(batches()[0], loss, budget=3)
    assert [id(value) for value in model.buffers()] == identities
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())
    assert (model.norm.momentum, model.norm.training, hooks(model)) == (0.1, True, 0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("choice", ["pooled", "frozen"])
def test_a_checkpointed_norm_is_counted_once(choice: Any, reentrant: bool) -> None:
    class Checkpointed(First):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    def checkpointed() -> Checkpointed:
        torch.manual_seed(0)
        return Checkpointed(nn.BatchNorm2d(CHANNELS)).double()

    model, plain, truth = checkpointed(), made(), made()
    for one in (model, plain):
        acc = accumulator(one, batchnorm=choice)
        in_a_loop(acc, one, batches()[0], SPLITS["ragged"])
    if choice == "pooled":
        truth(batches()[0])
    assert_alike(model, truth)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=600 * EPS, atol=600 * EPS)


@pytest.mark.parametrize("choice", ["pooled", "frozen"])
def test_a_norm_that_runs_twice_in_a_forward(choice: Any) -> None:
    """As torch counts it, each run is a batch; pooled, both are one."""

    class Twice(First):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(x + 100)

    torch.manual_seed(0)
    model = Twice(nn.BatchNorm2d(CHANNELS)).double()
    in_a_loop(accumulator(model, batchnorm=choice), model, batches()[0], SPLITS["ragged"])
    truth = made()
    if choice == "pooled":
        truth(torch.cat([batches()[0], batches()[0] + 100]))
    assert_alike(model, truth)


@pytest.mark.parametrize("choice", ["pooled", "frozen", "microbatch"])
def test_a_window_saved_half_way_goes_on_to_the_bit(choice: Any) -> None:
    model = made()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=4, batchnorm=choice)
    loop = acc.microbatches(iter(batches()[0].split(3)))
    saved: dict[str, Any] = {}
    for i, micro in enumerate(loop):
        micro.backward(*loss(model, micro.batch))
        if i == 1:
            saved = {"model": {k: v.clone() for k, v in model.state_dict().items()}}
            saved["accumulator"] = acc.state_dict()
    resumed = made()
    resumed.load_state_dict(saved["model"])
    again = ga.Accumulator(resumed, SGD(resumed.parameters(), lr=1e-3), every=4, batchnorm=choice)
    again.load_state_dict(saved["accumulator"])
    for micro in again.microbatches(iter(batches()[0].split(3)[2:])):
        micro.backward(*loss(resumed, micro.batch))
    for one, other in zip(resumed.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_state_of_another_policy_is_refused() -> None:
    model = made()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=4, batchnorm="pooled")
    with pytest.warns(ga.OpenWindowWarning):
        begin(acc, model, [*batches()[0].split(3)], after=1)
    other = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=4, batchnorm="frozen")
    refused(
        lambda: other.load_state_dict(acc.state_dict()),
        errors.StateError,
        "state",
        "the `batchnorm` differs",
    )


def test_a_lazy_norm_is_looked_after_from_its_first_forward_on() -> None:
    torch.manual_seed(0)
    model = First(nn.LazyBatchNorm2d(affine=False)).double()
    acc = accumulator(model, batchnorm="pooled")
    in_a_loop(acc, model, batches()[0], SPLITS["ragged"])
    truth = nn.BatchNorm2d(CHANNELS, affine=False).double()
    truth(batches()[0])
    torch.testing.assert_close(model.norm.running_var, truth.running_var, rtol=600 * EPS, atol=0)
    assert hooks(model) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_estimates_are_rounded_once(dtype: torch.dtype) -> None:
    model, truth = made(momentum=1.0), made(momentum=1.0)
    model.to(dtype)
    acc = accumulator(model, batchnorm="pooled")
    batch = batches()[0].to(dtype)
    in_a_loop(acc, model, batch, SPLITS["ragged"])
    truth(batch.double())
    # the estimate's own rounding, and float32's of sums of 72 terms
    bound = torch.finfo(dtype).eps / 2 + 72 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        model.norm.running_var.double(), truth.norm.running_var, rtol=bound, atol=0
    )


def layered() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))


def simple_loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def test_without_a_choice_it_says_so_once_and_names_the_layers() -> None:
    model = layered()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=2)
    with pytest.warns(ga.SplitWarning) as caught:
        acc.step(torch.randn(8, 3), simple_loss)
    acc.step(torch.randn(8, 3), simple_loss)  # a second warning would be an error here
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "`1`, `2.0`" in text
    assert all(choice in text for choice in ('"pooled"', '"frozen"', '"microbatch"'))
    assert "docs/messages.md#split-batchnorm" in text
    assert caught[0].filename == __file__


@pytest.mark.parametrize("choice", ["pooled", "frozen", "microbatch"])
def test_a_choice_says_nothing(choice: Any) -> None:
    model = layered()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=2, batchnorm=choice)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acc.step(torch.randn(8, 3), simple_loss)


SILENT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one micro-batch": (layered, 1),
    "eval mode": (lambda: layered().eval(), 2),
    "no BatchNorm": (lambda: nn.Linear(3, 4), 2),
}


@pytest.mark.parametrize(("make", "every"), SILENT.values(), ids=SILENT)
def test_where_nothing_depends_on_the_split_it_says_nothing(
    make: Callable[[], nn.Module], every: int
) -> None:
    model = make()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=every)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acc.step(torch.randn(8, 3), simple_loss)


def test_frozen_without_estimates_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    refused(
        lambda: accumulator(model, batchnorm="frozen"),
        errors.InputError,
        "batchnorm-frozen",
        "a layer keeps none",
    )


@pytest.mark.parametrize("choice", ["pooled", "frozen"])
def test_a_compiled_model_is_refused(choice: Any) -> None:
    model = torch.compile(layered())
    refused(
        lambda: accumulator(model, batchnorm=choice),
        errors.InputError,
        "batchnorm-compiled",
        "cannot see inside a compiled part",
    )


def test_a_layer_that_runs_unseen_is_refused() -> None:
    model = made()
    acc = accumulator(model, batchnorm="pooled")

    def around(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        x = model.norm.forward(x)  # as compiled code does, without the hooks
        return model.head(x.flatten(2)).square().sum(), len(x)

    refused(
        lambda: acc.step(batches()[0], around, budget=3),
        errors.LoopError,
        "batchnorm-compiled",
        "does not see it",
    )
    assert hooks(model) == 0


def test_another_value_is_refused() -> None:
    refused(
        lambda: accumulator(layered(), batchnorm="whole"),
        errors.InputError,
        "choice",
        "`batchnorm` has no such value.",
    )
