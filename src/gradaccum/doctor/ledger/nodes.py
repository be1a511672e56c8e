"""What kinds of nodes a loss is made of, and how to look at one without waking user code."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import torch

__all__ = [
    "LOSSES",
    "PICKS",
    "RESHAPES",
    "const",
    "graphs",
    "numel",
    "opaque",
    "outputs_alike",
    "short",
    "shown",
    "stacked",
]

LOSSES = {
    "NllLoss",
    "NllLoss2D",
    "MseLoss",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "SmoothL1Loss",
    "HuberLoss",
    "SoftMarginLoss",
    "MultiMarginLoss",
    "MultilabelMarginLoss",
    "KlDiv",
}
"""Loss functions that reduce inside one node, and say so in `_saved_reduction`."""

RESHAPES = {
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Alias",
    "T",
    "Transpose",
    "Permute",
    "Stack",
    "Cat",
    "NanToNum",
}
"""Operations that move values and do not change them."""

PICKS = {"Select", "Slice", "Unbind", "Split", "Index", "IndexSelect", "MaskedSelect"}
"""Operations that take some of the values."""

_TAIL = re.compile(r"Backward\d*$")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def short(node: Any) -> str:
    """A node's operation: `MulBackward0` is `Mul`; of Python's own functions, the whole name."""
    name = node.name()
    return f"python::{name}" if opaque(node) else _cut(name)


@lru_cache(maxsize=1024)
def _cut(name: str) -> str:
    return _TAIL.sub("", name)


def opaque(node: Any) -> bool:
    """Whether the node is a Python function or a compiled graph: its inside cannot be seen."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def shown(node: Any) -> str:
    """The operation as torch's functions spell it: `nll_loss`."""
    name = short(node).rpartition("::")[2]
    return "value" if name == "AccumulateGrad" else _WORDS.sub("_", name).lower()


def graphs(node: Any) -> list[int]:
    """Positions of the inputs that have a graph."""
    return [at for at, (below, _) in enumerate(node.next_functions) if below is not None]


def const(node: Any) -> torch.Tensor | float | None:
    """What a product or quotient has its one graph multiplied or divided by; `None` if unknown."""
    at = graphs(node)
    name = "_saved_self" if short(node) == "Mul" and at == [1] else "_saved_other"
    try:
        return getattr(node, name, None)
    except RuntimeError:  # it was changed in place since, or is freed
        return None


def numel(node: Any) -> int:
    """Elements of a reduction's input."""
    saved = getattr(node, "_saved_self_sym_numel", None)
    if saved is not None:
        return int(saved)
    count = 1
    for size in getattr(node, "_saved_self_sym_sizes", ()):
        count *= int(size)
    return count


def outputs_alike(node: Any, gradient: torch.Tensor) -> bool:
    """Whether a gradient has the shape that the node's first output had."""
    metadata = getattr(node, "_input_metadata", None)
    if not metadata:
        return True
    return tuple(metadata[0].shape) == tuple(gradient.shape)


def stacked(node: Any) -> bool:
    """Whether a tensor was put together from others, seen through what only moves its values."""
    for _ in range(8):
        if short(node) in ("Stack", "Cat"):
            return True
        inputs = graphs(node)
        if short(node) not in RESHAPES | PICKS or len(inputs) != 1:
            return False
        node = node.next_functions[inputs[0]][0]
    return False
