"""What may be cut: padding that can be told from samples, and nothing else, ever."""

import re

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradaccum.errors import BatchError
from gradaccum.planner.padding import read_flags
from gradaccum.planner.split import gather

LENGTHS = [4, 9, 2, 7]
WIDTH = 9


def rows(lengths, width=WIDTH, side="right", fill=0, seed=0, trailing=()):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 99, (len(lengths), width, *trailing), generator=generator)
    column = torch.arange(width)
    for row, length in zip(values, lengths, strict=True):
        row[column >= length if side == "right" else column < width - length] = fill
    return values


def other(side):
    return "left" if side == "right" else "right"


def cut_to(samples, width, indices=(0, 2)):
    return samples.microbatch(list(indices), width)


@pytest.mark.parametrize("side", ["right", "left"])
def test_each_kind_of_padded_tensor_is_cut(side):
    ids = rows(LENGTHS, side=side)
    batch = {
        "ids": ids,
        "mask": ids > 0,
        "labels": rows(LENGTHS, side=side, fill=-100),
        "features": rows(LENGTHS, side=side, fill=7, trailing=(3,)).float(),
        "nan": rows(LENGTHS, side=side).double().masked_fill(ids == 0, torch.nan),
        "complex": rows(LENGTHS, side=side).to(torch.complex64),
        "positions": torch.arange(WIDTH).expand(4, -1),
        "table": torch.randn(WIDTH, 2).expand(4, -1, -1),
        "array": ids.numpy(),
        "class": torch.tensor([1, 0, 1, 1]),
        "image": torch.randn(4, 3, 5, 5),
        "weights": torch.ones(4, WIDTH),
    }
    micro = cut_to(gather([batch], lengths=LENGTHS, trim=side), 4)
    uncut = {"class", "image"}
    for name, value in batch.items():
        expected = value[[0, 2]]
        if name not in uncut:
            expected = expected[:, :4] if side == "right" else expected[:, -4:]
        assert np.array_equal(micro[name], expected, equal_nan=name == "nan"), name


@pytest.mark.parametrize("side", ["right", "left"])
def test_cutting_on_the_wrong_side_is_refused(side):
    batch = {"ids": rows(LENGTHS, side=side), "labels": rows(LENGTHS, side=side, fill=-100)}
    with pytest.raises(BatchError, match=re.escape("batch['ids'], batch['labels']")) as caught:
        gather([batch], lengths=LENGTHS, trim=other(side))
    assert caught.value.slug == "batch-not-padding"
    assert f"trim={side!r} if the batch is padded on the {side}" in str(caught.value)


def test_lengths_that_are_too_short_are_refused():
    with pytest.raises(BatchError, match=re.escape("mend `lengths`")):
        gather([rows(LENGTHS)], lengths=[4, 8, 2, 7])


def test_a_tensor_that_only_happens_to_be_as_wide_is_refused():
    batch = {"ids": rows(LENGTHS), "features": torch.randn(4, WIDTH)}
    with pytest.raises(BatchError, match=re.escape("lengths in batch['features']")):
        gather([batch], lengths=LENGTHS)


@pytest.mark.parametrize("trim", ["right", "left"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_one_column_that_could_be_padding_on_either_side_stays(side, trim):
    # All start with 1 and end with 2, and are a word shorter than the batch is wide. What stands
    # on the wrong side is a constant too, and cutting it would take a word without an error.
    words = torch.randint(10, 99, (3, 6), generator=torch.Generator().manual_seed(0))
    words[:, 0], words[:, -1] = 1, 2
    padding = torch.zeros(3, 1, dtype=torch.long)
    ids = torch.cat([words, padding] if side == "right" else [padding, words], 1)
    samples = gather([{"ids": ids}], lengths=[6, 6, 6], trim=trim)
    assert torch.equal(samples.microbatch([0, 2], 6)["ids"], ids[[0, 2]])


def test_an_attention_mask_settles_it():
    ids = torch.tensor([[1, 5, 2, 0], [1, 6, 2, 0]])
    batch = {"ids": ids, "mask": (ids > 0).long(), "array": (ids > 0).numpy()}
    micro = gather([batch], lengths=[3, 3]).microbatch([0, 1], 3)
    assert torch.equal(micro["ids"], ids[:, :3])
    left = {name: values[:, [3, 0, 1, 2]] for name, values in batch.items()}
    assert gather([left], lengths=[3, 3]).microbatch([0, 1], 3)["ids"].shape == (2, 4)
    micro = gather([left], lengths=[3, 3], trim="left").microbatch([0, 1], 3)
    assert torch.equal(micro["ids"], ids[:, :3])


def test_a_single_sample_on_the_wrong_side_is_not_cut():
    ids = rows([4], side="left")
    with pytest.raises(BatchError, match=re.escape("is not padding")):
        gather([ids], lengths=[4])
    assert torch.equal(gather([ids], lengths=[4], trim="left").microbatch([0], 4), ids[:, -4:])


def test_equal_rows_are_no_evidence_where_lengths_are_equal():
    ids, target = rows([4, 4]), rows([WIDTH], seed=5).expand(2, -1)
    with pytest.raises(BatchError, match=re.escape("batch[1]")):
        gather([(ids, target)], lengths=[4, 4])
    positions = torch.arange(3, 3 + WIDTH).expand(2, -1)
    cut = gather([(ids, positions)], lengths=[4, 4]).microbatch([0, 1], 4)
    assert cut[1].tolist() == [[3, 4, 5, 6]] * 2


def test_nothing_is_cut_where_all_samples_are_as_wide_as_the_batch():
    features = torch.randn(2, 12)
    samples = gather([(rows([9, 9]), features)], lengths=[9, 9])
    assert samples.microbatch([0, 1], 9)[1] is not None
    assert torch.equal(samples.microbatch([1, 0], 9)[1], features[[1, 0]])


def test_of_several_widths_the_padded_one_is_found():
    ids, features = rows(LENGTHS, width=10), torch.randn(4, 64)
    micro = cut_to(gather([{"ids": ids, "features": features}], lengths=LENGTHS), 4)
    assert torch.equal(micro["ids"], ids[[0, 2], :4])
    assert torch.equal(micro["features"], features[[0, 2]])


def test_two_padded_widths_are_refused():
    batch = {"ids": rows(LENGTHS), "long": rows(LENGTHS, width=12, seed=3)}
    with pytest.raises(BatchError) as caught:
        gather([batch], lengths=LENGTHS)
    assert caught.value.slug == "batch-widths"
    assert "width 9: batch['ids']; width 12: batch['long']" in str(caught.value)
    samples = gather([batch], lengths=LENGTHS, trim=lambda micro, width: micro)
    assert cut_to(samples, 4)["long"].shape == (2, 12)


def test_lengths_of_a_batch_without_columns():
    with pytest.raises(BatchError, match=re.escape("no tensor of two dimensions")):
        gather([torch.zeros(3)], lengths=[1, 2, 3])
    assert len(gather([torch.zeros(3)], lengths=[1, 2, 3], trim=None)) == 3


def test_large_batches_are_looked_at_to_the_end():
    lengths = [500] * 199 + [1000]
    ids = rows(lengths, width=1000)
    assert cut_to(gather([ids], lengths=lengths), 500).shape == (2, 500)
    for row, column in ((0, 500), (100, 999), (198, 750)):
        broken = ids.clone()
        broken[row, column] = 5
        with pytest.raises(BatchError, match=re.escape("is not padding")):
            gather([broken], lengths=lengths)


class Reads(TorchDispatchMode):
    """Names of the operations that hand a number to the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_one_at_a_time():
    batch = {
        "ids": rows(LENGTHS),
        "positions": torch.arange(WIDTH).expand(4, -1),
        "mask": rows(LENGTHS) > 0,
    }
    with Reads() as reads:
        cut_to(gather([batch], lengths=lambda b: b["mask"].sum(1)), 4)
    assert reads.found == []
    with Reads() as reads:
        torch.zeros(()).item()
    assert reads.found, "the counter must be able to find one"


def test_flags_are_read_in_their_order():
    flags = [torch.tensor(True), False, np.bool_(True), torch.tensor(False), True]
    assert read_flags(flags) == [True, False, True, False, True]
    assert read_flags([]) == []
