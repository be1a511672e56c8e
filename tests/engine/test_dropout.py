"""Dropout by sample: any split gives the update of the whole batch, and it is dropout still."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import gradaccum as ga
from gradaccum import errors
from gradaccum.engine.policies.counter import Layout, keep
from gradaccum.engine.policies.keyed import Keyed
from refusals import refused

SAMPLES, STEPS, WIDTH = 12, 6, 8
EPS = torch.finfo(torch.float64).eps


class Lambda(nn.Module):
    """A layer and a function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Wrapped(nn.Module):
    """A module between two layers; it may return more than its output."""

    def __init__(self, module: nn.Module, *, turned: bool = False) -> None:
        super().__init__()
        self.first, self.module, self.last = (
            nn.Linear(WIDTH, WIDTH),
            module,
            nn.Linear(WIDTH, WIDTH),
        )
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.transpose(0, 1) if self.turned else x
        x = (
            self.module(x, x, x)
            if isinstance(self.module, nn.MultiheadAttention)
            else self.module(x)
        )
        x = x[0] if isinstance(x, tuple) else x
        return self.last(x.transpose(0, 1) if self.turned else x)


class Checkpointed(nn.Module):
    """One block run twice, each time checkpointed: its masks are drawn again, in reverse."""

    def __init__(self, reentrant: bool, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())
        self.options = {"use_reentrant": reentrant, **options}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, **self.options)
        return x


class WeightDropped(nn.Module):
    """Drops weights, which all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SAMPLES, WIDTH))  # as many rows as samples

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.weight, 0.4))


class Flattened(nn.Module):
    """Drops tokens that lie in one row after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x).flatten(0, 1), 0.4).view_as(x)


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty(len(x), 1, 1).bernoulli_(0.7) / 0.7


def drop_path_by_rand(x: Tensor) -> Tensor:
    return x * (0.7 + torch.rand((len(x), 1, 1), dtype=x.dtype)).floor() / 0.7


def attention(**options: Any) -> Callable[[Tensor], Tensor]:
    def attend(x: Tensor) -> Tensor:
        heads = x.view(len(x), STEPS, 2, WIDTH // 2).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2)

    return attend


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: Wrapped(nn.Dropout(0.4)),
    "Dropout, in place": lambda: Wrapped(nn.Dropout(0.4, inplace=True)),
    "Dropout1d": lambda: Wrapped(nn.Dropout1d(0.4)),
    "AlphaDropout": lambda: Wrapped(nn.AlphaDropout(0.4)),
    "FeatureAlphaDropout": lambda: Wrapped(nn.FeatureAlphaDropout(0.4)),
    "Dropout of all": lambda: Wrapped(nn.Dropout(1.0)),
    "Dropout2d": lambda: Lambda(lambda x: F.dropout2d(x[..., None], 0.4)),
    "Dropout3d": lambda: Lambda(lambda x: F.dropout3d(x[..., None, None], 0.4)),
    "F.dropout": lambda: Lambda(lambda x: F.dropout(x, 0.4)),
    "torch.dropout": lambda: Lambda(lambda x: torch.dropout(x, 0.4, True)),
    "torch.dropout_": lambda: Lambda(lambda x: torch.dropout_(x * 1, 0.4, True)),
    "torch.feature_dropout": lambda: Lambda(lambda x: torch.feature_dropout(x, 0.4, True)),
    "torch.alpha_dropout": lambda: Lambda(lambda x: torch.alpha_dropout(x, 0.4, True)),
    "torch.feature_alpha_dropout_": lambda: Lambda(
        lambda x: torch.feature_alpha_dropout_(x * 1, 0.4, True)
    ),
    "native_dropout": lambda: Lambda(lambda x: torch.native_dropout(x, 0.4, True)[0]),
    "attention": lambda: Lambda(attention(dropout_p=0.3)),
    "causal attention": lambda: Lambda(attention(dropout_p=0.3, is_causal=True)),
    "MultiheadAttention": lambda: Wrapped(
        nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
    ),
    "MultiheadAttention, time first": lambda: Wrapped(
        nn.MultiheadAttention(WIDTH, 2, dropout=0.3), turned=True
    ),
    "a TransformerEncoderLayer": lambda: Wrapped(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True)
    ),
    "time first": lambda: Wrapped(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3), turned=True
    ),
    "LSTM": lambda: Wrapped(nn.LSTM(WIDTH, WIDTH, 3, dropout=0.3, batch_first=True)),
    "LSTM, both ways, time first": lambda: Wrapped(
        nn.LSTM(WIDTH, WIDTH // 2, 2, dropout=0.3, bidirectional=True), turned=True
    ),
    "GRU": lambda: Wrapped(nn.GRU(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)),
    "RNN": lambda: Wrapped(nn.RNN(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)),
    "stochastic depth": lambda: Lambda(drop_path),
    "stochastic depth by rand": lambda: Lambda(drop_path_by_rand),
    "noise": lambda: Lambda(lambda x: x + torch.randn_like(x)),
    "noise in place": lambda: Lambda(lambda x: x + torch.empty_like(x).normal_(1.0, 2.0)),
    "bernoulli of probabilities": lambda: Lambda(lambda x: x * torch.bernoulli(x.sigmoid())),
    "uniform_": lambda: Lambda(lambda x: x * torch.empty_like(x).uniform_(-1, 2)),
    "weights dropped": WeightDropped,
    "tokens in a row": Flattened,
    "checkpoint, re-entrant": lambda: Checkpointed(True),
    "checkpoint, not re-entrant": lambda: Checkpointed(False),
}


def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return (model(x) - 1).square().sum(), len(x)


def data(samples: int = SAMPLES) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, STEPS, WIDTH, generator=generator, dtype=torch.float64)


def train(
    make: Callable[[], nn.Module],
    every: int,
    dropout: Any = "per-sample",
    batch: Any = None,
    loss_fn: Callable[..., Any] = loss,
    updates: int = 2,
    **options: Any,
) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(0)
    model = make().double()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=every, dropout=dropout)
    batch = data() if batch is None else batch
    found = [acc.step(batch, loss_fn, **options) for _ in range(updates)]
    return list(model.parameters()), [float(update.loss) for update in found]


def assert_alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """A gradient is the sum of some 600 terms, in another order; two updates of it."""
    for a, b in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1200 * EPS, atol=1200 * EPS)
    torch.testing.assert_close(torch.tensor(one[1]), torch.tensor(other[1]))


@pytest.mark.parametrize("name", MODELS)
def test_any_split_gives_the_update_of_the_whole_batch(name: str) -> None:
    whole = train(MODELS[name], 1)
    for every in (2, 5, SAMPLES):
        assert_alike(train(MODELS[name], every), whole)


@pytest.mark.parametrize("name", MODELS)
def test_without_it_another_split_gives_another_update(name: str) -> None:
    if name == "Dropout of all":
        pytest.skip("nothing is left to chance")

    def twice(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        # Torch draws the masks of a batch row by row: of one forward they would be the same.
        return loss(model, x)[0] + loss(model, x)[0], len(x)

    whole = train(MODELS[name], 1, dropout=None, loss_fn=twice)
    with pytest.raises(AssertionError):
        assert_alike(train(MODELS[name], 5, dropout=None, loss_fn=twice), whole)
    assert_alike(train(MODELS[name], 5, loss_fn=twice), train(MODELS[name], 1, loss_fn=twice))


def test_updates_have_masks_of_their_own_and_so_have_accumulators() -> None:
    torch.manual_seed(0)
    model = MODELS["Dropout"]().double()
    sgd = SGD(model.parameters(), lr=0.0)
    one, two = (ga.Accumulator(model, sgd, dropout="per-sample") for _ in range(2))
    losses = [float(acc.step(data(), loss).loss) for acc in (one, one, two)]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_that_is_cut_changes_no_mask(side: Any) -> None:
    lengths = [6, 1, 3, 2, 5, 6, 4, 2, 1, 3, 2, 4]
    own = torch.arange(STEPS) < torch.tensor(lengths)[:, None]
    own = own if side == "right" else own.flip(1)
    batch = {"x": data() * own[..., None], "own": own}

    def masked(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        out = (model(batch["x"]) - 1).square() * batch["own"][..., None]
        return out.sum(), int(batch["own"].sum())

    def make() -> nn.Module:
        return Wrapped(nn.Sequential(nn.Dropout(0.4), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)))

    whole = train(make, 1, batch=batch, loss_fn=masked, lengths=lengths, trim=side)
    for budget in (7, 12):
        options = {"lengths": lengths, "budget": budget, "trim": side}
        assert_alike(train(make, 1, batch=batch, loss_fn=masked, **options), whole)


def test_the_way_through_the_model_may_depend_on_the_data() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            rare = x[:, 0, 0] > 0.5
            # rows that are rare, dropped on the way that only some micro-batches take
            return torch.where(rare[:, None, None], self.drop(x), x) if rare.any() else x

    assert 0 < int((Branches().double().layer(data())[:, 0, 0] > 0.5).sum()) < SAMPLES
    assert_alike(train(Branches, SAMPLES), train(Branches, 1))


def test_the_trial_leaves_no_trace() -> None:
    """What a forward on two and three copies would leave: estimates, and random states."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(STEPS), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).double()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), dropout="per-sample")
    truth = nn.BatchNorm1d(STEPS).double()
    truth(data())
    calls: list[int] = []

    def counted(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        calls.append(len(x))
        return loss(model, x)

    acc.step(data(), counted)
    assert calls == [2, 3, SAMPLES]  # nothing is in runs, so no other samples are tried
    norm = model[0]
    assert torch.equal(norm.running_mean, truth.running_mean)
    assert int(norm.num_batches_tracked) == 1
    acc.step(data(), counted)
    assert calls == [2, 3, SAMPLES, SAMPLES]


def test_the_trial_is_in_no_statistic_of_the_window() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(STEPS), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).double()
    sgd = SGD(model.parameters(), lr=1e-3)
    acc = ga.Accumulator(model, sgd, every=3, dropout="per-sample", batchnorm="pooled")
    truth = nn.BatchNorm1d(STEPS).double()
    acc.step(data(), loss)
    truth(data())
    torch.testing.assert_close(model[0].running_mean, truth.running_mean, rtol=0, atol=100 * EPS)


def test_a_resumed_run_has_the_same_masks() -> None:
    def made() -> tuple[nn.Module, ga.Accumulator]:
        model = MODELS["Dropout"]().double()
        sgd = SGD(model.parameters(), lr=1e-2)
        return model, ga.Accumulator(model, sgd, every=3, dropout="per-sample")

    torch.manual_seed(0)
    model, acc = made()
    acc.step(data(), loss)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = acc.state_dict()
    acc.step(data(), loss)
    torch.manual_seed(5)
    resumed, again = made()
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    again.step(data(), loss)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradient_hooks_and_optimizers_draw_numbers_of_their_own() -> None:
    """Noise on gradients is no part of a forward, and is torch's own."""
    seen: list[Tensor] = []

    def noisy(grad: Tensor) -> Tensor:
        seen.append(torch.rand(2))
        return grad + torch.zeros_like(grad)

    model, sgd = built()
    next(model.parameters()).register_hook(noisy)
    sgd.register_step_pre_hook(lambda *_: seen.append(torch.rand(2)))
    acc = ga.Accumulator(model, sgd, every=2, dropout="per-sample")
    acc.step(data(), loss)
    assert len(seen) == 3
    assert len({tuple(one.tolist()) for one in seen}) == 3


# --- what dropout is --------------------------------------------------------------------------


class Fixed:
    """A source with the samples along dimension 0."""

    active = True

    def keep(self, kind: str, shape: tuple[int, ...], like: Tensor, probability: float) -> Tensor:
        return keep(3, torch.arange(shape[0]), shape, Layout(0), probability)

    def uniform(self, *_: Any) -> Tensor:
        raise AssertionError("nothing here asks for it")

    normal = uniform


def test_what_is_kept_is_scaled_and_what_is_dropped_is_zero() -> None:
    x = torch.randn(50, 40, dtype=torch.float64, requires_grad=True)
    with Keyed(Fixed()):
        out = F.dropout(x, 0.25)
    mask = Fixed().keep("", (50, 40), x, 0.75)
    torch.testing.assert_close(out, torch.where(mask, x / 0.75, 0.0), rtol=4 * EPS, atol=0)
    out.sum().backward()
    torch.testing.assert_close(x.grad, mask.double() / 0.75, rtol=4 * EPS, atol=0)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(400, 500, dtype=torch.float64)
    with Keyed(Fixed()):
        out = F.alpha_dropout(x, 0.3, training=True)
    # fourth moment of the mixture is below 10: five deviations of its mean square
    assert abs(float(out.mean())) < 5 / math.sqrt(x.numel())
    assert abs(float(out.var()) - 1) < 5 * math.sqrt(10 / x.numel())


@pytest.mark.parametrize("function", [F.dropout1d, F.dropout2d, F.dropout3d])
def test_whole_channels_are_dropped(function: Callable[..., Tensor]) -> None:
    space = {F.dropout1d: (5,), F.dropout2d: (5, 2), F.dropout3d: (5, 2, 3)}[function]
    x = torch.ones(20, 7, *space)
    with Keyed(Fixed()):
        out = function(x, 0.5).flatten(2)
    assert torch.equal(out, out[..., :1].expand_as(out))
    assert sorted(set(out.flatten().tolist())) == [0.0, 2.0]


UNLIKELY = 1e-300  # what is dropped with this probability never is


def attentions() -> dict[str, dict[str, Any]]:
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    nothing = causal.clone()
    nothing[1] = False  # a query that may look at nothing
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "a scale": {"scale": 0.3},
        "a mask": {"attn_mask": causal},
        "a query that sees nothing": {"attn_mask": nothing},
        "a bias": {"attn_mask": torch.randn(4, 4, dtype=torch.float64)},
    }


@pytest.mark.parametrize("options", attentions().values(), ids=attentions())
def test_attention_is_torchs_own_but_for_what_is_dropped(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(3, 2, 4, 8, dtype=torch.float64) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    with Keyed(Fixed()):
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=UNLIKELY, **options)
    torch.testing.assert_close(found, expected, rtol=100 * EPS, atol=100 * EPS)


def test_grouped_queries_are_torchs_own_too() -> None:
    q = torch.randn(3, 4, 5, 8, dtype=torch.float64)
    k, v = (torch.randn(3, 2, 5, 8, dtype=torch.float64) for _ in range(2))
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with Keyed(Fixed()):
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=UNLIKELY, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=100 * EPS, atol=100 * EPS)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_are_torchs_own_but_for_what_is_dropped(
    kind: Any, bidirectional: bool, batch_first: bool
) -> None:
    layers = kind(WIDTH, 5, 3, bidirectional=bidirectional, batch_first=batch_first).double()
    x = torch.randn(4, 6, WIDTH, dtype=torch.float64)
    expected = layers(x)
    layers.dropout = UNLIKELY
    with Keyed(Fixed()):
        found = layers(x)
    for one, other in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=100 * EPS, atol=100 * EPS)


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in flat(part)]


def test_multi_head_attention_is_torchs_own_but_for_what_is_dropped() -> None:
    module = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()
    x = torch.randn(4, 6, WIDTH, dtype=torch.float64)
    for weights in (False, True):
        module.dropout = 0.0
        expected = module(x, x, x, need_weights=weights)
        module.dropout = UNLIKELY
        with Keyed(Fixed()):
            found = module(x, x, x, need_weights=weights)
        for one, other in zip(found, expected, strict=True):
            if isinstance(other, Tensor):
                torch.testing.assert_close(one, other, rtol=100 * EPS, atol=100 * EPS)


def test_what_has_a_generator_of_its_own_keeps_it() -> None:
    own = torch.Generator().manual_seed(0)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    with Keyed(Fixed()):
        assert torch.equal(torch.rand(3, generator=own), expected)


# --- where it cannot hold ---------------------------------------------------------------------


def test_other_random_numbers_are_told_of_once() -> None:
    torch.manual_seed(0)
    model = Lambda(lambda x: F.rrelu(x, training=True)).double()
    acc = ga.Accumulator(model, SGD(model.parameters(), lr=1e-3), every=3, dropout="per-sample")
    with pytest.warns(ga.SplitWarning, match="cannot be keyed by sample"):
        acc.step(data(), loss)
    acc.step(data(), loss)  # a second warning would be an error here


def test_a_loop_of_the_users_own_is_refused() -> None:
    acc = ga.Accumulator(*built(), dropout="per-sample")
    refused(
        lambda: acc.microbatches(data().split(3)),
        errors.InputError,
        "dropout-loop",
        "in a loop of your own the forward is yours",
    )


def test_a_compiled_model_is_refused() -> None:
    model, sgd = built()
    refused(
        lambda: ga.Accumulator(torch.compile(model), sgd, dropout="per-sample"),
        errors.InputError,
        "dropout-compiled",
        "cannot reach into compiled code",
    )


def test_packed_sequences_are_refused() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), STEPS)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.rnn(packed)[0].data

    refused(
        lambda: train(Packed, 2),
        errors.InputError,
        "dropout-layout",
        "cannot be keyed by sample on a PackedSequence",
    )


def test_pairs_of_samples_are_refused() -> None:
    def pairs(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        scores = F.dropout(model(x).flatten(1) @ model(x).flatten(1).T, 0.5)
        return scores.sum(), len(x)

    refused(
        lambda: train(lambda: Lambda(torch.tanh), 2, loss_fn=pairs),
        errors.InputError,
        "dropout-layout",
        "no dimension there is the samples'",
    )


def test_samples_of_other_sizes_in_one_row_are_refused() -> None:
    """Tokens without padding: which are whose cannot be told from their number."""
    sizes = [3, 1, 5, 2, 4]  # fifteen rows: as many as five samples of three would have

    def packed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        rows = torch.cat([x[:n] for x, n in zip(batch["x"], batch["n"].tolist(), strict=True)])
        return model(rows).sum(), len(rows)

    batch = {"x": data(5), "n": torch.tensor(sizes)}
    refused(
        lambda: train(lambda: Lambda(lambda x: F.dropout(x, 0.5)), 1, batch=batch, loss_fn=packed),
        errors.InputError,
        "dropout-layout",
        "the samples are packed into one dimension",
    )


def test_a_checkpoint_without_the_random_state_is_refused() -> None:
    refused(
        lambda: train(lambda: Checkpointed(False, preserve_rng_state=False), 2),
        errors.LoopError,
        "dropout-checkpoint",
        "without the random state of the first time",
    )


def test_after_a_refusal_nothing_of_the_window_is_left() -> None:
    model, sgd = built()
    acc = ga.Accumulator(model, sgd, every=2, dropout="per-sample")

    def failing(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        raise MemoryError("out of it")

    with pytest.raises(MemoryError):
        acc.step(data(), failing)
    assert acc.pending == 0
    drawn = F.dropout(torch.ones(1000), 0.5)  # no mode is left behind
    torch.manual_seed(1)
    first = F.dropout(torch.ones(1000), 0.5)
    torch.manual_seed(1)
    assert torch.equal(first, F.dropout(torch.ones(1000), 0.5))
    assert not torch.equal(first, drawn)


def built() -> tuple[nn.Module, SGD]:
    model = MODELS["Dropout"]().double()
    return model, SGD(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("draw", ["numpy", "python", "torch"])
def test_finding_where_the_samples_are_draws_from_no_generator(draw):
    np = pytest.importorskip("numpy")
    drawn = {
        "numpy": lambda: float(np.random.rand()),
        "python": random.random,
        "torch": lambda: float(torch.rand(())),
    }[draw]

    def train(limit, every):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        seen = []
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        acc = ga.Accumulator(model, optimizer, every=every, dropout="per-sample")

        def loss_fn(model, x):
            factor = drawn() if draw != "torch" else 1.0
            seen.append(factor)
            if len(x) > limit:
                raise torch.OutOfMemoryError("too large")
            return model(x).square().sum() * (1 + factor), len(x)

        update = acc.step(torch.randn(20, 3, dtype=torch.float64), loss_fn)
        return model[0].weight.detach().clone(), update.microbatches, seen, drawn()

    split, number, _, after = train(5, 1)
    free, again, seen, also = train(20, number)
    assert number == again == 4
    assert torch.equal(split, free)
    assert after == also
    if draw != "torch":
        np.random.seed(0)
        random.seed(0)
        # two forwards find the layout, from the numbers that the first micro-batch has again
        first = [drawn() for _ in range(number)]
        assert seen == [first[0]] * 2 + first
        assert after == drawn()
