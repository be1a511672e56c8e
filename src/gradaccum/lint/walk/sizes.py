"""Lengths that the script itself says: of lists, ranges, new tensors, and loaders over them."""

from __future__ import annotations

import re
from contextlib import suppress

from gradaccum.lint.walk.values import Num, Seq, Thing, Value

__all__ = ["KNOWN", "SURE", "called", "count_of", "made", "sized"]

KNOWN = "len(="
"""How the name of a length begins that is known, and not chosen."""
_WRITTEN = re.compile(r"/\d+(\.\d+)?")
SURE = 32
"""Lengths up to this one are walked as they are, in the loop of the micro-batches itself."""
_LENGTH = "__len__"
_SHAPED = frozenset({"empty", "full", "ones", "rand", "randn", "zeros"})
_COUNTED = frozenset({"arange", "eye", "randperm"})
_DRAWN = frozenset({"randint", "normal", "uniform"})
_ALIKE = frozenset(
    {"bool", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "int",
     "long", "to", "type"}
)  # fmt: skip
_AROUND = ("enumerate", "wrapped")
_SAMPLES = frozenset({"batch_sampler", "sampler"})


def count_of(value: Value) -> int | None:
    """How many items a value holds, or a loop over it turns; `None` where nobody says."""
    if isinstance(value, Seq):
        return value.count if value.open else len(value.items)
    if not isinstance(value, Thing):
        return None
    known = value.attrs.get(_LENGTH)
    if isinstance(known, Num):
        return int(known.value)
    if value.kind in _AROUND and value.args and value.key != "islice()":
        return count_of(value.args[0])
    if value.kind == "range":
        bounds = [int(part.value) for part in value.args if isinstance(part, Num) and _whole(part)]
        if bounds and len(bounds) == len(value.args):
            with suppress(TypeError, ValueError):  # `range(0, 9, 0)`
                return len(range(*bounds))
        return None
    if value.kind == "zip" and value.args:
        counts = [count_of(part) for part in value.args]
        sure = [count for count in counts if count is not None]
        return min(sure) if len(sure) == len(counts) else None
    return None


def _whole(number: Num) -> bool:
    """Whether a number is what the script says, not one that was chosen for it."""
    return not number.varies and all(
        tag == "floor" or tag.lstrip("/").startswith(KNOWN) or _WRITTEN.fullmatch(tag)
        for tag in number.tags
    )


def sized(value: Value, count: int | None) -> Value:
    """The same value, which holds that many items."""
    if isinstance(value, Thing) and count is not None and count >= 0:
        value.attrs[_LENGTH] = Num(count)
    return value


def made(dotted: str, args: list[Value], kwargs: dict[str, Value]) -> int | None:
    """The length of what a function of a library makes anew."""
    root, _, rest = dotted.partition(".")
    name = dotted.rpartition(".")[2]
    if name == "TensorDataset" and args:
        return count_of(args[0])
    if name == "DataLoader":
        return _batches(args, kwargs)
    if root not in ("torch", "numpy", "np") or not rest:
        return None
    if name in ("split", "chunk") and len(args) > 1:
        return called(args[0], name, args[1:])
    if name in _COUNTED:
        return _number(args[0]) if len(args) == 1 else None
    if name not in _SHAPED and name not in _DRAWN:
        return None
    size = kwargs.get("size")
    if size is None:
        drawn = [part for part in args if isinstance(part, Seq)]
        size = drawn[-1] if drawn else args[0] if args and name in _SHAPED else None
    if isinstance(size, Seq):
        size = size.items[0] if size.items and not size.open else None
    return _number(size)


def called(owner: Value, name: str, args: list[Value]) -> int | None:
    """The length of what a method of something sized returns."""
    count = count_of(owner)
    if count is None:
        return None
    if name in _ALIKE:
        return count
    number = _number(args[0]) if len(args) == 1 else None
    if number is None or number < 1:
        return None
    if name == "split":
        return -(-count // number)
    if name == "chunk":
        return -(-count // -(-count // number)) if count else 0
    return None


def _batches(args: list[Value], kwargs: dict[str, Value]) -> int | None:
    """Batches of a loader over something sized."""
    data = args[0] if args else kwargs.get("dataset")
    count = count_of(data)
    size = kwargs.get("batch_size", args[1] if len(args) > 1 else Num(1))
    number = _number(size)
    if count is None or not number or len(args) > 3 or kwargs.keys() & _SAMPLES:
        return None
    if kwargs.get("drop_last", False) is True:
        return count // number
    return -(-count // number) if kwargs.get("drop_last", False) is False else None


def _number(value: Value) -> int | None:
    if isinstance(value, Num) and _whole(value) and value.value == int(value.value):
        return int(value.value)
    return None
