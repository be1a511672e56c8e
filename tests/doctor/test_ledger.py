"""The ledger against differentiation: a multiplier for every loss value, all values being 1."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradaccum.doctor.ledger import read
from gradaccum.doctor.reading import Reading
from gradaccum.doctor.saved import tells

ROWS, CLASSES, LENGTH = 4, 3, 5


class Part:
    """One loss term, twice: as users write it, and from given loss values."""

    name = ""

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        self.dtype = dtype
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        self.logits = torch.randn(ROWS, CLASSES, generator=generator, dtype=dtype)
        self.labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
        self.labels[rng.randrange(ROWS)] = -100
        self.mask = torch.ones(ROWS, LENGTH, dtype=dtype)
        for row in range(ROWS):
            self.mask[row, rng.randrange(1, LENGTH + 1) :] = 0
        self.tokens = torch.randn(ROWS, LENGTH, generator=generator, dtype=dtype)
        self.sizes = torch.tensor([1.0, 2.0, 4.0], dtype=dtype)

    def values(self) -> Tensor:
        """Loss values that are all 1."""
        return torch.ones(ROWS, dtype=self.dtype)

    def real(self, model: Tensor) -> Tensor:
        raise NotImplementedError

    def from_values(self, values: Tensor) -> Tensor:
        raise NotImplementedError


class CrossEntropy(Part):
    name = "nll_loss"
    reduction = "mean"

    def real(self, model):
        return F.cross_entropy(self.logits * model, self.labels, reduction=self.reduction)

    def from_values(self, values):
        kept = values[self.labels != -100]
        return kept.sum() / len(kept) if self.reduction == "mean" else kept.sum()


class CrossEntropySum(CrossEntropy):
    reduction = "sum"


class CrossEntropyByHand(Part):
    name = "nll_loss"

    def real(self, model):
        each = F.cross_entropy(self.logits * model, self.labels, reduction="none")
        return each.sum() / (self.labels != -100).sum()

    def from_values(self, values):
        kept = self.labels != -100
        return (values * kept).sum() / kept.sum()


class PaddedMean(CrossEntropyByHand):
    """Divided by all rows, the ignored ones too."""

    def real(self, model):
        return F.cross_entropy(self.logits * model, self.labels, reduction="none").mean()

    def from_values(self, values):
        return (values * (self.labels != -100)).mean()


class Masked(Part):
    name = "pow"

    def values(self):
        return torch.ones(ROWS, LENGTH, dtype=self.dtype)

    def real(self, model):
        return ((self.tokens * model - 1).pow(2) * self.mask).sum() / self.mask.sum()

    def from_values(self, values):
        return (values * self.mask).sum() / self.mask.sum()


class PerSample(Masked):
    """A mean over each sample's tokens, then over samples: no two weights need be alike."""

    def real(self, model):
        each = (self.tokens * model - 1).pow(2) * self.mask
        return (each.sum(1) / self.mask.sum(1)).mean()

    def from_values(self, values):
        return ((values * self.mask).sum(1) / self.mask.sum(1)).mean()


class Chosen(Masked):
    def real(self, model):
        return (self.tokens * model - 1).pow(2)[self.mask.bool()].mean()

    def from_values(self, values):
        return values[self.mask.bool()].mean()


class Filled(Masked):
    name = "abs"

    def real(self, model):
        each = (self.tokens * model - 1).abs().masked_fill(self.mask == 0, 0.0)
        return each.sum()

    def from_values(self, values):
        return values.masked_fill(self.mask == 0, 0.0).sum()


class MeanSquares(Part):
    name = "mse_loss"

    def values(self):
        return torch.ones(ROWS, CLASSES, dtype=self.dtype)

    def real(self, model):
        return F.mse_loss(self.logits * model, torch.zeros_like(self.logits))

    def from_values(self, values):
        return values.mean()


class Weighted(Part):
    name = "nll_loss"

    def real(self, model):
        return F.cross_entropy(self.logits * model, self.labels, weight=self.sizes)

    def from_values(self, values):
        kept = self.labels != -100
        weights = self.sizes[self.labels[kept]]
        return (values[kept] * weights).sum() / weights.sum()


class Soft(Part):
    name = "cross_entropy"

    def real(self, model):
        return F.cross_entropy(self.logits * model, self.logits.softmax(1))

    def from_values(self, values):
        return -(-values).sum() / ROWS


PARTS = [
    CrossEntropy, CrossEntropySum, CrossEntropyByHand, PaddedMean, Masked, PerSample, Chosen,
    Filled, MeanSquares, Weighted, Soft,
]  # fmt: skip

ONE = {"alone": lambda parts, n: parts[0], "divided": lambda parts, n: parts[0] / n}
MANY = {
    "sum": lambda parts, n: sum(parts) / n,
    "factors": lambda parts, n: (0.3 * parts[0] + sum(parts[1:]) / 7) * (1 / n),
    "outside": lambda parts, n: parts[0] / n + 0.1 * sum(parts[1:]),
    "minus": lambda parts, n: (parts[0] - sum(parts[1:]) * 0.01) / n,
    "stack": lambda parts, n: torch.stack([part.reshape(()) for part in parts]).mean() / n,
    "scaled": lambda parts, n: sum(parts) / n * torch.tensor(1024.0, dtype=parts[0].dtype),
    "in place": lambda parts, n: (parts[0] + 2 * sum(parts[1:])).div_(n),
}


def loops():
    rng = random.Random(0)
    for number in range(50):
        single = number % 5 == 0
        ways = ONE if single else MANY
        kinds = rng.sample(PARTS, 1 if single else rng.choice([2, 2, 3]))
        if len({kind.name for kind in kinds}) < len(kinds):
            kinds = [kinds[0], MeanSquares if kinds[0] is not MeanSquares else Filled]
            kinds = kinds[:1] if single else kinds
        full, total = rng.choice([2, 3, 4]), rng.randrange(3, 9)
        dtype = rng.choice([torch.float32, torch.float64])
        seed = rng.choice([None, None, 0.5, 3.0])
        yield pytest.param(
            kinds, rng.choice(sorted(ways)), full, total, dtype, seed, number,
            id=f"{number}-{'+'.join(kind.__name__ for kind in kinds)}",
        )  # fmt: skip


def truth(parts: list[Part], way, n: int, seed: Tensor) -> list[tuple[float, Tensor]]:
    """For each part the weight of its mean, and of each of its values, by differentiation."""
    wholes = [torch.ones((), dtype=part.dtype, requires_grad=True) for part in parts]
    way([one * 1 for one in wholes], n).backward(seed)
    values = [part.values().requires_grad_() for part in parts]
    reduced = [part.from_values(one) for part, one in zip(parts, values, strict=True)]
    way(reduced, n).backward(seed)
    return [
        (whole.grad.item(), one.grad) for whole, one in zip(wholes, values, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "way", "full", "total", "dtype", "seed", "number"), list(loops())
)
def test_weights_are_those_of_differentiation(kinds, way, full, total, dtype, seed, number):
    rng = random.Random(number)
    combine = {**ONE, **MANY}[way]
    model = torch.ones((), dtype=dtype, requires_grad=True)
    told = 0
    for start in range(0, total, full):
        length = min(full, total - start)  # the last window may be short
        for _ in range(length):
            parts = [kind(rng, dtype) for kind in kinds]
            loss = combine([part.real(model) for part in parts], length)
            given = torch.ones_like(loss) if seed is None else torch.full_like(loss, seed)
            before = loss.grad_fn._sequence_nr()
            found = {term.name: term for term in Reading.from_dict(read((loss,), (given,))).terms}
            assert loss.grad_fn._sequence_nr() == before
            assert model.grad is None
            for part, (whole, each) in zip(
                parts, truth(parts, combine, length, given), strict=True
            ):
                term = found.pop(part.name)
                if term.weight is None:
                    assert term.why
                    continue
                told += 1
                held = each[each != 0]
                if term.each is not None:
                    assert (held == term.each).all()
                elif not isinstance(part, Weighted):
                    assert held.min() != held.max()
                wanted = whole if term.reduction == "mean" and not _by_element(part) else None
                assert term.weight == (math.fsum(held.tolist()) if wanted is None else wanted)
                assert term.count == (
                    part.sizes[part.labels[part.labels >= 0]].sum()
                    if isinstance(part, Weighted)
                    else held.numel()
                )
            assert not found
            loss.backward(given)  # the graph was left as it was
            model.grad = None
    assert told == total * len(kinds)  # of these, nothing is unknown


def _by_element(part: Part) -> bool:
    """Whether the graph shows a mean whose elements have weights of their own."""
    return isinstance(part, (PaddedMean, PerSample))


def one(loss: Tensor):
    [term] = Reading.from_dict(read((loss,), (None,))).terms
    return term


WEIGHT = torch.ones(3)


def test_a_wrong_factor_would_be_seen():
    weight = WEIGHT.clone().requires_grad_()
    assert one((weight - 2).pow(2).mean() / 4).weight == 0.25
    assert one((weight - 2).pow(2).mean() / 5).weight != 0.25


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("the ledger ran the user's backward")


def test_what_the_graph_does_not_show_is_unknown():
    weight = WEIGHT.clone().requires_grad_()
    term = one(Square.apply(weight) / 4)
    assert term.weight is None
    assert "inside" in term.why


def test_a_compiled_loss_is_unknown_or_right():
    weight = WEIGHT.clone().requires_grad_()
    compiled = torch.compile(lambda w: (w - 2).pow(2).mean() / 4, backend="aot_eager")
    term = one(compiled(weight))
    assert term.weight is None


@pytest.mark.skipif(
    not tells(torch), reason="no saved tensor tells before torch 2.7: there the trace does not ask"
)
def test_checkpointing_is_not_started_again():
    weight = WEIGHT.clone().requires_grad_()
    runs = []

    def block(w):
        runs.append(1)
        return F.mse_loss(w * w, torch.zeros(3)) / 4

    loss = torch.utils.checkpoint.checkpoint(block, weight, use_reentrant=False)
    found = Reading.from_dict(read((loss,), (None,)))
    assert len(runs) == 1
    assert [term.weight for term in found.terms] == [None]
    loss.backward()
    assert len(runs) == 2


def test_no_hook_runs():
    weight = WEIGHT.clone().requires_grad_()
    loss = (weight - 2).pow(2).mean() / 4
    ran = []
    loss.grad_fn.register_hook(lambda *_: ran.append("node"))
    loss.register_hook(lambda _: ran.append("tensor"))
    weight.register_hook(lambda _: ran.append("leaf"))
    assert one(loss).weight == 0.25
    assert ran == []


def test_a_graph_that_was_changed_or_freed_is_unknown():
    weight = WEIGHT.clone().requires_grad_()
    factor = torch.ones(3) * 2
    loss = ((weight - 2).pow(2) * factor).sum() / factor.sum()
    factor.add_(1)
    found = Reading.from_dict(read((loss,), (None,)))
    assert all(term.weight is None or term.why == "" for term in found.terms)
    done = F.mse_loss(weight, torch.zeros(3))
    done.backward()
    assert one(done).weight is None


def test_a_loss_counted_again_has_the_same_serial():
    weight = torch.zeros(4, requires_grad=True)
    total, seen = torch.zeros(()), []
    for at in range(3):
        total = total - weight[at]
        reading = Reading.from_dict(read((total,), (None,)))
        seen.append({term.serial for term in reading.terms})
    assert seen[0] < seen[1] < seen[2]


def test_several_roots_and_edges():
    weight = WEIGHT.clone().requires_grad_()
    first, second = weight.pow(2).mean(), weight.abs().sum()
    found = Reading.from_dict(read((first, second), (None, torch.tensor(0.5))))
    assert {term.name: term.weight for term in found.terms} == {"pow": 1.0, "abs": 1.5}
    edge = torch.autograd.graph.get_gradient_edge(first)
    assert one.__name__
    [term] = Reading.from_dict(read((edge,), (torch.ones(()),))).terms
    assert term.weight == 1.0


def test_a_vector_with_its_own_seeds():
    weight = WEIGHT.clone().requires_grad_()
    seeds = torch.tensor([1.0, 2.0, 0.0])
    [term] = Reading.from_dict(read((weight.pow(2),), (seeds,))).terms
    assert (term.weight, term.count) == (3.0, 2.0)


def test_samples_compared_with_each_other_are_marked():
    encoder = nn.Linear(4, 4)
    left, right = encoder(torch.randn(3, 4)), encoder(torch.randn(3, 4))
    assert one(F.cross_entropy(left @ right.T / 0.1, torch.arange(3))).coupled
    assert not one(F.cross_entropy(left[:, :3], torch.arange(3))).coupled


def test_nothing_is_kept_or_drawn():
    weight = WEIGHT.clone().requires_grad_()
    state = torch.get_rng_state()
    found = read(((weight - 2).pow(2).mean(),), (None,))
    assert torch.equal(state, torch.get_rng_state())

    def plain(value):
        if isinstance(value, dict):
            return all(map(plain, value.values()))
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    assert plain(found)
