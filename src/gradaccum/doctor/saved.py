"""What autograd saved for a backward, looked at without waking who packed it.

Looking at a saved tensor runs its unpack hook: under activation checkpointing that computes the
forward again, which we must not start.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

__all__ = ["hooked", "tells"]


def tells(torch: Any) -> bool:
    """Whether a saved tensor says that it has an unpack hook: since torch 2.7."""
    return hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def hooked(node: Any) -> bool:
    """Whether a saved tensor of the node would run somebody's code when it is looked at.

    Ask only where saved tensors tell, or where nobody has set hooks.
    """
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, (tuple, list)) else (saved,):
            if getattr(one, "unpack_hook", None) is not None:
                return True
    return False


@lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
