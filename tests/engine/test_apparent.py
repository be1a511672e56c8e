"""Memory of samples whose lengths nobody gave: planned by those that look largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import gradaccum as ga
from allocated import allocated, held
from gradaccum.planner.apparent import apparent_rows, apparent_size

WORDS, LONGEST = 120, 48


@dataclass
class Named:
    ids: Any
    label: int


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        (torch.zeros(3, 4), 12),
        (np.zeros((2, 5)), 10),
        ("seven", 5),
        (b"abc", 3),
        ([5, 6, 7], 3),
        ((torch.zeros(4), torch.tensor(1)), 5),
        ({"ids": [5, 6], "inner": {"mask": torch.ones(2)}, "name": "ab"}, 6),
        (Named(torch.zeros(7), 1), 8),
        (3, 1),
        (None, 1),
        ([], 0),
    ],
)
def test_what_a_sample_seems_to_hold(sample: object, size: int) -> None:
    assert apparent_size(sample) == size


def test_a_sample_that_holds_itself_has_an_end() -> None:
    sample: list[Any] = [{}]
    sample.append(sample)
    assert apparent_size(sample) < 1_000


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_what_a_row_holds_besides_its_padding(side: str, dtype: torch.dtype) -> None:
    lengths = [1, 4, 2, 6, 3]
    rows = torch.zeros(5, 6, dtype=dtype)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.tensor([1, 0, 1, 0, 0, 1][-length:]).to(dtype)  # ends in a one
    rows = rows if side == "right" else rows.flip(1)
    found = apparent_rows(rows, 5)
    assert found == [1, 4, 2, 5, 3]  # the last element of a full row might be padding
    assert apparent_rows(rows.numpy(), 5) == found


def test_rows_without_anything_to_see() -> None:
    assert apparent_rows(torch.zeros(3), 3) == [1, 1, 1]
    assert apparent_rows(torch.zeros(3, 0), 3) == [0, 0, 0]
    assert apparent_rows(torch.full((3, 4), torch.nan), 3) == [4, 4, 4]
    assert apparent_rows(["a", "abc", ""], 3) == [1, 3, 0]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 24)
        self.lstm = nn.LSTM(24, 24, batch_first=True)
        self.head = nn.Linear(24, WORDS)


def padded(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    hidden = model.head(torch.tanh(model.embed(ids)))
    return F.cross_entropy(hidden.flatten(0, 1), ids.flatten(), ignore_index=0, reduction="sum"), (
        ids > 0
    ).sum()


def packed(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    lengths = (ids > 0).sum(1)
    given = pack_padded_sequence(model.embed(ids), lengths, batch_first=True, enforce_sorted=False)
    hidden, _ = pad_packed_sequence(model.lstm(given)[0], batch_first=True)
    wanted = ids[:, : hidden.shape[1]]
    return F.cross_entropy(
        model.head(hidden).flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum"
    ), lengths.sum()


def collate(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def ragged(longest: int) -> list[Tensor]:
    """Short ones first, which are those that would be measured if nobody looked."""
    lengths = [4] * 20 + [longest // 2] * 10 + [longest, longest - 1, longest - 2] + [3] * 7
    return [torch.randint(1, WORDS, (length,)) for length in lengths]


def peak_of(model: nn.Module, step: Any, optimizer: torch.optim.Optimizer) -> int:
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return allocated(step) + held(*model.parameters(), *states)


KINDS: dict[str, tuple[Any, Any, dict[str, Any], float]] = {
    # The largest sample may be in a micro-batch that is a sample smaller than others.
    "collated": (padded, ragged(LONGEST), {"collate": collate}, 1.2),
    # Padding that the model passes over: the largest samples stand for all.
    "packed": (packed, collate(ragged(LONGEST)), {}, 4.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_kept_and_the_peak_foretold_where_no_lengths_are_given(
    kind: str, share: float
) -> None:
    loss_fn, batch, options, too_much = KINDS[kind]
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = ga.fit(model, loss_fn, batch, optimizer=optimizer, memory="1GiB", **options)
    floor = whole.memory.floor
    limit = floor + int(share * (whole.peak - floor))
    acc = ga.Accumulator(model, optimizer)

    def step() -> None:
        acc.step(batch, loss_fn, memory=limit, **options)

    step()
    peak = peak_of(model, step, optimizer)
    foretold = ga.fit(model, loss_fn, batch, optimizer=optimizer, memory=limit, **options).peak
    assert peak <= 1.05 * limit
    assert 0.9 <= foretold / peak <= too_much


@pytest.mark.slow
def test_larger_samples_than_those_that_were_measured_are_measured_again() -> None:
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = ga.Accumulator(model, optimizer)
    long = ragged(LONGEST)
    whole = ga.fit(model, padded, long, optimizer=optimizer, memory="1GiB", collate=collate)
    limit = whole.memory.floor + (whole.peak - whole.memory.floor) // 4
    first = acc.step(ragged(LONGEST // 6), padded, memory=limit, collate=collate)
    found = []

    def step() -> None:
        found.append(acc.step(long, padded, memory=limit, collate=collate))

    step()
    peak = peak_of(model, step, optimizer)
    assert first.microbatches < found[0].microbatches == found[1].microbatches
    assert peak <= 1.05 * limit
