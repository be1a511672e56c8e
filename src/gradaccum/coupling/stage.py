"""The user's own model on a stage: it runs in another dtype, and leaves as it came."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import CellType, FunctionType, MethodType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.engine.state import load_random, save_random

__all__ = ["Change", "Stage", "numpy_state", "seed_all"]

_CONTAINERS = (dict, list, set, deque)
_GONE = object()


class Change(NamedTuple):
    """Something that a forward changed."""

    owner: str
    """Name of a module, or what the loss function holds."""

    name: str
    holder: int
    """Position of the owner on the stage."""

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


class _Holder:
    """Something with named values: a module, or the variables that a function closes over."""

    def __init__(self, owner: str, module: nn.Module | None, cells: dict[str, CellType]) -> None:
        self.owner = owner
        self.module = module
        self._cells = cells

    def read(self) -> dict[str, Any]:
        if self.module is not None:
            return vars(self.module)
        return {n: c.cell_contents for n, c in self._cells.items() if not _empty(c)}

    def write(self, name: str, value: Any) -> None:
        if self.module is None:
            self._cells[name].cell_contents = value
        elif value is _GONE:
            vars(self.module).pop(name, None)
        else:
            vars(self.module)[name] = value


class Stage:
    """Puts a model into a dtype for a while, with everything it and its loss function hold.

    Parameters keep their identity and get other data; buffers and tensors in attributes are
    replaced by copies. On leaving, every tensor, attribute, gradient, random state and setting is
    what it was, also after an error.

    Args:
        model: runs on the stage.
        loss_fn: what it closes over is put on the stage too.
        dtype: for all that is floating; `None` leaves each as it is.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., object], dtype: torch.dtype | None
    ) -> None:
        self.model = model
        self.dtype = dtype
        self._holders = [_Holder(n, m, {}) for n, m in model.named_modules()]
        known = {id(holder.module) for holder in self._holders}
        for name, found in _inside(loss_fn):
            for inner, module in found.named_modules():
                if id(module) not in known:
                    known.add(id(module))
                    label = f"{name}.{inner}" if inner else name
                    self._holders.append(_Holder(label, module, {}))
        cells = _cells(loss_fn)
        if cells:
            self._holders.append(_Holder("loss_fn", None, cells))
        self.parameters: dict[str, Tensor] = {}
        self._data: dict[int, tuple[Tensor, Tensor, Tensor | None, int]] = {}
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._copies: dict[int, Tensor] = {}
        self._scope = ExitStack()

    def __enter__(self) -> Stage:
        random_states = save_random()
        numpy_state = _numpy_random().get_state() if _numpy_random() else None
        default = torch.get_default_dtype()
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._scope.callback(load_random, random_states)
        if numpy_state is not None:
            self._scope.callback(_numpy_random().set_state, numpy_state)
        self._scope.callback(torch.set_default_dtype, default)
        self._scope.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and this would load it
            self._scope.enter_context(torch.compiler.set_stance("force_eager"))
        self._scope.callback(self._leave)
        try:
            self._before = [_shallow(holder.read()) for holder in self._holders]
            for name, parameter in self._found_parameters():
                self.adopt(name, parameter)
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            self.reset()
        except BaseException:
            self._scope.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scope.close()

    def adopt(self, name: str, leaf: Tensor) -> bool:
        """Take a leaf onto the stage; return whether its dtype changed."""
        if id(leaf) in self._data:
            return False
        data, grad = leaf.data, leaf.grad
        leaf.grad = None
        leaf.data = self._copied(data)
        self._data[id(leaf)] = (leaf, data, grad, leaf._version)
        if leaf.requires_grad:
            self.parameters[name] = leaf
        return leaf.dtype != data.dtype

    def stale(self) -> dict[str, Tensor]:
        """Gradients that stood in the parameters when the stage was set, by name."""
        found = {name: self._data[id(p)][2] for name, p in self.parameters.items()}
        return {name: grad for name, grad in found.items() if grad is not None}

    def reset(self) -> None:
        """Put everything but gradients to where it was at the start."""
        for i in range(len(self._holders)):
            self._reset(i)
        for leaf, data, _, version in self._data.values():
            if leaf._version != version:
                leaf.data.copy_(data)

    def reset_only(self, changes: list[Change]) -> None:
        """Put back what changed, and nothing else."""
        for change in changes:
            self._reset(change.holder, change.name)
        if any(change.name.startswith("parameter ") for change in changes):
            for leaf, data, _, version in self._data.values():
                if leaf._version != version:
                    leaf.data.copy_(data)

    def changes(self) -> list[Change]:
        """What is other than at the start: buffers, attributes, contents of containers."""
        found = []
        for i, (holder, (before, contents)) in enumerate(
            zip(self._holders, self._before, strict=True)
        ):
            now = holder.read()
            for name in before.keys() | now.keys():
                if name in ("_parameters", "_modules", "training") or name.startswith("_forward"):
                    continue
                if name == "_buffers":
                    held = contents["_buffers"]
                    found += [
                        Change(holder.owner, key, i)
                        for key in held.keys() | now[name].keys()
                        if self._differs(held.get(key), now[name].get(key))
                    ]
                elif self._differs(before.get(name, _GONE), now.get(name, _GONE)) or (
                    name in contents and _other(contents[name], now[name])
                ):
                    found.append(Change(holder.owner, name, i))
        names = {id(p): name for name, p in self.parameters.items()}
        found += [
            Change("", f"parameter {names.get(id(leaf), '')}", 0)
            for leaf, data, _, version in self._data.values()
            if leaf._version != version and not torch.equal(leaf.data, self._copied(data))
        ]
        return found

    def _reset(self, i: int, only: str | None = None) -> None:
        holder, (before, contents) = self._holders[i], self._before[i]
        for name in (before.keys() | holder.read().keys()) - {"_parameters", "_modules"}:
            if name == "_buffers" and holder.module is not None:
                buffers = holder.module._buffers
                for key, buffer in contents["_buffers"].items():
                    if only is None or key == only:
                        buffers[key] = None if buffer is None else self._staged(buffer)
                continue
            if only is not None and name != only:
                continue
            value = before.get(name, _GONE)
            if isinstance(value, Tensor) and not value.requires_grad:
                value = self._staged(value)
            elif name in contents:
                _refill(value, contents[name])
            if holder.module is not None or value is not _GONE:
                holder.write(name, value)

    def _leave(self) -> None:
        for holder, (before, contents) in zip(self._holders, self._before, strict=False):
            for name in before.keys() | holder.read().keys():
                value = before.get(name, _GONE)
                if name in contents:
                    _refill(value, contents[name])
                if holder.module is not None or value is not _GONE:
                    holder.write(name, value)
        for leaf, data, grad, _ in self._data.values():
            leaf.grad = None
            leaf.data = data
            leaf.grad = grad
        torch.clear_autocast_cache()

    def _found_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for holder in self._holders:
            values = holder.read()
            owned = holder.module._parameters if holder.module is not None else values
            for name, value in owned.items():
                if isinstance(value, nn.Parameter):
                    yield f"{holder.owner}.{name}" if holder.owner else name, value

    def _staged(self, tensor: Tensor) -> Tensor:
        """The stage's copy of a tensor, with its first content; one for all that share it."""
        copy = self._copies.get(id(tensor))
        if copy is None or copy.requires_grad or copy.shape != tensor.shape:
            copy = self._copies[id(tensor)] = self._copied(tensor)
        else:
            copy.data.copy_(tensor.detach())
        return copy

    def _copied(self, tensor: Tensor) -> Tensor:
        plain = tensor.detach()
        if self.dtype is not None and plain.is_floating_point():
            return plain.to(self.dtype, copy=True)
        if self.dtype == torch.float64 and plain.is_complex():
            return plain.to(torch.complex128, copy=True)
        return plain.clone()

    def _differs(self, before: Any, now: Any) -> bool:
        if isinstance(before, Tensor) and isinstance(now, Tensor):
            if now.grad_fn is not None:
                return False  # computed anew by each forward
            start = self._copied(before)
            if start.shape != now.shape or start.dtype != now.dtype:
                return True
            return not torch.equal(start.nan_to_num(), now.detach().nan_to_num())
        if before is now:
            return False
        plain = (bool, int, float, complex, str, bytes, type(None))
        return not (isinstance(before, plain) and isinstance(now, plain) and before == now)


def seed_all(seed: int) -> None:
    """Seed every generator that a forward may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    if _numpy_random():
        _numpy_random().seed(seed)


def numpy_state() -> tuple[Any, ...]:
    """The state of numpy's global generator, as values that can be compared."""
    if not _numpy_random():
        return ()
    kind, keys, *rest = _numpy_random().get_state()
    return kind, keys.tobytes(), *rest


def _numpy_random() -> Any:
    # Not a dependency; what is not loaded cannot have been drawn from.
    return getattr(sys.modules.get("numpy"), "random", None)


def _shallow(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    contents = {n: _content(v) for n, v in values.items() if isinstance(v, _CONTAINERS)}
    return dict(values), contents


def _content(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _other(content: Any, container: Any) -> bool:
    now = _content(container)
    if isinstance(content, dict):
        return content.keys() != now.keys() or any(_not_same(content[k], now[k]) for k in content)
    return len(content) != len(now) or any(map(_not_same, content, now))


def _not_same(one: Any, other: Any) -> bool:
    if one is other:
        return False
    plain = (bool, int, float, complex, str, bytes)
    return not (isinstance(one, plain) and isinstance(other, plain) and one == other)


def _refill(container: Any, content: Any) -> None:
    if not _other(content, container):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(content)
    else:
        container.extend(content)


def _empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is _GONE
    except ValueError:  # a variable that has no value yet
        return True


def _functions(function: Any) -> Iterator[Any]:
    while isinstance(function, partial):
        yield from function.args
        yield from function.keywords.values()
        function = function.func
    if isinstance(function, MethodType):
        yield function.__self__
        function = function.__func__
    yield function


def _cells(loss_fn: Any) -> dict[str, CellType]:
    found: dict[str, CellType] = {}
    for function in _functions(loss_fn):
        if isinstance(function, FunctionType) and function.__closure__:
            found |= dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return found


def _inside(loss_fn: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules that a loss function can see: itself, its arguments, variables and globals."""
    for function in _functions(loss_fn):
        if isinstance(function, nn.Module):
            yield "loss_fn", function
            continue
        if not isinstance(function, FunctionType):
            for name, value in getattr(function, "__dict__", {}).items():
                if isinstance(value, nn.Module):
                    yield name, value
            continue
        seen = {n: function.__globals__.get(n) for n in function.__code__.co_names}
        seen |= {n: c.cell_contents for n, c in _cells(function).items() if not _empty(c)}
        for name, value in seen.items():
            if isinstance(value, nn.Module):
                yield name, value
