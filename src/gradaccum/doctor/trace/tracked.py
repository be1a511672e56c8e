"""What is known of each leaf: whose gradients it holds, and how it stood when last seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["KEPT", "Holding", "Tracked", "groups"]

KEPT = 64
"""Backwards that a holding remembers by number; beyond, it counts."""


class Holding:
    """Backwards whose gradients stand in a leaf's `.grad`; leaves that hold the same share it."""

    __slots__ = ("backwards", "held")

    def __init__(self, held: int = 0, backwards: tuple[int, ...] = ()) -> None:
        self.held = held
        self.backwards = backwards

    def plus(self, backward: int) -> Holding:
        """One more."""
        return Holding(self.held + 1, (*self.backwards[-KEPT + 1 :], backward))


NOTHING = Holding()


class Tracked:
    """One leaf: a weak reference, and plain numbers."""

    __slots__ = (
        "arrivals",
        "changes",
        "dtype",
        "elements",
        "grad",
        "grad_version",
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
        "version",
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
        self.version = tensor._version
        self.requires = bool(tensor.requires_grad)
        self.grad = 0  # id of the gradient that stood there when last looked at; 0 for none
        self.grad_version = 0
        self.pointer = 0
        self.holding = NOTHING
        self.arrivals = 0
        self.changes = 0
        self.zeroed = 0
        self.held_max = 0
        self.sample: Any = None


def groups(leaves: Iterable[Tracked]) -> list[dict[str, Any]]:
    """Leaves that hold something, by what they hold."""
    found: dict[int, tuple[Holding, list[int]]] = {}
    for leaf in leaves:
        holding = leaf.holding
        if holding.held:
            group = found.get(id(holding))
            if group is None:
                found[id(holding)] = (holding, [leaf.index])
            else:
                group[1].append(leaf.index)
    return [
        {"params": params, "backwards": list(holding.backwards), "held": holding.held}
        for holding, params in found.values()
    ]
