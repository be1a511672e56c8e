"""What a loss is the sum of, as far as its graph says: summands that have none."""

from __future__ import annotations

from typing import Any

__all__ = ["constants"]

NODES = 200
_SUMS = ("AddBackward0", "SubBackward0", "RsubBackward1", "RsubBackward0", "AddcmulBackward0")
_SCALES = ("MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0")


def constants(node: Any) -> int:
    """How many summands of a loss have no graph: numbers, and what was cut off.

    Args:
        node: the loss's own; sums and factors above it are followed.
    """
    todo, found, seen = [node], 0, 0
    while todo and seen < NODES:
        node = todo.pop()
        seen += 1
        kind = type(node).__name__
        children = [child for child, _ in node.next_functions] if node is not None else []
        live = [child for child in children if child is not None]
        if kind in _SUMS:
            found += len(children) - len(live)
            todo += live
        elif kind in _SCALES and len(live) == 1:
            todo += live
    return found
