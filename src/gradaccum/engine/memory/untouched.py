"""Running a model for what it costs, and leaving no trace of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradaccum.engine.grads import apart
from gradaccum.engine.state import load_random, save_random
from gradaccum.planner.live import eagerly

__all__ = ["Writes", "untouched"]

_PLAIN = (bool, int, float, complex, str, type(None), Tensor)


@contextmanager
def untouched(model: nn.Module) -> Generator[Writes]:
    """Whatever a forward and backward inside changes is afterwards as it was, to the bit.

    That is: gradients (there are none at the entrance), buffers, plain attributes of modules
    (counters, cached tensors), train and eval mode, and the random states of torch, its devices,
    Python and numpy. Parameters that a forward writes to are put back if the first run was watched:
    `with untouched(model) as writes, writes: ...`. What a module keeps in lists, or what hooks
    write elsewhere, is not seen.

    Examples:
        >>> model = torch.nn.BatchNorm1d(2)
        >>> with untouched(model):
        ...     model(torch.randn(4, 2)).sum().backward()
        >>> int(model.num_batches_tracked), model.weight.grad
        (0, None)
    """
    attributes = [
        (module, plain_attributes(module), dict(module._buffers)) for module in model.modules()
    ]
    # Copied ahead: that batch norm writes to its statistics is not to be seen from outside.
    buffers = [
        (buffer, buffer.detach().clone())
        for buffer in model.buffers()
        if not buffer.is_meta  # nothing is in it
    ]
    randoms, numpy = save_random(), sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    held = {id(leaf): leaf for _, plain, _ in attributes for leaf in plain.values()}
    kept = [leaf for leaf in held.values() if isinstance(leaf, Tensor)]
    writes = Writes([*model.parameters(), *kept])
    try:
        with apart(list(model.parameters())):
            yield writes
    finally:
        for module, plain, named in attributes:
            restore_attributes(module, plain)
            module._buffers.clear()
            module._buffers.update(named)
        with torch.no_grad():
            for tensor, saved in [*buffers, *writes.saved.values()]:
                tensor.detach().copy_(saved)
        load_random(randoms)
        if numpy is not None:
            numpy.random.set_state(state)


class Writes(TorchDispatchMode):
    """Copies a tensor before an operator writes to it; the others are never copied.

    It looks at each operator, which takes time and keeps `torch.compile` from compiling: what a
    forward writes to is known from its first run.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._tensors = {_memory(t): t for t in tensors if t.layout is torch.strided}
        self._scope = ExitStack()

    def __enter__(self) -> Writes:
        self._scope.enter_context(eagerly())
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._scope.close()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        schema: Any = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._save(value)
            for argument in schema.arguments:
                if argument.name in (kwargs or {}) and argument.alias_info is not None:
                    self._save((kwargs or {})[argument.name])
        return func(*args, **(kwargs or {}))

    def _save(self, value: object) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                key = _memory(tensor)
                if key in self._tensors and key not in self.saved:
                    whole = self._tensors[key]
                    self.saved[key] = whole, whole.detach().clone()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers, texts or tensors: counters, caches."""
    return {name: v for name, v in vars(module).items() if isinstance(v, _PLAIN)}


def restore_attributes(module: nn.Module, plain: dict[str, Any]) -> None:
    """Put such attributes back, and take away those that were not there."""
    for name in [name for name, v in vars(module).items() if isinstance(v, _PLAIN)]:
        if name not in plain:  # not there before
            del module.__dict__[name]
    module.__dict__.update(plain)
