"""Numbers as people read them."""

from __future__ import annotations

import math

__all__ = ["amount", "duration", "number", "plural"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """A number with at most four digits that count; a dash for none.

    Examples:
        >>> number(75200), number(0.12345678), number(3e-9), number(None)
        ('75,200', '0.1235', '3e-09', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"


def amount(size: float | None) -> str:
    """Bytes in the unit that suits them.

    Examples:
        >>> amount(512), amount(3 * 2**20), amount(None)
        ('512 B', '3.0 MiB', '-')
    """
    if size is None:
        return "-"
    power = min(len(_UNITS) - 1, int(math.log2(size) / 10)) if size >= 1 else 0
    return f"{size / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """Seconds in the units that suit them.

    Examples:
        >>> duration(0.0213), duration(1.74), duration(5431.7)
        ('21 ms', '1.7 s', '1 h 30 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = int(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds % 60)} s"


def plural(count: int, word: str) -> str:
    """A count and its word.

    Examples:
        >>> plural(1, "window"), plural(2, "micro-batch")
        ('1 window', '2 micro-batches')
    """
    ending = "es" if word.endswith(("ch", "s")) else "s"
    return f"{number(count)} {word}{'' if count == 1 else ending}"
