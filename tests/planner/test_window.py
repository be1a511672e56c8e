"""Several batches as one window: their samples regrouped, their widths brought together."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.errors import BatchError
from gradaccum.planner.pack import plan
from gradaccum.planner.split import gather


def batch_of(samples, *, side="right", fill=0, position=False):
    width = max(len(sample) for sample in samples)

    def padded(sample, with_):
        extra = [with_] * (width - len(sample))
        return sample + extra if side == "right" else extra + sample

    batch = {
        "ids": torch.tensor([padded(sample, fill) for sample in samples]),
        "labels": torch.tensor([padded([-word for word in sample], -100) for sample in samples]),
        "mask": torch.tensor([padded([1] * len(sample), 0) for sample in samples]),
        "names": [f"n{sample[0]}" for sample in samples],
        "scale": 0.5,
        "array": np.array([padded(sample, fill) for sample in samples]),
    }
    if position:
        batch["position"] = torch.arange(width).expand(len(samples), -1)
    return batch


def lengths_of(batch):
    return batch["mask"].sum(1)


words = st.lists(st.integers(1, 50), min_size=1, max_size=9)


@given(
    st.lists(st.lists(words, min_size=2, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["right", "left"]),
)
def test_a_window_gives_each_sample_back(groups, side):
    # A full and a short sample in each batch, so that its padding shows.
    groups = [[[60] * 10, [61], *group] for group in groups]
    batches = [batch_of(group, side=side) for group in groups]
    flat = [sample for group in groups for sample in group]
    samples = gather(batches, lengths=lengths_of, trim=side)
    assert samples.lengths == tuple(len(sample) for sample in flat)
    seen = []
    for planned in plan(samples.lengths, budget=25, overhead=2):
        micro = samples.microbatch(planned.indices, planned.width)
        seen += planned.indices
        expected = batch_of([flat[i] for i in planned.indices], side=side)
        for name in ("ids", "labels", "mask"):
            assert torch.equal(micro[name], expected[name])
        assert micro["array"].tolist() == expected["array"].tolist()
        assert micro["names"] == expected["names"]
        assert micro["scale"] == 0.5
    assert sorted(seen) == list(range(len(flat)))


@pytest.mark.parametrize("side", ["right", "left"])
def test_narrow_batches_are_padded_with_what_the_window_shows(side):
    one = batch_of([[1, 2, 3, 4, 5], [6]], side=side, fill=9, position=side == "right")
    two = batch_of([[7, 8, 2]], side=side, fill=9, position=side == "right")
    samples = gather([one, two], lengths=lengths_of, trim=side)
    micro = samples.microbatch([2, 0], 5)
    assert micro["ids"].tolist() == (
        [[7, 8, 2, 9, 9], [1, 2, 3, 4, 5]]
        if side == "right"
        else [[9, 9, 7, 8, 2], [1, 2, 3, 4, 5]]
    )
    assert micro["mask"].sum(1).tolist() == [3, 5]
    assert micro["labels"].min() == -100
    if side == "right":
        assert micro["position"].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_nothing_is_changed_and_gradients_flow():
    one = torch.randn(2, 4, 3, requires_grad=True)
    two = torch.randn(1, 2, 3, requires_grad=True)
    padded = one * torch.tensor([[1.0] * 4, [1.0, 0, 0, 0]])[..., None]
    kept = padded.detach().clone()
    samples = gather([padded, two], lengths=[4, 1, 2])
    samples.microbatch([2, 1], 2).sum().backward()
    assert torch.equal(padded, kept)
    assert torch.equal(two.grad, torch.ones_like(two))
    assert one.grad.sum() == 3
    assert two.shape == (1, 2, 3)


def test_batches_of_one_width_need_no_padding():
    samples = gather([torch.ones(2, 3), torch.zeros(1, 3)])
    assert samples.microbatch([2, 0], None).tolist() == [[0.0] * 3, [1.0] * 3]
    assert samples.lengths is None


def test_padding_that_the_window_does_not_show():
    batches = [batch_of([[1, 2, 3]]), batch_of([[4, 5]])]
    with pytest.raises(BatchError, match=re.escape("widths 3, 2")) as caught:
        gather(batches, lengths=lengths_of)
    assert caught.value.slug == "batch-pad-unknown"
    assert "batch['ids'] is of several widths" in str(caught.value)
    assert "collate=" in caught.value.do
    for arguments in ({}, {"lengths": lengths_of, "trim": None}):
        with pytest.raises(BatchError, match=re.escape("widths 3, 2")):
            gather(batches, **arguments)


def test_padding_with_two_values_is_no_padding():
    batches = [batch_of([[1, 2, 3], [4]]), batch_of([[1, 2, 3], [4]], fill=7)]
    with pytest.raises(BatchError, match=re.escape("batch['ids'], batch['array']")) as caught:
        gather(batches, lengths=lengths_of)
    assert caught.value.slug == "batch-not-padding"


def test_positions_that_do_not_continue_are_refused():
    batches = [batch_of([[1, 2, 3, 4], [5, 6]], position=True), batch_of([[1, 2, 3], [5]])]
    batches[1]["position"] = torch.arange(10, 13).expand(2, -1)
    with pytest.raises(BatchError, match=re.escape("batch['position'] is of several widths")):
        gather(batches, lengths=lengths_of)


def changed(**changes):
    return {**batch_of([[1, 2, 3], [4]]), **changes}


UNLIKE = [
    (
        "batch-unlike",
        changed(more=torch.zeros(2)),
        "dict of ids, labels, mask, names, scale, array, more",
    ),
    (
        "batch-unlike",
        changed(ids=torch.zeros(2, 3)),
        "torch.int64 of 2 dimensions on cpu, and torch.float32",
    ),
    ("batch-unlike", changed(ids=torch.zeros(2, 3, dtype=torch.long, device="meta")), "on meta"),
    ("batch-unlike", changed(array=np.zeros((2, 3), dtype=np.float32)), "array of float32"),
    ("batch-unlike", changed(names=None), "list, and NoneType"),
    ("batch-unlike", changed(scale=(torch.zeros(2),)), "scale"),
    (
        "batch-unlike",
        tuple(changed().values()),
        "dict of ids, labels, mask, names, scale, array, and tuple",
    ),
    ("batch-shared", changed(scale=0.25), "0.5, and 0.25"),
    ("batch-shared", changed(names=["a"]), "['n1', 'n4'], and ['a']"),
]


@pytest.mark.parametrize(("slug", "second", "text"), UNLIKE, ids=range(len(UNLIKE)))
def test_batches_that_differ(slug, second, text):
    with pytest.raises(BatchError, match=re.escape(text)) as caught:
        gather([changed(), second])
    assert caught.value.slug == slug
    assert caught.value.do


def test_rows_of_other_shapes_are_refused():
    with pytest.raises(
        BatchError, match=re.escape("rows of shape (3, 4) and rows of shape (3, 5)")
    ):
        gather([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)])


def test_shared_tensors_are_compared_by_value():
    one, two, three = (
        {"x": torch.zeros(2, 3), "rate": torch.tensor(rate), "names": ["a", "b", "c"]}
        for rate in (0.5, 0.5, 0.25)
    )
    assert gather([one, two]).microbatch([3], None)["rate"] == 0.5
    with pytest.raises(BatchError, match=re.escape("tensor(0.5000), and tensor(0.2500)")):
        gather([one, three])
