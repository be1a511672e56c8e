"""The batches of a window as one: what is checked first, and how rows of several widths meet."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import BatchError
from gradaccum.planner.padding import Padding, Side, read_flags
from gradaccum.planner.pytree import Tree, holds_tensors, is_array
from gradaccum.planner.samples import Leaf

__all__ = ["check_alike", "count_samples", "merge", "padded_leaves"]

_SAMPLES = "pass a list of samples and collate="
_COLLATE = (
    "let the loader yield lists of samples (collate_fn=list) and pass collate= to gradaccum, "
    "so that a batch is made anew of any of them"
)


def count_samples(tree: Tree) -> int:
    """Samples in a batch: dimension 0 of every tensor and array in it.

    Raises:
        BatchError: if there is none, they disagree, or a leaf cannot be split.
    """
    sizes: dict[str, int] = {}
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        _check_leaf(path, leaf)
        if _has_rows(leaf):
            sizes[path] = leaf.shape[0]
    if not sizes or 0 in sizes.values():
        kind = tree.nodes[0][1] if tree.nodes else type(tree.leaves[0])
        shown = ", ".join(f"{path}: {size} samples" for path, size in sizes.items())
        raise BatchError(
            "batch-empty",
            "The batch holds no samples.",
            got=shown or f"a {kind.__name__} without a tensor that has a dimension",
            expected="tensors or arrays with the samples along dimension 0, at least one",
            do="leave out empty batches" if sizes else f"for samples of other kinds, {_SAMPLES}",
        )
    if len(set(sizes.values())) > 1:
        raise BatchError(
            "batch-sizes",
            "Tensors of the batch disagree about the number of samples.",
            got=", ".join(f"{path}: {size}" for path, size in sizes.items()),
            expected="the samples along dimension 0 of every tensor",
            do="give what all samples share a row for each (shared.expand(samples, ...)); "
            f"for samples of several sizes, {_SAMPLES}",
        )
    return next(iter(sizes.values()))


def check_alike(trees: Sequence[Tree]) -> None:
    """Batches of one window have the same containers, keys, dtypes and devices.

    Raises:
        BatchError: naming the first difference.
    """
    first = trees[0]
    for tree in trees[1:]:
        for one, two in zip(first.nodes, tree.nodes, strict=False):
            if one != two:
                raise _unlike(one[0], f"{_node_text(one)}, and {_node_text(two)}")
        for path, one, two in zip(first.paths, first.leaves, tree.leaves, strict=False):
            if _kind_text(one) != _kind_text(two):
                raise _unlike(path, f"{_kind_text(one)}, and {_kind_text(two)}")


def padded_leaves(trees: Sequence[Tree]) -> dict[str, list[Any]]:
    """By path, the tensors of all batches that have a second dimension."""
    found = {}
    for position, path in enumerate(trees[0].paths):
        values = [tree.leaves[position] for tree in trees]
        if all(_has_rows(value) and len(value.shape) > 1 for value in values):
            found[path] = values
    return found


def merge(
    trees: Sequence[Tree], counts: Sequence[int], padding: Padding | None, side: Side
) -> tuple[Leaf, ...]:
    """The leaves of all batches one after the other; those of one batch stay as they are.

    Args:
        trees: the batches, alike.
        counts: samples in each.
        padding: which leaves are padded, and with what.
        side: where narrower batches are padded further.

    Raises:
        BatchError: if shared leaves differ between batches, or shapes that are not known padding.
    """
    leaves = []
    for position, path in enumerate(trees[0].paths):
        values = [tree.leaves[position] for tree in trees]
        padded = padding is not None and path in padding.paths
        if _has_rows(values[0]):
            if padding is not None and padded:
                values = _widened(path, values, padding, side)
            leaves.append(Leaf(path, _joined(path, values), "rows", padded))
        elif all(_is_column(value, n) for value, n in zip(values, counts, strict=True)):
            items = [item for value in values for item in value]
            leaves.append(
                Leaf(path, tuple(items) if isinstance(values[0], tuple) else items, "column")
            )
        else:
            _check_shared(path, values)
            leaves.append(Leaf(path, values[0], "shared"))
    return tuple(leaves)


def _check_leaf(path: str, leaf: object) -> None:
    if isinstance(leaf, Tensor):
        if leaf.is_nested or leaf.layout != torch.strided:
            layout = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise BatchError(
                "batch-layout",
                f"{path} is a tensor that cannot be split along its samples.",
                got=f"a {layout} tensor",
                expected="a dense (strided) tensor",
                do=f"pad it ({path}.to_padded_tensor(0.0)) and pass lengths=, or {_SAMPLES}"
                if leaf.is_nested
                else f"{path}.to_dense(), or {_SAMPLES}",
            )
    elif not is_array(leaf) and holds_tensors(leaf):
        kind = type(leaf)
        raise BatchError(
            "batch-type",
            f"{path} holds tensors in a container of a kind that cannot be split.",
            got=f"{kind.__module__}.{kind.__qualname__}",
            expected="a dict or other mapping, a tuple, a named tuple, a list or a dataclass",
            do=f"put its tensors in one of these, or {_SAMPLES}",
        )


def _has_rows(leaf: Any) -> bool:
    return (isinstance(leaf, Tensor) or is_array(leaf)) and len(leaf.shape) > 0


def _is_column(leaf: object, count: int) -> bool:
    return isinstance(leaf, list | tuple) and len(leaf) == count


def _widened(path: str, values: Sequence[Any], padding: Padding, side: Side) -> list[Any]:
    width = max(padding.widths)
    if min(padding.widths) == width:
        return list(values)
    widest = values[padding.widths.index(width)]
    fill = padding.fill.get(path)
    if fill is None and not _extends(values, widest, side):
        raise _unknown_padding(path, values)
    found = []
    for value in values:
        have = value.shape[1]
        block: Any = fill
        if fill is None:
            block = widest[:1, have:] if side == "right" else widest[:1, : width - have]
        shape = (value.shape[0], width - have, *value.shape[2:])
        if isinstance(value, Tensor):
            extra = block.expand(shape)
        else:
            extra = _numpy().broadcast_to(block, shape)
        found.append(_cat([value, extra] if side == "right" else [extra, value], 1))
    return found


def _extends(values: Sequence[Any], widest: Any, side: Side) -> bool:
    """Whether every row is the start (padded right) or the end (left) of the widest one."""
    flags = []
    for value in values:
        width = value.shape[1]
        row = widest[:1, :width] if side == "right" else widest[:1, widest.shape[1] - width :]
        flags.append((value == row).all())
    return all(read_flags(flags))


def _joined(path: str, values: Sequence[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    shapes = [tuple(value.shape[1:]) for value in values]
    if len(set(shapes)) > 1:
        if len({shape[1:] for shape in shapes}) == 1 and all(shapes):
            raise _unknown_padding(path, values)
        raise _unlike(
            path, " and ".join(f"rows of shape {shape}" for shape in dict.fromkeys(shapes))
        )
    return _cat(values, 0)


def _cat(values: Sequence[Any], dim: int) -> Any:
    if isinstance(values[0], Tensor):
        return torch.cat(list(values), dim)
    return _numpy().concatenate(list(values), dim)


def _numpy() -> Any:
    # Not a dependency: it is installed wherever a batch holds one of its arrays.
    return importlib.import_module("numpy")


def _check_shared(path: str, values: Sequence[Any]) -> None:
    for value in values[1:]:
        if not _same(values[0], value):
            raise BatchError(
                "batch-shared",
                f"{path} differs between the batches of a window, whose samples are regrouped.",
                got=f"{_short(values[0])}, and {_short(value)}",
                expected="the same in all batches, or one item for each sample",
                do=f"give each sample its own: a tensor or list of as many items; or {_COLLATE}",
            )


def _same(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if isinstance(one, Tensor) or is_array(one):
        return read_flags([(one == two).all()])[0]
    return bool(one == two)


def _kind_text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} of {leaf.dim()} dimensions on {leaf.device}"
    if is_array(leaf):
        return f"array of {leaf.dtype} and {leaf.ndim} dimensions"
    return type(leaf).__name__


def _node_text(node: tuple[str, type, tuple[Any, ...]]) -> str:
    return f"{node[1].__name__} of {', '.join(str(key) for key in node[2])}"


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _unlike(path: str, got: str) -> BatchError:
    return BatchError(
        "batch-unlike",
        f"The batches of a window differ in {path}, so their samples cannot be regrouped.",
        got=got,
        expected="the same containers, keys, dtypes, devices and shapes in every batch",
        do=_COLLATE,
    )


def _unknown_padding(path: str, values: Sequence[Any]) -> BatchError:
    widths = ", ".join(str(value.shape[1]) for value in values)
    return BatchError(
        "batch-pad-unknown",
        f"{path} is of several widths, and the window does not show what it is padded with.",
        got=f"widths {widths}, and no padding that can be told from the samples",
        expected="lengths=, trim='right' or 'left', and a shorter sample in some batch",
        do=_COLLATE,
    )
