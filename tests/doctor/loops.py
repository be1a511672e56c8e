"""What the loops that are tested begin with, and how a pair of them is written.

A pair is a code and a text: a wrong loop, and a right one as close as can be. A line that ends in
`#bad` is the wrong one's only, one in `#good` the right one's; `!` after either, or `#!` on a line
of both, marks the line to be found in the wrong one.
"""

from __future__ import annotations

import re

__all__ = ["DATA", "STEPPED", "TRAINED", "part"]

_IMPORTS = """\
import copy
import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
"""
_DATA = "data = [(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in range({})]\n"
_MODEL = "model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))\n"

DATA = _IMPORTS + _DATA.format(8) + _MODEL
"""Eight batches and a model."""
STEPPED = DATA + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
"""The same, and an optimizer without a state."""
TRAINED = (
    _IMPORTS
    + "K = 4\n"
    + _DATA.format(12)
    + _MODEL
    + "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
)
"""Twelve batches, a window's length, a model and its optimizer."""

_MARK = re.compile(r"\s*#(bad|good)?(!?)$")


def part(text: str, left_out: str) -> tuple[str, int]:
    """One of the two loops, and the line that is marked."""
    lines: list[str] = []
    marked = 0
    for line in text.splitlines():
        found = _MARK.search(line)
        kind, mark = (found[1], found[2]) if found and (found[1] or found[2]) else (None, "")
        if kind == left_out:
            continue
        lines.append(line[: found.start()] if found and (kind or mark) else line)
        marked = len(lines) if mark else marked
    return "\n".join(lines) + "\n", marked
