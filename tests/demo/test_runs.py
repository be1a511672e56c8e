from __future__ import annotations

import pytest
import torch

from gradaccum.demo.data import Corpus, length
from gradaccum.demo.model import Decoder, DecoderConfig
from gradaccum.demo.runs import WAYS, probe, train, true_gradients

BUDGET = 512


@pytest.fixture
def start(corpus: Corpus) -> Decoder:
    return Decoder(DecoderConfig(len(corpus.tokenizer.words), 1024, width=16, heads=1, layers=1))


def test_ours_is_the_whole_batch_and_the_usual_loop_is_not(corpus: Corpus, start: Decoder) -> None:
    batch = [sample[:257] for sample in corpus.batches(20, 1, seed=0)[0]]
    truth = true_gradients(start, batch)
    whole, usual, ours = (probe(way, start, batch, BUDGET, truth) for way in WAYS)
    # float32 against float64 over a few thousand terms: far below 1e-5, far above 1e-9.
    assert 1e-9 < whole.distance < 1e-5
    assert 1e-9 < ours.distance < 1e-5
    assert usual.distance > 1e-2
    assert ours.peak_bytes < usual.peak_bytes < whole.peak_bytes


def test_all_ways_train_on_the_same_batches_from_the_same_start(
    corpus: Corpus, start: Decoder
) -> None:
    batches = [[s[:65] for s in batch] for batch in corpus.batches(12, 3, seed=0)]
    before = [p.detach().clone() for p in start.parameters()]
    rounds = list(train(start, batches, BUDGET))
    assert all(map(torch.equal, before, start.parameters()))
    assert len(rounds) == 3
    for batch, (whole, usual, ours) in zip(batches, rounds, strict=True):
        assert [whole.made.microbatches, usual.made.microbatches] == [1, 2]
        real = sum(map(length, batch))
        assert whole.made.padded == 12 * max(map(length, batch))
        assert real <= ours.made.padded < usual.made.padded <= whole.made.padded
        # Adam turns a gradient of rounding size into a whole step, so weights drift a little.
        assert ours.loss == pytest.approx(whole.loss, rel=1e-4)
    assert rounds[0][1].loss == pytest.approx(rounds[0][0].loss, rel=1e-6)
    assert rounds[2][1].loss != pytest.approx(rounds[2][0].loss, rel=1e-6)
