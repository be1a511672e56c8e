"""Python's collector of circles, held back while a file is read and walked."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["paused", "sweep"]

_MANY = 200_000
"""Objects made since the last collection from which on a sweep is worth its time."""


@contextmanager
def paused() -> Generator[None, None, None]:
    """No collection inside: a syntax tree has no circles, and going through it costs a fifth."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def sweep() -> None:
    """Between two walks: free the circles of those before, so that many roots need no memory."""
    if not gc.isenabled() and gc.get_count()[0] > _MANY:
        gc.collect(0)
