"""Graphs that are kept for another backward: what of them is older than the last one."""

from __future__ import annotations

from typing import Any

from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["Older"]

NODES = 20_000
LINES = 256


class Older:
    """Asks a loss whose graph is retained which leaves it reaches by nodes from before.

    Before means: before the last backward of the same line. A graph that lives on past an update
    holds the derivatives of weights that are gone.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._now = recorder.torch.autograd._get_sequence_nr
        self._last: dict[int, int] = {}
        """By line, when its last backward began."""

    def leaves(self, outputs: tuple[Any, ...], line: int) -> list[int]:
        """Numbers of leaves that older nodes lead to."""
        since = self._last.get(line, -1)
        if line in self._last or len(self._last) < LINES:
            self._last[line] = self._now()
        if since < 0:
            return []
        found: set[int] = set()
        seen: set[Any] = set()
        todo = [getattr(one, "grad_fn", None) for one in outputs]
        while todo and len(seen) < NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            old = node._sequence_nr() < since
            for child, _ in node.next_functions:
                variable = getattr(child, "variable", None)
                leaf = None if variable is None else self.recorder.leaves.get(variable)
                if leaf is None:
                    todo.append(child)
                elif old:
                    found.add(leaf.index)
        return sorted(found)
