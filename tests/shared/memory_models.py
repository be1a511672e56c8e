"""Five models whose memory grows in different ways, and batches for them of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    model: nn.Module
    batch: Callable[[int, int], Tensor]
    """`batch(samples, width)`; the width plays no part where `ragged` is false."""
    ragged: bool


class Tagger(nn.Module):
    def __init__(self, words: int, width: int, body: nn.Module, out: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.body = body
        self.out = nn.Linear(out, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.table(tokens))
        return self.out(hidden[0] if isinstance(hidden, tuple) else hidden)


class Attention(nn.Module):
    """Attention written out, so that its scores are in memory: quadratic in the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 3 * width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.inner(hidden).chunk(3, dim=-1)
        n = hidden.shape[1]
        mask = torch.full((n, n), -1e9, device=hidden.device).triu(1)
        scores = query @ key.transpose(1, 2) + mask
        return hidden + scores.softmax(-1) @ value


def _tokens(samples: int, width: int) -> Tensor:
    return torch.randint(1, 300, (samples, width))


def cases() -> dict[str, Callable[[], Case]]:
    def mlp() -> Case:
        layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)
        )
        return Case(layers, lambda n, w: torch.randn(n, 64), ragged=False)

    def cnn() -> Case:
        layers = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, padding=1, stride=2),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24, 5),
        )
        return Case(layers, lambda n, w: torch.randn(n, 3, 24, 24), ragged=False)

    def transformer() -> Case:
        layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True)
        body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return Case(Tagger(300, 48, body, 48), _tokens, ragged=True)

    def quadratic() -> Case:
        body = nn.Sequential(Attention(16), Attention(16))
        return Case(Tagger(300, 16, body, 16), _tokens, ragged=True)

    def lstm() -> Case:
        body = nn.LSTM(32, 64, 2, batch_first=True)
        return Case(Tagger(300, 32, body, 64), _tokens, ragged=True)

    def embedding() -> Case:
        # Its gradient is the peak of small micro-batches, the activations that of large ones.
        return Case(Tagger(20_000, 16, nn.Linear(16, 64), 64), _tokens, ragged=True)

    return {
        "mlp": mlp,
        "cnn": cnn,
        "transformer": transformer,
        "quadratic attention": quadratic,
        "lstm": lstm,
        "embedding": embedding,
    }


def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


def padded(lengths: list[int]) -> Tensor:
    """Tokens of these lengths, padded with zeros."""
    tokens = torch.randint(1, 300, (len(lengths), max(lengths)))
    return tokens * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])
