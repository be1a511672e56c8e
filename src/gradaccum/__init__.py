"""Exact gradient accumulation for PyTorch: any batch in any memory, the same gradient, the proof.

Names are loaded when they are first asked for: the linter and the command line run without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradaccum.coupling.check import assert_splittable as assert_splittable
    from gradaccum.coupling.check import check as check
    from gradaccum.doctor.watch import watch as watch
    from gradaccum.engine.accumulator import Accumulator as Accumulator
    from gradaccum.engine.loop import Microbatch as Microbatch
    from gradaccum.engine.memory.fit import fit as fit
    from gradaccum.errors import GradaccumError as GradaccumError
    from gradaccum.errors import OpenWindowWarning as OpenWindowWarning
    from gradaccum.errors import SplitWarning as SplitWarning
    from gradaccum.planner.pack import plan as plan
    from gradaccum.records import Fit as Fit
    from gradaccum.records import Plan as Plan
    from gradaccum.records import Report as Report
    from gradaccum.records import Update as Update

_HOME = {
    "Accumulator": "gradaccum.engine.accumulator",
    "Fit": "gradaccum.records",
    "GradaccumError": "gradaccum.errors",
    "Microbatch": "gradaccum.engine.loop",
    "OpenWindowWarning": "gradaccum.errors",
    "Plan": "gradaccum.records",
    "Report": "gradaccum.records",
    "SplitWarning": "gradaccum.errors",
    "Update": "gradaccum.records",
    "assert_splittable": "gradaccum.coupling.check",
    "check": "gradaccum.coupling.check",
    "fit": "gradaccum.engine.memory.fit",
    "plan": "gradaccum.planner.pack",
    "watch": "gradaccum.doctor.watch",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - 20 ms that `import` need not pay

        return version("gradaccum")
    if name not in _HOME:
        raise AttributeError(f"module 'gradaccum' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from gradaccum.errors import MissingExtraError  # noqa: PLC0415 - only on the way out

        raise MissingExtraError(
            "torch-missing",
            f"`gradaccum.{name}` needs PyTorch, which is not installed: "
            "pip install 'gradaccum[torch]'",
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
