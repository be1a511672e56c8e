"""Notices who else changes parameters while a window is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradaccum.errors import InterferenceError

__all__ = ["Guard"]

_version = attrgetter("_version")


class Guard:
    """Watches version counters, and steps of the optimizers, from a window's opening to its end.

    Fused kernels, and those of other packages, may write to parameters without moving their version
    counters. Steps of such optimizers are counted by hooks, which are there only while a window is
    open.

    Args:
        model: says which parameters may change in a forward.
        optimizers: whose steps are counted.
        name: gives a parameter its name, for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        name: Callable[[nn.Parameter], str],
    ) -> None:
        self._optimizers = optimizers
        self._name = name
        # An embedding with `max_norm` rescales its own rows in every forward; doing so again
        # changes nothing, so a split batch sees the same weights as the whole one.
        self._renormed = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        }
        self._size = 0
        self._unseen = [
            optimizer
            for optimizer in optimizers
            if not type(optimizer).__module__.startswith("torch.optim.")
            or getattr(optimizer, "_step_supports_amp_scaling", False)
            or any(group.get("fused") for group in optimizer.param_groups)
        ]
        self._watched: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._stepped: list[str] = []
        self._hooks: list[RemovableHandle] = []

    def open(self, parameters: list[nn.Parameter]) -> None:
        """Start to watch."""
        self.close()
        self._size = len(parameters)
        self._watched = [p for p in parameters if id(p) not in self._renormed]
        self._versions = list(map(_version, self._watched))
        self._stepped = []
        for optimizer in self._unseen:
            self._hooks.append(optimizer.register_step_post_hook(self._note))

    def close(self) -> None:
        """Stop to watch; the accumulator's own step comes after."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.append(type(optimizer).__name__)

    def changed(self) -> bool:
        """Whether somebody stepped an optimizer or wrote to a parameter; kept short."""
        return bool(self._stepped) or list(map(_version, self._watched)) != self._versions

    def refuse_grown(self) -> None:
        """At a window's end: its gradients must be all that the optimizers step with."""
        size = sum(len(group["params"]) for o in self._optimizers for group in o.param_groups)
        if size != self._size:
            raise self._interference(
                f"the optimizers had {self._size} parameters when it opened, and have {size} now"
            )

    def refuse_changed(self) -> None:
        """Before a micro-batch: the parameters must be those of the window's first."""
        if self.changed():
            raise self._interference(f"{self._change()} since the window's first micro-batch")

    def refuse_stepped(self) -> None:
        """After a window's first backward: no optimizer may have stepped inside it."""
        if self.changed():
            raise InterferenceError(
                "optimizer-in-backward",
                "Parameters changed inside backward: an optimizer steps there, so there is nothing "
                "left to accumulate.",
                got=f"{self._change()} during backward",
                expected="parameters whose gradients stay until the window ends",
                do="remove the hook that calls `optimizer.step()`, or train without accumulation",
            )

    def _interference(self, got: str) -> InterferenceError:
        return InterferenceError(
            "parameters-changed",
            "Parameters changed in the middle of a window, so its micro-batches belong to "
            "different models.",
            got=got,
            expected="one optimizer step, by the accumulator, at the end of the window",
            do="remove `optimizer.step()` and in-place changes (also `F.embedding(max_norm=...)`) "
            "from inside the loop; or drop the window with acc.discard()",
        )

    def _change(self) -> str:
        if self._stepped:
            return f"{self._stepped[0]}.step() ran"
        pairs = zip(self._watched, self._versions, strict=True)
        changed = next(parameter for parameter, before in pairs if parameter._version != before)
        return f"`{self._name(changed)}` was changed in place"
