"""Any model: its update equals the whole batch's to the bit, parameters and optimizer state.

Weights and data are small integers, every activation is exact (ReLU, products), all counts are
powers of two, and both sides round their parameters to integers after each update: no rounding is
left to hide a wrong factor. What cannot be exact (bf16, inductor, tanh) has a derived bound.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint

import gradaccum as ga

SAMPLES, WIDTH, UPDATES = 8, 4, 3
JUNK = -7.0
EPS = torch.finfo(torch.float64).eps

Pair = tuple[Tensor, int]


@dataclass(frozen=True)
class Case:
    """A model, the summed loss of some rows, and the optimizers of that loss."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Pair] = lambda m, x: squared(m, x)
    optimizers: Callable[[nn.Module], list[Optimizer]] = lambda m: [sgd(m)]
    clips: bool = True
    """Whether torch can clip its gradients."""
    exact_loss: bool = True
    """Whether the value of the loss has no rounding either, as its gradient has none."""


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return SGD(model.parameters(), **{"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25, **options})


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def whole_numbers(model: nn.Module) -> nn.Module:
    """In float64 (complex stays complex), with small integers for weights."""
    model = model.double() if not any(p.is_complex() for p in model.parameters()) else model
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.copy_(integers(*parameter.shape, seed=seed))
    return model


def mlp() -> nn.Module:
    return whole_numbers(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 2)))


def squared(model: nn.Module, x: Tensor) -> Pair:
    error = model(x) - x[:, :1]
    error = torch.view_as_real(error) if error.is_complex() else error  # abs() would take a root
    return error.square().sum(), len(x)


def tokens(x: Tensor) -> Tensor:
    """Rows as indices into a vocabulary of 8."""
    return (x.long() + 5) % 8


# --- models -----------------------------------------------------------------------------------


class Tied(nn.Module):
    """The embedding is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(tokens(x)).sum(1))


class TiedSparsely(nn.Module):
    """A sparse embedding whose weight has a dense gradient too, but not in every micro-batch."""

    def __init__(self, dense_at: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, sparse=True)
        self.dense_at = dense_at

    def forward(self, x: Tensor) -> Tensor:
        out = self.embed(tokens(x)).sum(1)
        marked = x[:, 0] == self.dense_at
        if marked.any():
            out = out + marked[:, None] * self.embed.weight.sum(0)
        return out


class LoRA(nn.Module):
    """A frozen base of which one tensor is int8, as quantised models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 4).requires_grad_(False)
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Sometimes(nn.Module):
    """A second head that only the marked rows use, and a third that none does."""

    def __init__(self, mark: float) -> None:
        super().__init__()
        self.trunk, self.usual = nn.Linear(WIDTH, 4), nn.Linear(4, 2)
        self.rare, self.never = nn.Linear(4, 2), nn.Linear(4, 2)
        self.mark = mark

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        marked = x[:, 0] == self.mark
        out = self.usual(hidden)
        if not marked.any():
            return out
        return out + marked[:, None] * self.rare(hidden)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, 2, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.empty(2, dtype=torch.complex128))
        with torch.no_grad():
            self.weight.copy_(torch.complex(integers(WIDTH, 2, seed=1), integers(WIDTH, 2, seed=2)))
            self.bias.copy_(torch.complex(integers(2, seed=3), integers(2, seed=4)))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex128) @ self.weight + self.bias


class Checkpointed(nn.Module):
    """One block run twice, each time checkpointed: its gradient arrives in two pieces."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return hidden


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized() -> nn.Module:
    linear = whole_numbers(nn.Linear(WIDTH, WIDTH))
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


def hooked() -> nn.Module:
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 2)
    return model


def frozen() -> nn.Module:
    model = mlp()
    model.get_submodule("0").requires_grad_(False)
    return model


def convolution() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 1, 1), nn.Flatten())
    return whole_numbers(layers).to(memory_format=torch.channels_last)


def as_images(model: nn.Module, x: Tensor) -> Pair:
    images = torch.stack([x, x.flip(1)], 1).view(len(x), 2, 2, 2)
    images = F.pad(images, (1, 0, 1, 0)).contiguous(memory_format=torch.channels_last)
    return (model(images) - 1).square().sum(), len(x)


class Scalar(nn.Module):
    """A temperature of shape `()` beside the usual."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.temperature


class Shared(nn.Module):
    """Two parameters that meet through views: autograd gives both the same memory for a gradient.

    See https://github.com/pytorch/pytorch/issues/34082: a second backward then adds twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.one.view(1, -1) + self.other.view(1, -1))


class Overlapping(nn.Module):
    """As `Shared`, but what two of them share is a part of the third's."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.ones(WIDTH))
        self.left, self.right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.all.view(2, 2)
        rows = whole + torch.cat([self.left.view(1, 2), self.right.view(1, 2)])
        return x + rows.view(1, WIDTH)


# --- losses and optimizers --------------------------------------------------------------------


def penalised(model: nn.Module, x: Tensor) -> Pair:
    """WGAN-GP's shape: the loss has a gradient in it."""
    x = x.clone().requires_grad_()
    out = model(x).square().sum(1)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.sum() + (slope.square().sum(1) - 1).sum(), len(x)


def shared_encoder(model: nn.Module, x: Tensor) -> Pair:
    """Two heads' losses meet in one encoder."""
    hidden = model.get_submodule("0")(x)
    head = model.get_submodule("2")
    return head(hidden.relu()).square().sum() + 2 * head(-hidden).sum(), len(x)


def several_groups(model: nn.Module) -> list[Optimizer]:
    first, second = model.get_submodule("0"), model.get_submodule("2")
    groups = [
        {"params": []},
        {"params": list(first.parameters()), "lr": 0.25, "weight_decay": 0.5},
        {"params": [second.weight], "momentum": 0.0},
        {"params": [second.bias]},
    ]
    return [SGD(groups, lr=0.5, momentum=0.5)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.5), AdamW(others, lr=0.5)]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.5)]


def embedding(**options: Any) -> Callable[[], nn.Module]:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(tokens(x)).sum(1)

    return lambda: whole_numbers(Bag())


def linear_in_weights(model: nn.Module, x: Tensor) -> Pair:
    """Its gradient does not depend on the weights, which `max_norm` makes irrational."""
    return (model(x) * x).sum(), len(x)


CASES: dict[str, Case] = {
    "mlp": Case(mlp),
    "adamw": Case(mlp, optimizers=adamw),
    "for-loop optimizer": Case(mlp, optimizers=lambda m: [sgd(m, foreach=False)]),
    "fused float64": Case(mlp, optimizers=lambda m: [sgd(m, fused=True)]),
    "fused float32": Case(
        lambda: mlp().float(),
        lambda m, x: squared(m, x.float()),
        lambda m: [AdamW(m.parameters(), lr=0.5, fused=True)],
    ),
    "fused with an empty first group": Case(
        lambda: mlp().float(),
        lambda m, x: squared(m, x.float()),
        lambda m: [SGD([{"params": []}, {"params": [*m.parameters()]}], lr=0.5, fused=True)],
    ),
    "amsgrad, maximize": Case(
        mlp,
        optimizers=lambda m: [Adam(m.parameters(), lr=0.5, amsgrad=True, maximize=True)],
    ),
    "tied weights": Case(lambda: whole_numbers(Tied())),
    "frozen parameters": Case(frozen, optimizers=adamw),
    "lora, all parameters in the optimizer": Case(lambda: whole_numbers(LoRA())),
    "lora, its own in the optimizer": Case(
        lambda: whole_numbers(LoRA()),
        optimizers=lambda m: [AdamW([p for p in m.parameters() if p.requires_grad], lr=0.5)],
    ),
    "an optimizer over a part": Case(
        mlp, optimizers=lambda m: [AdamW(m.get_submodule("2").parameters(), lr=0.5)]
    ),
    "several groups, one empty": Case(mlp, optimizers=several_groups),
    "two optimizers": Case(mlp, optimizers=muon_and_adamw),
    "sparse embedding, SGD": Case(
        embedding(sparse=True),
        optimizers=lambda m: [SGD(m.parameters(), lr=0.5)],
        clips=False,
    ),
    "sparse embedding, SparseAdam": Case(
        embedding(sparse=True),
        optimizers=lambda m: [SparseAdam(m.parameters(), lr=0.5)],
        clips=False,
    ),
    "sparse, then dense": Case(
        lambda: whole_numbers(TiedSparsely(dense_at=6.0)),
        optimizers=lambda m: [SGD(m.parameters(), lr=0.5)],
        clips=False,
    ),
    "dense, then sparse": Case(
        lambda: whole_numbers(TiedSparsely(dense_at=5.0)),
        optimizers=lambda m: [SGD(m.parameters(), lr=0.5)],
        clips=False,
    ),
    "max_norm embedding": Case(embedding(max_norm=1.5), linear_in_weights, exact_loss=False),
    "complex parameters": Case(Complex, optimizers=lambda m: [sgd(m)]),
    "complex parameters, Adam": Case(Complex, optimizers=lambda m: [Adam(m.parameters(), lr=0.5)]),
    "gradient penalty": Case(mlp, penalised),
    "checkpoint, re-entrant": Case(lambda: whole_numbers(Checkpointed(True))),
    "checkpoint, not re-entrant": Case(lambda: whole_numbers(Checkpointed(False))),
    "used in the first micro-batch only": Case(
        lambda: whole_numbers(Sometimes(5.0)), optimizers=adamw
    ),
    "used in the last micro-batch only": Case(
        lambda: whole_numbers(Sometimes(6.0)), optimizers=adamw
    ),
    "used in none": Case(lambda: whole_numbers(Sometimes(9.0)), optimizers=adamw),
    "shared encoder": Case(mlp, shared_encoder),
    "parametrized weight": Case(parametrized),
    "gradient hooks of the user": Case(hooked),
    "gradients that share memory": Case(lambda: whole_numbers(Shared()), clips=False),
    "gradients that overlap in memory": Case(lambda: whole_numbers(Overlapping()), clips=False),
    "scalar parameter": Case(lambda: whole_numbers(Scalar())),
    "channels_last convolution": Case(convolution, as_images),
}


# --- the two sides ----------------------------------------------------------------------------


def whole_batches() -> list[Tensor]:
    """Batches whose first row is marked 5 and whose last is marked 6."""
    batches = [integers(SAMPLES, WIDTH, seed=10 + i) for i in range(UPDATES)]
    for batch in batches:
        batch[0, 0], batch[-1, 0] = 5.0, 6.0
    return batches


def owned(optimizers: list[Optimizer]) -> list[Tensor]:
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def whole(
    case: Case, snap: Callable[[Any], None], clip: float | None = None
) -> tuple[nn.Module, list[Optimizer], list[float]]:
    """Plain torch, with the undivided batch."""
    model, losses = case.model(), []
    optimizers = case.optimizers(model)
    for batch in whole_batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, count = case.loss(model, batch)
        (total / count).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(owned(optimizers), clip)
        for optimizer in optimizers:
            optimizer.step()
        losses.append((total / count).item())
        snap(owned(optimizers))
    return model, optimizers, losses


Way = Callable[[ga.Accumulator, nn.Module, Case], Iterator[ga.Update]]
WAYS: dict[str, tuple[Way, dict[str, Any]]] = {}


def way(name: str, **options: Any) -> Callable[[Way], Way]:
    """Register a way to give the batches to an accumulator that was made with `options`."""

    def register(function: Way) -> Way:
        WAYS[name] = (function, options)
        return function

    return register


def micro_batches(*sizes: int) -> list[Tensor]:
    return [micro for batch in whole_batches() for micro in batch.split(list(sizes))]


def stream(
    acc: ga.Accumulator, model: nn.Module, case: Case, micros: Any, **options: Any
) -> Iterator[ga.Update]:
    for micro in acc.microbatches(micros, **options):
        micro.backward(*case.loss(model, micro.batch))
        if micro.update:
            yield micro.update


@way("even", every=4)
def even(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    yield from stream(acc, model, case, micro_batches(2, 2, 2, 2))


@way("largest first", every=4)
@way("clipped", every=4, clip_norm=0.75)
@way("kept apart", every=4, on_stale="zero")
def largest_first(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    yield from stream(acc, model, case, micro_batches(4, 2, 1, 1))


@way("smallest first", every=4)
def smallest_first(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    yield from stream(acc, model, case, micro_batches(1, 1, 2, 4))


@way("tails", every=8)
def tails(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for batch in whole_batches():
        yield from stream(acc, model, case, iter(batch.split([2, 4, 1, 1])))


@way("even tails", every=8)
def even_tails(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for batch in whole_batches():
        yield from stream(acc, model, case, iter(batch.split(2)))


@way("step", every=4)
def step(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for batch in whole_batches():
        yield acc.step(batch, case.loss)


@way("counts known ahead", every=4)
def counts_ahead(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    yield from stream(acc, model, case, micro_batches(4, 2, 1, 1), counts=len)


@way("means", every=4)
def means(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for micro in acc.microbatches(micro_batches(1, 4, 2, 1)):
        total, count = case.loss(model, micro.batch)
        micro.backward(total / count, count, reduction="mean")
        if micro.update:
            yield micro.update


@way("two terms", every=4)
def two_terms(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for micro in acc.microbatches(micro_batches(1, 1, 2, 4)):
        total, count = case.loss(model, micro.batch)
        # half of the mean each, over denominators that differ
        micro.backward({"a": (total / 2, count), "b": (total, 2 * count)})
        if micro.update:
            yield micro.update


@way("two terms, counts known ahead", every=4)
def two_terms_ahead(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    def counts(batch: Tensor) -> dict[str, int]:
        return {"a": len(batch), "b": 2 * len(batch)}

    for micro in acc.microbatches(micro_batches(1, 1, 2, 4), counts=counts):
        total, count = case.loss(model, micro.batch)
        micro.backward({"a": (total / 2, count), "b": (total, 2 * count)})
        if micro.update:
            yield micro.update


@way("one skipped", every=4)
def one_skipped(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    micros: list[Tensor] = []
    for i, batch in enumerate(whole_batches()):
        parts = list(batch.split([4, 2, 2]))
        parts.insert([0, 2, 3][i], torch.full((1, WIDTH), JUNK))  # the first, one within, the last
        micros += parts
    for micro in acc.microbatches(micros):
        if micro.batch[0, 0] == JUNK:
            micro.skip()
        else:
            micro.backward(*case.loss(model, micro.batch))
        if micro.update:
            yield micro.update


@way("flushed", every=64)
def flushed(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for i, micro in enumerate(acc.microbatches(micro_batches(2, 4, 1, 1))):
        micro.backward(*case.loss(model, micro.batch))
        if i % 4 == 3 and not micro.last:
            update = acc.flush()
            assert update is not None
            yield update
        if micro.update:
            yield micro.update


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


# --- two losses that meet in one model --------------------------------------------------------


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


# --- torch.compile ----------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(backend: str) -> Case:
    return Case(lambda: torch.compile(mlp(), backend=backend, dynamic=backend != "inductor"))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("way_name", ["largest first", "two terms, counts known ahead"])
def test_a_compiled_model_equals_its_whole_batch(
    way_name: str, differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    _assert_compiled_equals("aot_eager", way_name, differences, snap)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::gradaccum.errors.OpenWindowWarning")
def test_several_terms_of_unknown_counts_on_a_compiled_graph_work_or_say_what_to_do(
    differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    """They need one backward each, and a compiled graph may be gone after the first.

    Whether it is (donated buffers) depends on torch and on what its caches hold.
    """
    told = None
    try:
        _assert_compiled_equals("aot_eager", "two terms", differences, snap)
    except ga.GradaccumError as error:
        told = error
    assert told is None or (told.slug == "terms-compiled" and "`counts=`" in told.do)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_model_compiled_by_inductor_equals_its_whole_batch(
    differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    _assert_compiled_equals("inductor", "even tails", differences, snap)


def _assert_compiled_equals(
    backend: str,
    way_name: str,
    differences: Callable[..., list[str]],
    snap: Callable[[Any], None],
) -> None:
    reference, reference_optimizers, losses = whole(CASES["mlp"], snap)
    case = compiled(backend)
    run, options = WAYS[way_name]
    model = case.model()
    optimizers = case.optimizers(model)
    acc = ga.Accumulator(
        model, optimizers, on_update=lambda update: snap(owned(optimizers)), **options
    )
    updates = list(run(acc, model, case))
    assert differences((model._orig_mod, optimizers), (reference, reference_optimizers)) == []
    assert [float(update.loss) for update in updates] == losses


# --- narrow numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("way_name", ["even", "largest first", "means", "clipped", "two terms"])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_autocast_to_bf16_equals_the_whole_batch_on_integers_that_fit(
    parameters: torch.dtype,
    way_name: str,
    differences: Callable[..., list[str]],
    snap: Callable[[Any], None],
) -> None:
    def loss(model: nn.Module, x: Tensor) -> Pair:
        # gradients are sums of at most 8 products of size up to 6 * 6; below 256, bf16 is exact
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x.clamp(-2, 2).to(parameters))
        return (out * x[:, :2].clamp(-2, 2).to(out.dtype)).sum(), len(x)

    case = Case(
        lambda: whole_numbers(nn.Linear(WIDTH, 2)).to(parameters),
        loss,
        lambda m: [sgd(m, momentum=0, weight_decay=0)],
    )
    run, options = WAYS[way_name]
    reference, reference_optimizers, losses = whole(case, snap, options.get("clip_norm"))
    model = case.model()
    optimizers = case.optimizers(model)
    acc = ga.Accumulator(
        model, optimizers, on_update=lambda update: snap(owned(optimizers)), **options
    )
    updates = list(run(acc, model, case))
    assert {p.dtype for p in owned(optimizers)} == {parameters}
    assert differences((model, optimizers), (reference, reference_optimizers)) == []
    assert [float(update.loss) for update in updates] == losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_real_gradients_are_off_by_no_more_than_their_additions_round(dtype: torch.dtype) -> None:
    """The gradient is Σx/N whatever the weights, so float64 knows it.

    Each of the SAMPLES products and each of the additions of rows and of micro-batches rounds
    once, the seed and the last factor once each; every rounding is at most eps/2 of a partial sum,
    which is at most Σ|x|/N.
    """
    x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64).to(dtype)
    model = nn.Linear(WIDTH, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1.0), every=3)
    for micro in acc.microbatches(x.split([3, 4, 1])):
        micro.backward(model(micro.batch).sum(), len(micro.batch))

    exact = -x.double().sum(0) / SAMPLES
    roundings = SAMPLES + SAMPLES + 3 + 2
    bound = roundings * torch.finfo(dtype).eps / 2 * x.double().abs().sum(0) / SAMPLES
    assert ((model.weight.detach().double()[0] - exact).abs() <= bound).all()
    mean_of_means = -sum(part.double().mean(0) for part in x.split([3, 4, 1])) / 3
    assert not ((mean_of_means - exact).abs() <= bound).all()
