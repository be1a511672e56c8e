"""Counts that only a device knows divide as exactly, unread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradaccum as ga
from gradaccum.engine import loss as loss_module
from probe import EPS, SAMPLES, Probe, exactly, rows, singles
from terms import TERM_WINDOWS, term_weights


@pytest.fixture
def _unread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave counts on the CPU unread, as those on a GPU are: the arithmetic is then torch's."""
    read = loss_module.read_count

    def unread(count: Any, where: str) -> Any:
        return count if isinstance(count, Tensor) else read(count, where)

    monkeypatch.setattr(loss_module, "read_count", unread)


def on_device(count: int) -> Tensor:
    return torch.tensor(count)


@pytest.mark.usefixtures("_unread_counts")
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 100.0}, {"clip_value": 100.0}, {"on_stale": "zero"}],
    ids=["plain", "clip norm", "clip value", "kept apart"],
)
@pytest.mark.parametrize("mean", [False, True], ids=["sums", "means"])
def test_counts_that_only_a_device_knows_divide_as_exactly(
    options: dict[str, Any], mean: bool
) -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=3, **options)
    for _ in range(2):  # the second window has a usual count to start from
        for micro in acc.microbatches([rows(0, 1, 2), rows(3), rows(4, 5)]):
            loss = probe(micro.batch).sum() / (len(micro.batch) if mean else 1)
            micro.backward(loss, on_device(len(micro.batch)), reduction="mean" if mean else "sum")
    assert micro.update is not None
    assert isinstance(micro.update.count, Tensor)
    assert int(micro.update.count) == 6
    assert probe.weights() == pytest.approx([2 / 6] * 6 + [0.0] * 2, rel=4 * EPS, abs=0)


@pytest.mark.usefixtures("_unread_counts")
@pytest.mark.parametrize("name", [name for name in TERM_WINDOWS if "throughout" not in name])
def test_terms_whose_counts_only_a_device_knows_divide_as_exactly(name: str) -> None:
    window = TERM_WINDOWS[name]
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=len(window))
    for micro in acc.microbatches(window):
        micro.backward(
            {
                term: (probe(rows(*samples)).sum(), on_device(count))
                for term, (samples, count) in micro.batch.items()
            }
        )
    assert probe.weights() == pytest.approx(term_weights(window), rel=4 * EPS, abs=0)


@pytest.mark.usefixtures("_unread_counts")
def test_a_window_that_only_the_device_knows_to_be_empty_moves_nothing() -> None:
    probe = Probe()
    acc = ga.Accumulator(probe, probe.sgd, every=2)
    for micro in acc.microbatches(singles(0, 2)):
        micro.backward(probe(micro.batch).sum() * 0, on_device(0))
    assert micro.update is not None
    assert float(micro.update.loss) == 0.0
    assert probe.weights() == exactly()


@pytest.mark.usefixtures("_unread_counts")
@pytest.mark.parametrize("fused", [False, True])
def test_sparse_and_fused_updates_take_a_factor_from_the_device(fused: bool) -> None:
    embedding = nn.Embedding(SAMPLES, 1, sparse=not fused)
    nn.init.zeros_(embedding.weight)
    optimizer = SGD(embedding.parameters(), lr=1.0, fused=fused)
    acc = ga.Accumulator(embedding, optimizer, every=2)
    for micro in acc.microbatches([torch.tensor([0, 1, 2]), torch.tensor([3])]):
        micro.backward(embedding(micro.batch).sum(), on_device(len(micro.batch)))
    assert embedding.weight[:, 0].tolist() == [-1 / 4] * 4 + [0.0] * 4
