"""What a value holds: models, parameters, dtypes; and what stands for a result nobody knows."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from gradaccum.lint.walk.evaluate import text
from gradaccum.lint.walk.values import Seq, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["has_params", "is_complex", "is_low", "models_of", "opaque", "sums"]

_SUMS = re.compile(r"reduction\s*=\s*['\"]sum['\"]|size_average\s*=\s*False")


def opaque(walker: Walker, node: ast.Call) -> Thing:
    """A result nobody knows."""
    where = f"{text(node.func)}()@{node.lineno}"
    return Thing("unknown", where, bool(walker.loops), node=node, depth=len(walker.loops))


def sums(walker: Walker, path: str) -> bool:
    """Whether a file has a loss that is a sum, and so is rightly not divided for a window."""
    known = walker.program.sums.get(path)
    if known is None:
        found = _SUMS.search(walker.program.source(path)) is not None
        known = walker.program.sums[path] = found
    return known


def is_low(value: Value) -> bool:
    """Whether a value is a 16-bit floating dtype."""
    return isinstance(value, Thing) and value.key.split(".")[-1] in ("bfloat16", "float16", "half")


def is_complex(value: Value) -> bool:
    """Whether a value is a complex dtype."""
    return isinstance(value, Thing) and value.key.split(".")[-1] in (
        "complex32", "complex64", "complex128", "cfloat", "cdouble", "chalf"
    )  # fmt: skip


def models_of(values: list[Value], depth: int = 0) -> frozenset[Thing]:
    """The models whose parameters are among `values`."""
    found: set[Thing] = set()
    for value in values:
        if isinstance(value, Seq) and depth < 4:
            found |= models_of(value.items[:16], depth + 1)
        elif isinstance(value, Thing):
            if value.kind in ("model", "leaf"):
                found.add(value)
                found |= value.models
            elif value.kind in ("params", "param", "param_groups", "parts"):
                found |= value.models
            elif value.kind == "dict" and depth < 4:
                found |= models_of(list(value.attrs.values()), depth + 1)
            elif "called" in value.uses:
                found.add(value)
    return frozenset(found)


def has_params(value: Value, depth: int = 0) -> bool:
    """Whether a value is, or holds, what an optimizer is made of."""
    if isinstance(value, Seq):
        return depth < 3 and any(has_params(item, depth + 1) for item in value.items[:8])
    if isinstance(value, Thing):
        if value.kind in ("params", "leaf", "param"):
            return True
        return value.kind == "dict" and has_params(value.attrs.get("params"), depth + 1)
    return False
