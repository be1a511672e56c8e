"""Every error and warning of the package, and the one form their messages take.

```
GradaccumError
├── InputError           what was passed in cannot be meant (also a ValueError)
│   ├── PlanError        lengths or a budget that no plan can satisfy
│   └── BatchError       a batch that cannot be split as asked
├── LoopError            calls in an order that would make a wrong update (also a RuntimeError)
│   ├── StaleGradientError     a gradient was there before the window opened
│   └── InterferenceError      somebody else touched gradients or parameters in mid-window
├── ShortageError        a sample, a micro-batch or a step did not fit (also a MemoryError)
├── NonFiniteError       a loss or gradient is NaN or infinite, and the user asked to hear of it
├── StateError           a saved state that does not belong here
├── UnequalError         a report says that a batch may not be split (also an AssertionError)
└── MissingExtraError    an optional dependency is not installed (also an ImportError)
```
"""

from __future__ import annotations

import sys

__all__ = [
    "BatchError",
    "GradaccumError",
    "InputError",
    "InterferenceError",
    "LoopError",
    "MissingExtraError",
    "NonFiniteError",
    "OpenWindowWarning",
    "PlanError",
    "ShortageError",
    "SplitWarning",
    "StaleGradientError",
    "StateError",
    "UnequalError",
    "shown",
    "users_level",
]


class GradaccumError(Exception):
    """Base of all errors: what was got, what was expected, what to do.

    Args:
        slug: entry of `docs/messages.md` that explains the error.
        problem: one sentence.
        got: the offending value, with its name and shape.
        expected: what would have been right.
        do: a line to type, or the next step.
    """

    def __init__(
        self, slug: str, problem: str, *, got: str = "", expected: str = "", do: str = ""
    ) -> None:
        self.slug = slug
        self.problem = problem
        self.got = got
        self.expected = expected
        self.do = do
        super().__init__(slug, problem)

    def __str__(self) -> str:
        fields = (("Got:     ", self.got), ("Expected:", self.expected), ("Do this: ", self.do))
        lines = [self.problem, *(f"  {name} {text}" for name, text in fields if text)]
        return "\n".join([*lines, f"  More:     docs/messages.md#{self.slug}"])

    def __reduce__(self) -> tuple[object, ...]:
        # An exception is rebuilt from its args alone, so keywords would be lost between processes.
        return _rebuild, (type(self), self.slug, self.problem, self.got, self.expected, self.do)


def _rebuild(
    kind: type[GradaccumError], slug: str, problem: str, got: str, expected: str, do: str
) -> GradaccumError:
    return kind(slug, problem, got=got, expected=expected, do=do)


def shown(value: object) -> str:
    """A value of any kind on one short line, with its type, for `got`."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__}: {text if len(text) <= 60 else text[:57] + '...'}"


class InputError(GradaccumError, ValueError):
    """What was passed in cannot be meant."""


class PlanError(InputError):
    """Lengths or a budget that no plan can satisfy."""


class BatchError(InputError):
    """A batch that cannot be split as asked."""


class LoopError(GradaccumError, RuntimeError):
    """Calls in an order that would make a wrong update."""


class StaleGradientError(LoopError):
    """A gradient stood in a parameter before the window opened."""


class InterferenceError(LoopError):
    """Somebody else changed gradients or parameters in the middle of a window."""


class ShortageError(GradaccumError, MemoryError, RuntimeError):
    """Memory ran out where a smaller micro-batch cannot help, or is not ours to make."""


class NonFiniteError(GradaccumError, ArithmeticError):
    """A loss or gradient is NaN or infinite, and `on_nonfinite="raise"` was asked."""


class StateError(GradaccumError, ValueError):
    """A saved state that belongs to another model, optimizer or version."""


class UnequalError(GradaccumError, AssertionError):
    """A report says that the update depends on how the batch is split."""


class MissingExtraError(GradaccumError, ImportError):
    """An optional dependency is not installed."""


class OpenWindowWarning(UserWarning):
    """A loop was left with a window half done; its gradients are still there."""


class SplitWarning(UserWarning):
    """Something makes the update depend on how its batch is split, and nobody chose that."""


def users_level() -> int:
    """The `stacklevel` with which a warning raised by the caller names the user's own line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gradaccum."):
        frame, level = frame.f_back, level + 1
    return level
