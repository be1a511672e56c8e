"""One batch as samples: every kind of batch, views, nothing changed, and each refusal."""

import re
import threading
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from gradaccum.errors import BatchError
from gradaccum.planner.pack import plan
from gradaccum.planner.split import even, gather, move

Pair = namedtuple("Pair", ["ids", "labels"])


@dataclass(frozen=True)
class Record:
    ids: torch.Tensor
    labels: torch.Tensor


class Encoding(UserDict):
    pass


def ragged(lengths, *, width=None, side="right", fill=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    rows = torch.full((len(lengths), width), fill)
    for row, length in zip(rows, lengths, strict=True):
        words = torch.randint(1, 100, (length,), generator=generator)
        row[slice(0, length) if side == "right" else slice(width - length, width)] = words
    return rows


LENGTHS = [5, 2, 9, 1, 7, 3, 9, 4]
IDS = ragged(LENGTHS)
LABELS = ragged(LENGTHS, fill=-100, seed=1)

BATCHES = {
    "tensor": IDS,
    "dict": {"ids": IDS, "labels": LABELS},
    "mapping": Encoding(ids=IDS, labels=LABELS),
    "tuple": (IDS, LABELS),
    "list": [IDS, LABELS],
    "named tuple": Pair(IDS, LABELS),
    "dataclass": Record(IDS, LABELS),
    "nested": {"in": {"ids": IDS}, "out": (LABELS, [IDS + 1 - 1])},
}


def tensors_of(batch):
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict | UserDict):
        return [x for value in batch.values() for x in tensors_of(value)]
    if isinstance(batch, Record):
        return [batch.ids, batch.labels]
    return [x for value in batch for x in tensors_of(value)]


@pytest.mark.parametrize("kind", BATCHES)
def test_all_microbatches_together_are_the_batch(kind):
    batch = BATCHES[kind]
    before = [tensor.clone() for tensor in tensors_of(batch)]
    samples = gather([batch], lengths=LENGTHS)
    assert len(samples) == 8
    assert samples.lengths == tuple(LENGTHS)
    seen = []
    for planned in plan(LENGTHS, budget=20, overhead=1):
        micro = samples.microbatch(planned.indices, planned.width)
        assert type(micro) is type(batch)
        seen += planned.indices
        for whole, part in zip(before, tensors_of(micro), strict=True):
            assert part.is_contiguous()
            assert part.shape == (len(planned.indices), planned.width)
            assert torch.equal(part, whole[list(planned.indices), : planned.width])
    assert sorted(seen) == list(range(8))
    for whole, after in zip(before, tensors_of(batch), strict=True):
        assert torch.equal(whole, after)


def test_padding_on_the_left():
    ids = ragged(LENGTHS, side="left", width=12)
    samples = gather([{"ids": ids}], lengths=LENGTHS, trim="left")
    micro = samples.microbatch([3, 1, 5], 3)
    assert torch.equal(micro["ids"], ids[[3, 1, 5], -3:])


def test_without_lengths_or_width_nothing_is_cut():
    for samples in (gather([IDS]), gather([IDS], lengths=LENGTHS, trim=None)):
        assert torch.equal(samples.microbatch([3, 1], 2), IDS[[3, 1]])
    assert torch.equal(gather([IDS], lengths=LENGTHS).microbatch([3, 1], None), IDS[[3, 1]])
    assert gather([IDS]).lengths is None


def test_neighbours_are_views_and_others_are_not():
    samples = gather([IDS])
    assert samples.microbatch(range(2, 5), None).data_ptr() == IDS[2].data_ptr()
    assert samples.microbatch([2, 3, 4], None)._base is IDS
    assert samples.microbatch([2, 4], None)._base is None
    assert torch.equal(samples.microbatch([4, 2, 2], None), IDS[[4, 2, 2]])


def test_neighbours_that_are_cut_can_still_be_viewed_flat():
    lengths = [9, 2, 3, 1]
    samples = gather([ragged(lengths)], lengths=lengths)
    assert samples.microbatch([1, 2, 3], 3).view(-1).shape == (9,)


def test_what_belongs_to_samples_and_what_is_shared():
    note = object()
    batch = {
        "ids": IDS,
        "rate": torch.tensor(0.5),
        "names": list("abcdefgh"),
        "marks": tuple(range(8)),
        "meta": [{"id": i} for i in range(8)],
        "three": ["x", "y", "z"],
        "text": "abcdefgh",
        "note": note,
        "none": None,
        "array": np.arange(16).reshape(8, 2),
        "objects": np.array([{"i": i} for i in range(8)], dtype=object),
    }
    micro = gather([batch]).microbatch([6, 1], None)
    assert micro["rate"] is batch["rate"]
    assert micro["names"] == ["g", "b"]
    assert micro["marks"] == (6, 1)
    assert micro["meta"] == [{"id": 6}, {"id": 1}]
    assert micro["three"] is batch["three"]
    assert micro["text"] is batch["text"]
    assert micro["note"] is note
    assert micro["none"] is None
    assert micro["array"].tolist() == [[12, 13], [2, 3]]
    assert micro["objects"].tolist() == [{"i": 6}, {"i": 1}]


def test_arrays_are_cut_like_tensors():
    batch = {"ids": IDS.numpy(), "x": IDS.double().numpy()}
    micro = gather([batch], lengths=np.array(LENGTHS)).microbatch([1, 3], 2)
    assert micro["ids"].tolist() == IDS[[1, 3], :2].tolist()
    assert micro["x"].shape == (2, 2)


def test_gradients_flow_into_the_batch():
    x = torch.randn(8, 3, requires_grad=True)
    samples = gather([x])
    for indices in ([0, 5, 2], range(3, 5), [1, 6, 7]):
        samples.microbatch(indices, None).square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_the_loss_of_a_cut_batch_is_that_of_the_whole():
    weights = torch.arange(100)
    samples = gather([Record(IDS, LABELS)], lengths=LENGTHS)
    total = 0
    for planned in plan(LENGTHS, budget=30, overhead=0):
        micro = samples.microbatch(planned.indices, planned.width)
        total += (weights[micro.ids] * micro.labels)[micro.labels != -100].sum()
    assert total == (weights[IDS] * LABELS)[LABELS != -100].sum()


@given(st.data())
def test_random_splits_bring_every_row_once(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    side = data.draw(st.sampled_from(["right", "left"]))
    width = max(lengths) + data.draw(st.integers(0, 3))
    ids = ragged(lengths, width=width, side=side)
    batch = {"ids": ids, "row": torch.arange(len(lengths)), "deep": [(ids.float(), "shared")]}
    samples = gather([batch], lengths=lengths, trim=side)
    rows = []
    for planned in plan(lengths, budget=2 * max(lengths), overhead=3):
        micro = samples.microbatch(planned.indices, planned.width)
        rows += micro["row"].tolist()
        for index, row, real in zip(micro["row"], micro["ids"], micro["deep"][0][0], strict=True):
            assert row[row > 0].tolist() == ids[index][ids[index] > 0].tolist()
            assert real.tolist() == row.tolist()
        # Where the data cannot show the side of its padding, the width may stay.
        assert micro["ids"].shape[1] in (planned.width, width)
    assert sorted(rows) == list(range(len(lengths)))


def test_a_list_of_samples_with_collate():
    words = [torch.arange(length) for length in LENGTHS]

    def collate(samples):
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)

    samples = gather([words[:5], tuple(words[5:])], lengths=len, collate=collate)
    assert samples.lengths == tuple(LENGTHS)
    assert len(samples) == 8
    assert samples.microbatch([3, 7, 1], 4).tolist() == [
        [0, -1, -1, -1],
        [0, 1, 2, 3],
        [0, 1, -1, -1],
    ]
    assert gather([words], lengths=LENGTHS, collate=collate).lengths == tuple(LENGTHS)
    assert gather([words], collate=collate).lengths is None


def test_lengths_from_the_batch_or_of_any_kind():
    batch = {"ids": IDS, "mask": (IDS > 0).long()}
    for lengths in (
        lambda b: b["mask"].sum(1),
        lambda b: b["mask"].sum(1).tolist(),
        torch.tensor(LENGTHS),
        np.array(LENGTHS),
        iter(LENGTHS),
    ):
        assert gather([batch], lengths=lengths).lengths == tuple(LENGTHS)


def test_the_users_own_trim():
    def trim(micro, width):
        return {**micro, "pairs": micro["pairs"][:, :width, :width]}

    batch = {"ids": IDS, "pairs": torch.randn(8, 9, 9)}
    samples = gather([batch], lengths=LENGTHS, trim=trim)
    micro = samples.microbatch([3, 1], 2)
    assert micro["pairs"].shape == (2, 2, 2)
    assert micro["ids"].shape == (2, 9)
    assert samples.microbatch([3, 1], None)["pairs"].shape == (2, 9, 9)


class Custom:
    def __init__(self, x):
        self.x = x


SIX, SEVEN = torch.zeros(6, 2), torch.zeros(7)

REFUSED = [
    ("batch-sizes", {"a": SIX, "b": {"c": SEVEN}}, "batch['a']: 6, batch['b']['c']: 7"),
    ("batch-sizes", (SIX, np.zeros((1, 2))), "batch[0]: 6, batch[1]: 1"),
    ("batch-sizes", [torch.zeros(3), torch.zeros(5)], "pass a list of samples and collate="),
    ("batch-empty", {}, "a dict without a tensor that has a dimension"),
    ("batch-empty", {"a": "text", "n": torch.tensor(3.0)}, "a dict without a tensor"),
    ("batch-empty", ["one", "two"], "a list without a tensor"),
    ("batch-empty", None, "a NoneType without a tensor"),
    ("batch-empty", (x for x in [SIX]), "a generator without a tensor"),
    ("batch-empty", {"x": torch.zeros(0, 5)}, "batch['x']: 0 samples"),
    ("batch-type", {"x": Custom(SIX)}, "test_split.Custom"),
    ("batch-type", {"x": {1, 2}, "y": Custom([SIX])}, "batch['y'] holds tensors"),
    ("batch-type", pack_sequence([torch.zeros(3)]), "torch.nn.utils.rnn.PackedSequence"),
    (
        "batch-samples",
        [{"ids": torch.zeros(4)}, {"ids": torch.zeros(4)}],
        "a list of 2 dict objects",
    ),
]


@pytest.mark.parametrize(("slug", "batch", "text"), REFUSED, ids=range(len(REFUSED)))
def test_batches_that_cannot_be_split(slug, batch, text):
    with pytest.raises(BatchError, match=re.escape(text)) as caught:
        gather([batch])
    assert caught.value.slug == slug
    assert caught.value.do


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(3).to_sparse(), "a sparse_coo tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "a sparse_csr tensor"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "a nested tensor"),
        (
            lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
            "a nested tensor",
        ),
    ],
    ids=["coo", "csr", "nested", "jagged"],
)
# torch warns once that these are young.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_tensors_that_cannot_be_split(make, text):
    with pytest.raises(BatchError, match=re.escape(text)) as caught:
        gather([{"x": make()}])
    assert caught.value.slug == "batch-layout"


def test_no_batches_at_all():
    with pytest.raises(BatchError, match=re.escape("no batches")):
        gather([])


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([1, 2], "2 lengths for 8 samples"),
        (lambda batch: [5], "1 lengths for 8 samples"),
        ([0, *LENGTHS[1:]], "lengths[0] = 0 (int)"),
        (lambda batch: (batch > 0).float().sum(1), "lengths[0] = 5.0 (float)"),
        (None.__class__, "NoneType"),
        ([99, *LENGTHS[1:]], "length 99, and batch (8, 9)"),
    ],
    ids=range(6),
)
def test_lengths_that_do_not_belong_to_the_batch(lengths, text):
    if lengths is type(None):
        lengths = lambda batch: None  # noqa: E731
    with pytest.raises(BatchError, match=re.escape(text)) as caught:
        gather([IDS], lengths=lengths)
    assert caught.value.slug == "batch-lengths"


@pytest.mark.parametrize("batch", [{"x": SIX}, SIX, "words", 5, None])
def test_collate_needs_samples(batch):
    with pytest.raises(BatchError, match=re.escape(f"a {type(batch).__name__}")) as caught:
        gather([batch], collate=torch.stack)
    assert caught.value.slug == "batch-samples"


def test_collate_with_no_samples_or_wrong_lengths():
    with pytest.raises(BatchError, match=re.escape("an empty list")):
        gather([[], []], collate=torch.stack)
    with pytest.raises(BatchError, match=re.escape("3 lengths for 2 samples")):
        gather([["a", "b"]], lengths=[1, 2, 3], collate=list)


def test_a_side_that_there_is_not():
    with pytest.raises(BatchError, match=re.escape("trim='both'")):
        gather([IDS], lengths=LENGTHS, trim="both")


def test_move_changes_the_device_of_tensors_alone():
    packed = pack_sequence([torch.zeros(3)])
    lock = threading.Lock()
    batch = {"x": SIX, "n": 3, "packed": packed, "lock": lock, "list": [SEVEN, "a"]}
    moved = move(batch, "meta")
    assert moved["x"].device.type == moved["list"][0].device.type == "meta"
    assert moved["packed"].data.device.type == "meta"
    assert moved["n"] == 3
    assert moved["lock"] is lock
    assert batch["x"] is SIX
    here = move(batch, torch.device("cpu"))
    assert here["x"] is SIX
    assert here["packed"] is packed


@given(st.integers(1, 200), st.integers(1, 250))
def test_even_groups(n, k):
    groups = even(n, k)
    assert [i for group in groups for i in group] == list(range(n))
    sizes = [len(group) for group in groups]
    assert len(sizes) == min(n, k)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
