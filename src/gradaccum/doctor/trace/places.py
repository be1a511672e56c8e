"""Where in whose code something happened."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

__all__ = ["Places"]

HIDDEN, LIBRARY, USER = 0, 1, 2
MOST = 20_000


class Places:
    """Numbers for lines of code: a line is described once and then known by its number."""

    def __init__(self, hidden: tuple[str, ...]) -> None:
        self._hidden = hidden
        self._standard = os.path.dirname(os.__file__) + os.sep
        self._kinds: dict[str, int] = {}
        self._numbers: dict[tuple[CodeType, int], int] = {}
        self._fast: dict[tuple[int, int], tuple[int, int, CodeType]] = {}
        """By code and instruction, for asking for the line is slow: kind, number, and the code,
        whose identity would otherwise go to another."""
        self.described: list[tuple[str, int, str]] = []
        """Path, line and function of each number."""

    def _classify(self, filename: str) -> int:
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        path = os.path.abspath(filename)
        if main is not None and path == os.path.abspath(main):
            kind = USER
        elif filename.startswith("<frozen") or path.startswith(self._hidden):
            kind = HIDDEN
        elif f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
            kind = LIBRARY
        elif path.startswith(self._standard):
            kind = HIDDEN  # contextlib, functools: between the caller and torch
        else:
            kind = USER
        self._kinds[filename] = kind
        return kind

    def find(self, frame: FrameType | None) -> tuple[int, int, int]:
        """Numbers of the innermost line outside torch, and of the innermost in the user's own code.

        The third is the identity of the user's frame. Both numbers are -1 where there is none; the
        second is the first where no file is the user's.
        """
        at, activation = -1, 0
        fast = self._fast
        while frame is not None:
            key = id(frame.f_code), frame.f_lasti
            known = fast.get(key)
            kind, number, _ = known if known is not None else self._describe(frame, key)
            if kind != HIDDEN:
                if at < 0:
                    at, activation = number, id(frame)
                if kind == USER:
                    return at, number, id(frame)
            frame = frame.f_back
        return at, at, activation

    def _describe(self, frame: FrameType, key: tuple[int, int]) -> tuple[int, int, CodeType]:
        code = frame.f_code
        kind = self._kinds.get(code.co_filename)
        if kind is None:
            kind = self._classify(code.co_filename)
        number = -1
        if kind != HIDDEN:
            number = self._number(code, frame.f_lineno or code.co_firstlineno)
        known = kind, number, code
        if len(self._fast) < MOST:
            self._fast[key] = known
        return known

    def ours(self, frame: FrameType) -> bool:
        """Whether a frame is in torch's own code, or Python's."""
        name = frame.f_code.co_filename
        kind = self._kinds.get(name)
        return (self._classify(name) if kind is None else kind) == HIDDEN

    def theirs(self, filename: str) -> bool:
        """Whether a file is the user's own."""
        kind = self._kinds.get(filename)
        return (self._classify(filename) if kind is None else kind) == USER

    def _number(self, code: CodeType, line: int) -> int:
        key = (code, line)
        number = self._numbers.get(key)
        if number is None:
            if len(self.described) >= MOST:
                return -1  # code that is generated without end must not fill the memory
            number = self._numbers[key] = len(self.described)
            self.described.append((code.co_filename, line, code.co_name))
        return number
