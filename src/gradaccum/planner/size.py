"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from operator import index
from typing import Literal

from gradaccum.errors import InputError, shown

__all__ = ["parse_size"]

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(size: object, *, name: str = "memory") -> int | Literal["auto"]:
    """Bytes from `"12GiB"`, `"900MB"`, `"1.5 G"`, a whole number of bytes, or `"auto"` as it is.

    `KiB`, `MiB`, `GiB` and `TiB` are powers of 1,024; `KB`, `MB`, `GB` and `TB`, and the single
    letters, are powers of 1,000.

    Args:
        size: what a user wrote.
        name: the argument it was written for.

    Raises:
        InputError: if it is no size, or less than one byte.

    Examples:
        >>> parse_size("12GiB"), parse_size("900MB"), parse_size(4096), parse_size("auto")
        (12884901888, 900000000, 4096, 'auto')
    """
    if isinstance(size, str):
        if size.strip().lower() == "auto":
            return "auto"
        found = _SIZE.fullmatch(size)
        if found is None:
            raise _no_size(name, size)
        number, prefix, binary = found.groups()
        if binary and not prefix:
            raise _no_size(name, size)
        whole, _, digits = number.partition(".")
        base = (1024 if binary else 1000) ** _POWERS[prefix.lower()]
        # In integers: a float would round sizes beyond 8 PiB, and cannot hold every number.
        if len(whole) + len(digits) > 30:
            raise _no_size(name, size)
        value = int(whole + digits) * base // 10 ** len(digits)
    else:
        try:
            value = index(size) if not isinstance(size, bool) else 0  # pyrefly: ignore[bad-argument-type] - refusing is what it is for
        except TypeError:
            raise _no_size(name, size) from None
    if value < 1:
        raise _no_size(name, size)
    return value


def _no_size(name: str, size: object) -> InputError:
    return InputError(
        "memory-size",
        f"`{name}` is not a number of bytes.",
        got=f"{name}={shown(size)}",
        expected='a size such as "12GiB" or "900MB", a whole number of bytes >= 1, or "auto"',
        do=f'{name}="auto" takes what the device can still give',
    )
