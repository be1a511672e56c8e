"""What is known of each leaf, whose gradients it holds and how it stood, and of each optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

__all__ = [
    "KEPT",
    "NOTHING",
    "Holding",
    "Optimizer",
    "Tracked",
    "arrive",
    "counts",
    "drop",
    "groups",
    "told",
]

KEPT = 64
"""Backwards that a holding remembers by number; beyond, it counts."""


class Holding:
    """Backwards whose gradients stand in a leaf's `.grad`; leaves that hold the same share it."""

    __slots__ = ("backwards", "before", "held")

    def __init__(self, held: int = 0, backwards: tuple[int, ...] = (), before: int = 0) -> None:
        self.held = held
        self.backwards = backwards
        self.before = before  # how many of them nobody saw arrive

    def plus(self, backward: int) -> Holding:
        """One more."""
        return Holding(self.held + 1, (*self.backwards[-KEPT + 1 :], backward), self.before)


NOTHING = Holding()


class Tracked:
    """One leaf: a weak reference, and plain numbers."""

    __slots__ = (
        "arrivals",
        "changes",
        "dtype",
        "elements",
        "grad",
        "held_max",
        "holding",
        "index",
        "is_parameter",
        "name",
        "owners",
        "pointer",
        "reference",
        "requires",
        "sample",
        "shape",
        "thread",
        "zeroed",
    )

    def __init__(self, index: int, tensor: Any, reference: Any, is_parameter: bool) -> None:
        self.index = index
        self.reference = reference
        self.is_parameter = is_parameter
        self.shape = tuple(int(n) for n in tensor.shape)
        self.elements = int(tensor.numel())
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.name = ""
        self.owners: tuple[int, ...] = ()
        self.requires = bool(tensor.requires_grad)
        self.grad = 0  # id of the gradient that stood there when last looked at; 0 for none
        self.pointer = 0
        self.holding = NOTHING
        self.arrivals = 0  # those that are no longer held
        self.changes = 0
        self.zeroed = 0
        self.held_max = 0  # before what is held now
        self.sample: Any = None
        self.thread: int | None = None  # in which its backwards run; 0 for several

    def counts(self) -> tuple[int, int]:
        """How many gradients have arrived so far, and the most that were held at a time."""
        holding = self.holding
        came = holding.held - holding.before
        return self.arrivals + came, max(self.held_max, holding.held) if came else self.held_max


class Optimizer:
    """One optimizer, held weakly."""

    __slots__ = ("at", "ids", "index", "kind", "leaves", "lr", "reference", "steps", "user")

    def __init__(self, index: int, optimizer: Any, at: int, user: int) -> None:
        self.index = index
        self.reference = weakref.ref(optimizer)
        self.kind = type(optimizer).__name__
        self.at, self.user = at, user
        self.steps = 0
        self.lr: float | None = None
        self.ids: list[int] = []
        self.leaves: list[Tracked] = []


def arrive(backward: dict[str, Any], leaves: Iterable[Tracked]) -> None:
    """Gradients that a running backward has brought."""
    number = backward["b"]
    arrived, fresh = backward["arrived"], backward["fresh"]
    old = new = NOTHING
    after: dict[Holding, Holding] = {}
    for leaf in leaves:
        if leaf.index in arrived:
            continue
        arrived[leaf.index] = None
        if leaf.holding is not old or not after:  # most share one
            old = leaf.holding
            new = after.get(old) or after.setdefault(old, old.plus(number))
        if not old.held:
            fresh.append(leaf.index)
        leaf.holding = new


def drop(leaves: Iterable[Tracked]) -> None:
    """They hold nothing any more; what they held is counted now, not at each arrival."""
    for leaf in leaves:
        holding = leaf.holding
        if holding is not NOTHING:
            came = holding.held - holding.before
            leaf.arrivals += came
            if came and holding.held > leaf.held_max:
                leaf.held_max = holding.held
            leaf.holding = NOTHING


def groups(leaves: Iterable[Tracked]) -> list[dict[str, Any]]:
    """Leaves that hold something, by what they hold."""
    leaves = list(leaves)
    holdings = [leaf.holding for leaf in leaves]
    parts: dict[Holding, list[int]]
    if holdings and holdings.count(holdings[0]) == len(holdings):  # as nearly always
        parts = {holdings[0]: [leaf.index for leaf in leaves]}
    else:
        parts = {holding: [] for holding in holdings}
        for leaf, holding in zip(leaves, holdings, strict=True):
            parts[holding].append(leaf.index)
    return [
        {"params": params, "backwards": list(holding.backwards), "held": holding.held}
        for holding, params in parts.items()
        if holding.held
    ]


def told(leaf: Tracked) -> dict[str, Any]:
    """What is written of a leaf when it is found."""
    return {
        "i": leaf.index, "name": leaf.name, "shape": leaf.shape, "dtype": leaf.dtype,
        "elements": leaf.elements, "parameter": leaf.is_parameter, "owners": leaf.owners,
    }  # fmt: skip


def counts(leaf: Tracked) -> list[Any]:
    """What is written of it in the summary."""
    alive = leaf.reference()
    needs = None if alive is None else bool(alive.requires_grad)
    held = leaf.holding
    arrivals, most = leaf.counts()
    return [
        arrivals, leaf.zeroed, leaf.changes, most, needs, held.held, list(held.backwards),
    ]  # fmt: skip
