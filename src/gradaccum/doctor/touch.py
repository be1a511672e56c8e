"""Hooks set and removed: code grafted into functions, and attributes that were replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from types import CodeType, FrameType, FunctionType
from typing import Any

from gradaccum.doctor.graft import Graft, graftable, grafted

__all__ = ["RUNNING", "Before", "BuiltinTouch", "Patches", "StandIn"]

Before = Callable[[Any, FrameType], Any]
"""Is given the object (or None for a function) and the caller's frame; returns what is to be known
when the call is over, or None if its end need not be noticed."""


class _Called:
    """Stands as `__call__` in a class; runs before each call, and is off the stack during it."""

    def __get__(self, callee: Any, owner: type | None = None) -> Any:
        if callee is None:
            return self
        callee._before(None, sys._getframe(1))
        return callee._original


class StandIn:
    """Stands in a class or a module for what is written in C, kept as `_original`.

    To `inspect`, `pickle`, `==` and `isinstance` it is what it stands for; `type()` knows better.
    """

    _original: Any
    __class__ = property(lambda self: type(self._original))  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        # A class has these of its own, which would come first.
        for name in ("__doc__", "__module__"):
            setattr(cls, name, property(lambda self, name=name: getattr(self._original, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __repr__(self) -> str:
        return repr(self._original)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce_ex__(self, version: Any) -> Any:
        by_name = isinstance(self._original.__reduce_ex__(version), str)
        return (copy, (self._original,)) if by_name else self._original.__reduce_ex__(version)


class BuiltinTouch(StandIn):
    """Stands in a module for one of its functions that are written in C."""

    __call__ = _Called()

    def __init__(self, original: Callable[..., Any], before: Before) -> None:
        self._original = original
        self._before = before


RUNNING = (_Called.__get__,)
"""What runs where the script runs."""


class Patches:
    """All that was changed, and is put back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.failed: list[str] = []
        """Functions that could not be listened to."""

    def put(self, holder: Any, name: str, new: Any) -> None:
        """Replace an attribute, remembering whether the holder had it itself."""
        own, old = name in vars(holder), vars(holder).get(name)
        setattr(holder, name, new)

        def undo() -> None:
            if vars(holder).get(name) is not new:
                return  # what somebody else has replaced since stays theirs
            if own:
                setattr(holder, name, old)
            else:
                delattr(holder, name)

        self._undo.append(undo)

    def graft(
        self,
        function: Callable[..., Any],
        before: Callable[..., Any],
        after: Callable[[Any], None] | None = None,
        everything: bool = False,
    ) -> Swap | None:
        """Listen to a function; returns what turns that off and on again."""
        inner = graftable(function)
        code = None if inner is None else grafted(inner, Graft(before, after, everything))
        if inner is None or code is None:
            self.failed.append(getattr(function, "__qualname__", repr(function)))
            return None
        swap = Swap(inner, code)
        swap.turn(True)
        self._undo.append(lambda: swap.turn(False))
        return swap

    def restore(self) -> None:
        """Undo all, last first."""
        while self._undo:
            self._undo.pop()()


class Swap:
    """A function's own code, and the same with a graft."""

    def __init__(self, function: FunctionType, new: CodeType) -> None:
        self._function = function
        self._codes = (function.__code__, new)

    def turn(self, on: bool) -> None:
        """Give it one or the other, unless somebody else has given it a third."""
        if self._function.__code__ is self._codes[not on]:
            self._function.__code__ = self._codes[on]
