"""Models and losses of many kinds, each with what is known about it beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

SAMPLES, WIDTH, CLASSES, STEPS = 12, 6, 3, 5

Loss = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Known:
    """A model, a loss and a batch, and why the batch may not be split."""

    model: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[], Any]
    causes: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    """Names that a cause must give."""
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    """What it can be computed in."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labelled() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, WIDTH, generator=generator())
    return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator())


def in_turn() -> tuple[Tensor, Tensor]:
    """Neighbours of several classes, so that no micro-batch lacks one."""
    return labelled()[0], torch.tensor([1, 2, 0, 1, 1, 2, 1, 2, 2, 0, 1, 2])


def images() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 3, 8, 8, generator=generator())
    return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator())


def sequences() -> dict[str, Tensor]:
    """Ragged labels, padded with -100."""
    x = torch.randn(SAMPLES, STEPS, WIDTH, generator=generator())
    y = torch.randint(0, CLASSES, (SAMPLES, STEPS), generator=generator())
    lengths = torch.arange(SAMPLES) % STEPS + 1
    y[torch.arange(STEPS) >= lengths[:, None]] = -100
    return {"x": x, "y": y}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (8, 7), generator=generator())
    lengths = torch.tensor([7, 3, 5, 2, 6, 7, 4, 3])
    mask = (torch.arange(7) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


def mlp(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), *middle, nn.ReLU(), nn.Linear(8, CLASSES))


def ce(**options: Any) -> Loss:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1], **options), len(batch[0])

    return loss


summed = ce(reduction="sum")
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    weights = CLASS_WEIGHTS.to(batch[0].dtype)
    loss = F.cross_entropy(model(batch[0]), batch[1], weight=weights)
    return loss, weights[batch[1]].sum()


def focal(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    log = F.log_softmax(model(batch[0]), 1).gather(1, batch[1][:, None])
    return (-((1 - log.exp()) ** 2) * log).sum(), len(batch[0])


def focal_by_positives(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """As detectors have it: divided by the positives of the batch, counted as one."""
    return focal(model, batch)[0] / (batch[1] > 0).sum(), 1


def token_sum(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return loss, (batch["y"] != -100).sum()


def token_mean_by_samples(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten()), len(batch["x"])


def ctc(reduction: str) -> Loss:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        log = F.log_softmax(model(batch["x"]), 2).transpose(0, 1)
        n = len(batch["x"])
        targets = torch.ones(n, 2, dtype=torch.long)
        targets[:, 1] = 2
        steps = torch.full((n,), STEPS)
        lengths = torch.arange(n) % 2 + 1
        return F.ctc_loss(log, targets, steps, lengths, reduction=reduction), n

    return loss


def ctc_own_lengths(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    log = F.log_softmax(model(batch["x"]), 2).transpose(0, 1)
    targets = torch.tensor([[1, 2]]).expand(len(batch["x"]), 2)
    lengths = (batch["y"][:, 1] != -100).long() + 1
    steps = torch.full((len(batch["x"]),), STEPS)
    return F.ctc_loss(log, targets, steps, lengths, reduction="sum"), len(batch["x"])


def contrastive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    z = F.normalize(model(batch[0]), dim=1)
    scores = z @ z.T / 0.1
    return F.cross_entropy(scores, torch.arange(len(z)), reduction="sum"), len(z)


def barlow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    z = model(batch[0])
    z = (z - z.mean(0)) / z.std(0)
    return (z.T @ z / len(z) - torch.eye(CLASSES)).square().sum() * len(z), len(z)


def triplet(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Hardest positive and hardest negative of the batch."""
    apart = torch.cdist(model(batch[0]), model(batch[0]))
    same = batch[1][:, None] == batch[1]
    far = apart.where(same, 0.0).amax(1)
    near = apart.where(~same, 1e3).amin(1)
    return F.softplus(far - near).sum(), len(batch[0])


def dice(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    p, t = model(batch[0]).sigmoid(), F.one_hot(batch[1], CLASSES)
    return (1 - 2 * (p * t).sum() / (p + t).sum()) * len(p), len(p)


def r_drop(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    one, two = (F.log_softmax(model(batch[0]), 1) for _ in range(2))
    both = F.kl_div(one, two, log_target=True, reduction="sum")
    return both + F.nll_loss(one + two, batch[1], reduction="sum"), len(batch[0])


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    loss, count = summed(model, batch)
    return loss + sum(p.square().sum() for p in model.parameters()), count


def penalty_apart(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    penalty = sum(p.square().sum() for p in model.parameters())
    return {"ce": summed(model, batch), "penalty": (penalty, 1)}


def balanced(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """A load-balancing loss: the product of two means over the batch."""
    p = model(batch[0]).softmax(1)
    use = F.one_hot(p.argmax(1), CLASSES).to(p.dtype).mean(0)
    return {"ce": summed(model, batch), "balance": (CLASSES * (use * p.mean(0)).sum(), 1)}


def gradient_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.square().sum(1) - 1).square().sum(), len(x)


def constant_count(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return summed(model, batch)[0], SAMPLES


def mixup(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    other = torch.randperm(len(batch[0]))
    return F.cross_entropy(
        model(0.7 * batch[0] + 0.3 * batch[0][other]), batch[1], reduction="sum"
    ), len(batch[0])


class Residual(nn.Module):
    """Convolution, normalisation, ReLU, twice, and a way around them."""

    def __init__(self, norm: Callable[[int], nn.Module], wide: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, wide, 3, padding=1, bias=False), norm(wide)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False), norm(wide)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(inner)))


def cnn(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            norm(4),
            nn.ReLU(),
            Residual(norm),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, CLASSES),
        )

    return make


def in_eval(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().eval()


class Standardise(nn.Module):
    """BatchNorm by hand, under a name that says nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3)


class Running(nn.Module):
    """Divides by a running size that the forward itself moves."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = x / self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * x.abs().max())
        return out


class Counter(nn.Module):
    """Counts its calls and keeps its last output, which changes no number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.last = x.detach()
        return x


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.6)
        return x * kept / 0.6


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn_like(x)


class Mixing(nn.Module):
    """Samples attend to each other, through a layer that was meant for sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # (samples, 8) is one sequence


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.LSTM(WIDTH, 8, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def normed(model: nn.Module) -> nn.Module:
    parametrizations.weight_norm(model.get_submodule("0"))
    return model


def spectral() -> nn.Module:
    model = mlp()
    parametrizations.spectral_norm(model.get_submodule("0"))
    return model


class Rescaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(9, 6, max_norm=0.5), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).sum(1))


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 9, (SAMPLES, STEPS), generator=generator()), labelled()[1]


def per_step() -> nn.Module:
    return mlp()


def conv_bn_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[0])


OWN: dict[str, Known] = {
    "cross entropy, summed": Known(mlp, summed, labelled),
    "cross entropy, a mean said to be a sum": Known(mlp, ce(), labelled, ("factor",)),
    "cross entropy, a mean": Known(mlp, ce(), labelled, options={"reduction": "mean"}),
    "a sum said to be a mean": Known(
        mlp, summed, labelled, ("factor",), options={"reduction": "mean"}
    ),
    "label smoothing": Known(mlp, ce(reduction="sum", label_smoothing=0.1), labelled),
    "class weights, counted": Known(mlp, weighted, labelled, options={"reduction": "mean"}),
    "class weights, samples counted": Known(
        mlp,
        lambda m, b: (weighted(m, b)[0], len(b[0])),
        labelled,
        ("shares",),
        options={"reduction": "mean"},
    ),
    "focal": Known(mlp, focal, labelled),
    "focal, divided by its positives": Known(mlp, focal_by_positives, in_turn, ("shares",)),
    "tokens, summed": Known(per_step, token_sum, sequences),
    "tokens, a mean by samples": Known(
        per_step, token_mean_by_samples, sequences, ("shares",), options={"reduction": "mean"}
    ),
    "CTC": Known(per_step, ctc_own_lengths, sequences),
    "contrastive": Known(mlp, contrastive, labelled, ("coupled",)),
    "Barlow twins": Known(mlp, barlow, labelled, ("coupled",)),
    "triplets of the batch": Known(mlp, triplet, labelled, ("coupled",)),
    "dice over the batch": Known(mlp, dice, labelled, ("coupled",)),
    "R-Drop": Known(lambda: mlp(nn.Dropout(0.5)), r_drop, labelled, ("dropout",), ("1",)),
    "a penalty on the weights": Known(mlp, penalised, labelled, ("constant",)),
    "the penalty as a term of its own": Known(mlp, penalty_apart, labelled),
    "load balancing": Known(mlp, balanced, labelled, ("coupled",)),
    "gradient penalty": Known(mlp, gradient_penalty, labelled),
    "a count that is always the same": Known(mlp, constant_count, labelled, ("factor",)),
    "mixup": Known(mlp, mixup, labelled, ("random",)),
    "BatchNorm": Known(lambda: mlp(nn.BatchNorm1d(8)), summed, labelled, ("batchnorm",), ("1",)),
    "BatchNorm without running estimates": Known(
        lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)),
        summed,
        labelled,
        ("batchnorm",),
        ("1",),
    ),
    "a residual CNN with BatchNorm": Known(
        cnn(nn.BatchNorm2d), summed, images, ("batchnorm",), ("1", "3.bn1", "3.bn2")
    ),
    "the CNN in eval mode": Known(in_eval(cnn(nn.BatchNorm2d)), summed, images),
    "the CNN with GroupNorm": Known(cnn(lambda c: nn.GroupNorm(2, c)), summed, images),
    "the CNN with InstanceNorm": Known(
        cnn(lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True)), summed, images
    ),
    "BatchNorm by hand": Known(lambda: mlp(Standardise()), summed, labelled, ("coupled",), ("1",)),
    "dropout": Known(lambda: mlp(nn.Dropout(0.5)), summed, labelled, ("dropout",), ("1",)),
    "alpha dropout": Known(
        lambda: mlp(nn.AlphaDropout(0.5)), summed, labelled, ("dropout",), ("1",)
    ),
    "dropout in eval mode": Known(in_eval(lambda: mlp(nn.Dropout(0.5))), summed, labelled),
    "stochastic depth": Known(lambda: mlp(DropPath()), summed, labelled, ("dropout",), ("1",)),
    "noise": Known(lambda: mlp(Noise()), summed, labelled, ("random",), ("1",)),
    "an LSTM with dropout": Known(Recurrent, token_sum, sequences, ("dropout",), ("rnn",)),
    "samples attend to each other": Known(
        lambda: mlp(Mixing()), summed, labelled, ("coupled",), ("1.attention",)
    ),
    "a running scale": Known(
        lambda: mlp(Running()), summed, labelled, ("side-effect",), ("1.scale",)
    ),
    "spectral norm, which iterates": Known(
        spectral, summed, labelled, ("side-effect",), ("0.parametrizations.weight.0._v",)
    ),
    "weight norm": Known(lambda: normed(mlp()), summed, labelled),
    "an embedding that rescales its rows": Known(Rescaled, summed, words),
    "a counter": Known(lambda: mlp(Counter()), summed, labelled),
    "BatchNorm, dropout and a mean": Known(
        lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.5)),
        ce(),
        labelled,
        ("batchnorm", "dropout", "factor"),
    ),
    "BatchNorm and a contrastive loss": Known(
        lambda: mlp(nn.BatchNorm1d(8)), contrastive, labelled, ("batchnorm", "coupled")
    ),
    "dropout, a running scale and a penalty": Known(
        lambda: mlp(nn.Dropout(0.5), Running()),
        penalised,
        labelled,
        ("dropout", "side-effect", "constant"),
    ),
    "dropout and a contrastive loss": Known(
        lambda: mlp(nn.Dropout(0.5)), contrastive, labelled, ("dropout", "coupled")
    ),
}
