from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradaccum.demo.data import BOS, PAD, collate
from gradaccum.demo.model import Decoder, DecoderConfig, loss_fn

VOCABULARY, LONGEST = 50, 24


@pytest.fixture
def model() -> Decoder:
    config = DecoderConfig(VOCABULARY, LONGEST, width=16, heads=2, layers=2)
    return Decoder(config).double()


@pytest.fixture
def samples() -> list[Tensor]:
    lengths = [1, 24, 3, 11, 24, 2, 7]
    return [torch.cat([torch.tensor([BOS]), torch.randint(3, VOCABULARY, (n,))]) for n in lengths]


def total(model: Decoder, split: list[list[Tensor]]) -> tuple[Tensor, int]:
    parts = [loss_fn(model, collate(group)) for group in split]
    return torch.stack([loss for loss, _ in parts]).sum(), sum(int(count) for _, count in parts)


# Some 70 terms of a few nats, each from a few hundred additions.
TOLERANCE = {"rtol": 1e-12, "atol": 0.0}


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_sums_over_any_split_are_the_sum_over_the_batch(
    model: Decoder, samples: list[Tensor], size: int
) -> None:
    whole, count = total(model, [samples])
    split = [samples[i : i + size] for i in range(0, len(samples), size)]
    parts, same_count = total(model, split)
    assert same_count == count == sum(len(s) - 1 for s in samples)
    torch.testing.assert_close(parts, whole, **TOLERANCE)


def test_means_of_means_are_not(model: Decoder, samples: list[Tensor]) -> None:
    whole, count = total(model, [samples])
    means = [loss / n for loss, n in (loss_fn(model, collate([s])) for s in samples)]
    assert abs(torch.stack(means).mean() - whole / count) > 1e-4


def test_more_padding_changes_nothing(model: Decoder, samples: list[Tensor]) -> None:
    short = samples[:1] + samples[2:4]
    tight = collate(short)
    wide = torch.nn.functional.pad(tight, (0, 10), value=PAD)
    (loss, count), (same, same_count) = loss_fn(model, tight), loss_fn(model, wide)
    assert count == same_count
    torch.testing.assert_close(same, loss, **TOLERANCE)


def test_no_position_sees_what_comes_after_it(model: Decoder) -> None:
    tokens = torch.randint(3, VOCABULARY, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = 3 + (changed[:, 7:] - 2) % (VOCABULARY - 3)
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7], **TOLERANCE)
    assert not torch.allclose(after[:, 7:], before[:, 7:])


def test_count_and_loss_stay_tensors(model: Decoder, samples: list[Tensor]) -> None:
    loss, count = loss_fn(model, collate(samples))
    assert loss.shape == count.shape == ()
    assert loss.requires_grad
    assert not count.requires_grad
