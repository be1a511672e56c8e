"""Calls that are noticed without a frame of ours on the stack.

A wrapper function would show in every traceback, move the line that a warning names, and change
what `inspect` says. Python's own protocol offers two places that run before and after a call and
are gone while it runs: a descriptor's `__get__`, which hands out the function that is called next,
and the `__del__` of that function, which runs once the call is over, whether it returned or raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from types import FrameType, MethodType
from typing import Any

__all__ = ["RUNNING", "FunctionTouch", "MethodTouch", "Patches", "Then"]

Before = Callable[[Any, FrameType], Any]
"""Is given the object (or None for a function) and the caller's frame; returns what `after` gets,
or None if the end need not be noticed."""
After = Callable[[Any], None]


class Then(partial):
    """A call that says when it is over."""

    after: After | None = None
    note: Any = None

    def __del__(self) -> None:
        if self.after is not None:
            self.after(self.note)


class _Called:
    """Stands as `__call__` in a class; runs before each call, and is off the stack during it."""

    def __get__(self, callee: Any, owner: type | None = None) -> Any:
        if callee is None:
            return self
        original, before, after = callee._touch
        note = before(callee._object, sys._getframe(1))
        if note is None or after is None:
            return original
        then = Then(original)
        then.after, then.note = after, note
        return then


class _Callee:
    """What is called in the original's stead; to `inspect` it looks like the original."""

    __call__ = _Called()
    _touch: tuple[Callable[..., Any], Before, After | None]
    _object: Any = None

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined] # pickled by its name, as a function is


class FunctionTouch(_Callee):
    """Stands in a module for one of its functions."""

    def __init__(self, original: Callable[..., Any], before: Before, after: After | None) -> None:
        update_wrapper(self, original)
        self._touch = (original, before, after)


class _MethodCallee(_Callee):
    __slots__ = ("_object", "_touch")

    def __init__(self, touch: tuple[Callable[..., Any], Before, After | None], owner: Any) -> None:
        self._touch = touch
        self._object = owner

    def __getattr__(self, name: str) -> Any:
        return self._touch[0] if name == "__wrapped__" else getattr(self._touch[0], name)


class MethodTouch:
    """Stands in a class for one of its methods; the class itself still shows the original."""

    def __init__(self, original: Callable[..., Any], before: Before, after: After | None) -> None:
        self.original = original
        self._touch = (original, before, after)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self.original
        return MethodType(_MethodCallee(self._touch, owner), owner)


RUNNING = (Then.__del__, _Called.__get__, _MethodCallee.__init__, MethodTouch.__get__)
"""What runs where the script runs."""


class Patches:
    """Attributes that were replaced, and are put back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any, bool]] = []

    def put(self, holder: Any, name: str, new: Any) -> None:
        """Replace an attribute, remembering whether the holder had it itself."""
        own = name in vars(holder)
        self._undo.append((holder, name, new, vars(holder).get(name), own))
        setattr(holder, name, new)

    def restore(self) -> None:
        """Undo all, last first; what somebody else has replaced since stays theirs."""
        while self._undo:
            holder, name, new, old, own = self._undo.pop()
            if vars(holder).get(name) is not new:
                continue
            if own:
                setattr(holder, name, old)
            else:
                delattr(holder, name)
