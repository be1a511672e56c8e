"""A batch as leaves in a row, and the way back to the containers that held them."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["Build", "Tree", "flatten", "holds_tensors", "is_array"]

Build: TypeAlias = Callable[[Iterator[Any]], Any]

_SCALARS = (str, bytes, int, float, complex, type(None))
_UNSET = object()
_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class Tree:
    """A batch taken apart."""

    paths: tuple[str, ...]
    """Where each leaf was, as one would type it: `batch['input_ids']`."""

    leaves: tuple[Any, ...]
    """Tensors, arrays, lists without tensors, and whatever is no container."""

    nodes: tuple[tuple[str, type, tuple[Any, ...]], ...]
    """Path, type and keys of each container; equal for batches of the same structure."""

    build: Build
    """Puts new leaves, in the same order, into new containers of the same types."""


def flatten(batch: object) -> Tree:
    """Take a batch apart: mappings, tuples, named tuples, lists and dataclasses, nested.

    A list or tuple without a tensor in it is one leaf, because it may be a column of samples.

    Examples:
        >>> tree = flatten({"x": (1.5, [2, 3])})
        >>> tree.paths, tree.leaves
        (("batch['x']",), ((1.5, [2, 3]),))
        >>> tree.build(iter(["new"]))
        {'x': 'new'}
    """
    found = _Found([], [], [])
    build = _walk(batch, "batch", found)
    return Tree(tuple(found.paths), tuple(found.leaves), tuple(found.nodes), build)


def holds_tensors(value: object, depth: int = _DEEPEST) -> bool:
    """Whether a tensor or array is in `value`, its items or its attributes, `depth` levels down."""
    if isinstance(value, _SCALARS) or depth == 0:
        return False
    if isinstance(value, Tensor) or is_array(value):
        return True
    if isinstance(value, Mapping):
        return any(holds_tensors(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return any(holds_tensors(item, depth - 1) for item in value)
    return any(holds_tensors(item, depth - 1) for item in _attributes(value))


def is_array(value: object) -> bool:
    """Whether `value` is a numpy array; numpy is not imported to find out."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


@dataclass(frozen=True, slots=True)
class _Found:
    paths: list[str]
    leaves: list[Any]
    nodes: list[tuple[str, type, tuple[Any, ...]]]


def _walk(node: Any, path: str, found: _Found) -> Build:
    if not isinstance(node, PackedSequence):
        if isinstance(node, Mapping):
            return _walk_mapping(node, path, found)
        if isinstance(node, list | tuple) and holds_tensors(node):
            return _walk_sequence(node, path, found)
        if is_dataclass(node) and not isinstance(node, type):
            return _walk_dataclass(node, path, found)
    found.paths.append(path)
    found.leaves.append(node)
    return next


def _walk_mapping(node: Mapping[Any, Any], path: str, found: _Found) -> Build:
    found.nodes.append((path, type(node), tuple(node)))
    parts = [(key, _walk(node[key], f"{path}[{key!r}]", found)) for key in node]

    def build(leaves: Iterator[Any]) -> Any:
        items = {key: part(leaves) for key, part in parts}
        if not isinstance(node, MutableMapping):
            return _kind(node)(items)
        # A copy keeps what a subclass holds besides its items.
        filled = copy.copy(node)
        for key, item in items.items():
            filled[key] = item
        return filled

    return build


def _walk_sequence(node: Sequence[Any], path: str, found: _Found) -> Build:
    names = getattr(type(node), "_fields", None)  # what makes a tuple a named one
    found.nodes.append((path, type(node), names or (len(node),)))
    keys = [f".{name}" for name in names] if names else [f"[{key}]" for key in range(len(node))]
    parts = [_walk(item, path + key, found) for key, item in zip(keys, node, strict=True)]
    kind = _kind(node)
    if names:
        return lambda leaves: kind(*[part(leaves) for part in parts])
    return lambda leaves: kind([part(leaves) for part in parts])


def _walk_dataclass(node: Any, path: str, found: _Found) -> Build:
    values = {field.name: getattr(node, field.name, _UNSET) for field in fields(node)}
    names = [name for name, value in values.items() if value is not _UNSET]
    found.nodes.append((path, type(node), tuple(names)))
    parts = [(name, _walk(values[name], f"{path}.{name}", found)) for name in names]

    def build(leaves: Iterator[Any]) -> Any:
        # Neither `__init__` nor `replace`: fields may be `init=False`, and the class frozen.
        filled = copy.copy(node)
        for name, part in parts:
            object.__setattr__(filled, name, part(leaves))
        return filled

    return build


def _kind(node: Any) -> Callable[..., Any]:
    return type(node)


def _attributes(value: object) -> list[Any]:
    if isinstance(value, type):
        return []
    found = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        found += [getattr(value, name, None) for name in names if name != "__dict__"]
    return found
