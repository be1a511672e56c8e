"""A small decoder-only transformer, and its loss as a sum and a count.

In shapes: B samples, T positions, V words of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradaccum.demo.data import PAD

__all__ = ["Decoder", "DecoderConfig", "loss_fn"]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a `Decoder`."""

    vocabulary: int
    max_length: int
    width: int = 96
    heads: int = 3
    layers: int = 3


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.merge(self._attend(self.attention_norm(hidden)))
        return hidden + self.mlp(self.mlp_norm(hidden))

    def _attend(self, hidden: Tensor) -> Tensor:
        parts = self.query_key_value(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width / heads)
        # Padding is on the right and no position looks to its right: padding needs no mask.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Pre-norm transformer with learned positions and one matrix for both ends of the vocabulary.

    Args:
        config: its sizes.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.max_length, config.width)
        self.blocks = nn.ModuleList(
            _Block(config.width, config.heads) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of every next token; `(B, T)` int64 in, `(B, T, V)` out."""
        hidden = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.token.weight)


def loss_fn(model: nn.Module, micro_batch: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of the next tokens and how many there are; both of shape `()`.

    Args:
        model: maps tokens `(B, T)` to scores `(B, T, V)`.
        micro_batch: padded samples of shape `(B, 1 + T)`, on any device.
    """
    device = next(model.parameters()).device
    tokens = micro_batch.to(device, non_blocking=True)
    targets = tokens[:, 1:].flatten()
    scores = model(tokens[:, :-1]).flatten(0, 1)
    loss_sum = F.cross_entropy(scores, targets, ignore_index=PAD, reduction="sum")
    return loss_sum, torch.count_nonzero(targets != PAD)
