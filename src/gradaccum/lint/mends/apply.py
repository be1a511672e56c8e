"""`--fix`: the mends that are certain, made in the syntax tree so that comments stay.

A mend is kept only if the mended text, linted again, no longer has the fault and has no other one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import libcst as cst
from libcst import metadata

from gradaccum.lint.files.sources import Source
from gradaccum.lint.mends.edits import CERTAIN, Edit, Place
from gradaccum.records import Finding

__all__ = ["mend"]

ROUNDS = 50
"""Mends of one file, after which the rest is left to a person."""


def mend(
    source: Source, findings: Sequence[Finding], lint: Callable[[Source], list[Finding]]
) -> tuple[bytes, list[Finding]]:
    """The mended text, and the findings that are left for a person."""
    if source.cells or not any(item.code in CERTAIN for item in findings):
        return source.data, list(findings)
    left = list(findings)
    refused: set[tuple[str, int]] = set()
    for _ in range(ROUNDS):
        for item in left:
            if item.code not in CERTAIN or (item.code, item.line) in refused:
                continue
            data = _mended(source.data, item)
            if data is not None:
                after = Source(source.path, data)
                rest = lint(after)
                if _better(left, rest, item.code):
                    source, left = after, rest
                    refused.clear()
                    break
            refused.add((item.code, item.line))
        else:
            break
    return source.data, left


def _better(before: Sequence[Finding], after: Sequence[Finding], code: str) -> bool:
    old, new = (Counter(item.code for item in items) for items in (before, after))
    return new[code] < old[code] and all(new[other] <= old[other] for other in new)


def _mended(data: bytes, item: Finding) -> bytes | None:
    try:
        wrapper = metadata.MetadataWrapper(cst.parse_module(data))
    except (cst.ParserSyntaxError, UnicodeDecodeError, RecursionError):
        return None
    place = Place(
        wrapper.module,
        wrapper.resolve(metadata.PositionProvider),
        wrapper.resolve(metadata.ParentNodeProvider),
        item,
    )
    edit = CERTAIN[item.code](place)
    if edit is None:
        return None
    new = wrapper.module.visit(_Writer(edit))
    assert isinstance(new, cst.Module)
    return new.bytes


class _Writer(cst.CSTTransformer):
    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self._edit = edit

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def, override]
        """Put in what the edit says; libcst types this by node."""
        updated = super().on_leave(original_node, updated_node)
        edit = self._edit
        if original_node in edit.replace:
            updated = edit.replace[original_node]
        before, after = edit.before.get(original_node, []), edit.after.get(original_node, [])
        if original_node in edit.remove:
            return cst.RemoveFromParent()
        if before or after:
            assert isinstance(updated, cst.CSTNode)
            return cst.FlattenSentinel([*before, updated, *after])
        return updated
