"""Python 2, and names that became keywords since: written anew so that it parses."""

from __future__ import annotations

import ast
import re
import warnings

__all__ = ["modernised"]

_CHANGES: tuple[tuple[re.Pattern[str], str], ...] = (
    # a name that `async` has been since 3.7: `tensor.cuda(async=True)`
    (re.compile(r"\basync(\s*=[^=])"), r"async_\1"),
    # bound to a name instead of called, so that a statement may go on over several lines
    (
        re.compile(r"(^|[:;])(\s*)print[ \t]+(?![=(\s])", re.MULTILINE),
        r"\1\2print_ = ",
    ),
    (
        re.compile(r"^(\s*except\s+(?:\([^)]*\)|[\w.]+))\s*,\s*(\w+)\s*:", re.MULTILINE),
        r"\1 as \2:",
    ),
    (re.compile(r"\b(raise\s+[\w.]+)\s*,\s*(.+)$", re.MULTILINE), r"\1(\2)"),
    (re.compile(r"<>"), "!="),
    (re.compile(r"\b(\d+)[lL]\b"), r"\1"),
    (re.compile(r"(?<![\w.])0([0-7]+)\b"), r"0o\1"),
    (re.compile(r"^(\s*)exec\s+(?!\()", re.MULTILINE), r"\1exec_ = "),
    (re.compile(r"\bur(['\"])"), r"r\1"),
)


def modernised(text: str) -> str | None:
    """`text` as today's Python, its lines where they were; `None` if it does not parse then either.

    What stands in strings may change as well: the result is there to be read, not to be run.
    """
    new = text.replace("\r\n", "\n").expandtabs(8)  # as Python 2 counted them
    if "\t" in text and _parses(new):
        return new
    for pattern, put in _CHANGES:
        new = pattern.sub(put, new)
    return new if _parses(new) else None


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
