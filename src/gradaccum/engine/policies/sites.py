"""Which module is at work: names for the places of a forward."""

from __future__ import annotations

import sys
from typing import NamedTuple

from torch import nn

__all__ = ["Names", "Site"]


class Site(NamedTuple):
    """One place of a forward, the same in every micro-batch whatever its size."""

    module: str
    """Name of the innermost module at work; empty for the model itself and for a loss."""

    kind: str
    """The function that was called."""

    number: int
    """How many calls of it the module had made before, in the same forward."""

    @property
    def name(self) -> str:
        """The module's name, or what was called where no submodule was at work."""
        return self.module or f"{self.kind}() outside of any submodule"

    def __str__(self) -> str:
        return f"`{self.name}`"


class Names:
    """Names of a model's modules, looked up from the code that runs."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {}
        for name, module in model.named_modules():
            # a compiled model is called through its wrapper, and is known by its own names
            self._names.setdefault(id(module), name.removeprefix("_orig_mod."))
        self._calls: dict[tuple[str, str], int] = {}

    def begin(self) -> None:
        """A forward starts: calls are counted anew."""
        self._calls.clear()

    def module(self) -> str:
        """Name of the innermost module of the model that is running here."""
        frame = sys._getframe(1)
        while frame is not None:
            if "self" in frame.f_code.co_varnames[:1]:
                name = self._names.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def site(self, kind: str) -> Site:
        """The place of a call of `kind`; each call is one place further."""
        module = self.module()
        number = self._calls.get((module, kind), 0)
        self._calls[module, kind] = number + 1
        return Site(module, kind, number)
