"""One fault at one place, and the lines it is judged by."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Evidence", "Finding"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line that a finding is judged by."""

    path: str
    line: int
    what: str
    """What happens there."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault at one place: what the linter and the doctor report."""

    code: str
    severity: str
    """`error`: the update is wrong; `warning`: probably wrong, or wasteful; `note`: advice."""

    path: str
    """The file; a notebook's cell is `train.ipynb:cell 3`."""

    line: int
    """From 1."""

    column: int
    """From 1, in characters."""

    title: str
    message: str
    evidence: tuple[Evidence, ...] = ()
    mend: str = ""
