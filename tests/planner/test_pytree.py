"""Batches taken apart and put together: containers of every kind, and random trees."""

import collections
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from gradaccum.planner.pytree import flatten, holds_tensors

Pair = namedtuple("Pair", ["x", "y"])


class Encoding(UserDict):
    """Like the batches of tokenizers: a mapping whose items are attributes too."""

    def __init__(self, data, note):
        super().__init__(data)
        self.note = note

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Bunch(dict):
    __getattr__ = dict.__getitem__


class Items(list):
    pass


@dataclass
class Plain:
    x: torch.Tensor
    name: str = "n"


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    half: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "half", self.x / 2)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


@dataclass
class Unset:
    x: torch.Tensor
    note: str = field(init=False, repr=False)


X = torch.arange(4)

CONTAINERS = [
    X,
    {"x": X, 3: X},
    OrderedDict(a=X),
    defaultdict(list, a=X),
    Bunch(x=X),
    (X, X),
    [X, [X, (X,)]],
    Items([X]),
    Pair(X, {"z": X}),
    Plain(X),
    Frozen(X),
    Slotted(X),
    Unset(X),
    types.MappingProxyType({"x": X}),
    torch.max(torch.eye(3), 0),
    {"x": np.arange(3), "names": ["a", "b", "c"], "rate": 0.1, "none": None, "t": ("a", 2)},
]


@pytest.mark.parametrize("batch", CONTAINERS, ids=range(len(CONTAINERS)))
def test_the_way_back_gives_the_same_types_and_leaves(batch):
    tree = flatten(batch)
    rebuilt = tree.build(iter(tree.leaves))
    assert type(rebuilt) is type(batch)
    again = flatten(rebuilt)
    assert again.nodes == tree.nodes
    assert again.paths == tree.paths
    assert all(one is two for one, two in zip(tree.leaves, again.leaves, strict=True))
    assert rebuilt is not batch or isinstance(batch, torch.Tensor)


def test_new_leaves_go_where_the_old_ones_were():
    batch = {"x": X, "pair": Pair(X, [X, "s"]), "plain": Plain(X, "m")}
    tree = flatten(batch)
    assert tree.paths == (
        "batch['x']",
        "batch['pair'].x",
        "batch['pair'].y[0]",
        "batch['pair'].y[1]",
        "batch['plain'].x",
        "batch['plain'].name",
    )
    rebuilt = tree.build(iter(range(6)))
    assert rebuilt == {"x": 0, "pair": Pair(1, [2, 3]), "plain": Plain(4, 5)}
    assert batch["x"] is X
    assert batch["plain"].x is X


def test_a_mapping_keeps_its_attributes():
    batch = Encoding({"ids": X}, note="kept")
    rebuilt = flatten(batch).build(iter(["new"]))
    assert type(rebuilt) is Encoding
    assert rebuilt.ids == "new"
    assert rebuilt.note == "kept"
    assert batch.ids is X


def test_a_dataclass_is_not_built_again():
    rebuilt = flatten(Frozen(X)).build(iter(["x", "half"]))
    assert (rebuilt.x, rebuilt.half) == ("x", "half")
    with pytest.raises(AttributeError):
        flatten(Unset(X)).build(iter([X])).note  # noqa: B018 - reading it is the test


@dataclass
class Holder:
    x: object


class Custom:
    def __init__(self, x):
        self.x = x


class OnlySlots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("tensor", [X, np.arange(3)], ids=["tensor", "array"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: [1, (x,)],
        lambda x: {"a": {"b": x}},
        lambda x: collections.deque([x]),
        Holder,
        Custom,
        OnlySlots,
        lambda x: Custom({"inner": [x]}),
    ],
    ids=range(8),
)
def test_tensors_are_found_in_whatever_holds_them(wrap, tensor):
    assert holds_tensors(wrap(tensor))
    assert not holds_tensors(wrap("no tensor"))


def test_what_refers_to_itself_is_no_trap():
    loop: list[object] = []
    loop.append(loop)
    assert not holds_tensors(loop)
    assert not holds_tensors(Custom)
    assert holds_tensors(pack_sequence([X]))


leaves = st.one_of(
    st.integers(1, 3).map(lambda rank: torch.zeros((2,) * rank)),
    st.none(),
    st.text(max_size=3),
    st.floats(allow_nan=False),
    st.lists(st.text(max_size=2), min_size=1, max_size=3),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Holder, inner),
    ),
    max_leaves=12,
)


@given(trees)
def test_random_trees_there_and_back(batch):
    tree = flatten(batch)
    again = flatten(tree.build(iter(tree.leaves)))
    assert again.nodes == tree.nodes
    assert again.paths == tree.paths
    assert all(one is two for one, two in zip(tree.leaves, again.leaves, strict=True))
