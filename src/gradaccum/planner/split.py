"""Batches of any shape as samples that can be regrouped, and micro-batches on their device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gradaccum.errors import BatchError, InputError
from gradaccum.planner.lengths import checked_lengths
from gradaccum.planner.merge import check_alike, count_samples, merge, padded_leaves
from gradaccum.planner.padding import Side, find_padding
from gradaccum.planner.pytree import Tree, flatten, holds_tensors
from gradaccum.planner.samples import Collated, Rows, Samples

__all__ = ["Samples", "even", "gather", "hollow_batch", "listed", "move"]


def gather(
    batches: Sequence[Any],
    *,
    lengths: Iterable[Any] | Callable[[Any], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    trim: Side | Callable[[Any, int], Any] | None = "right",
) -> Samples:
    """The samples of a window's batches, ready to be regrouped; nothing is changed or moved.

    Args:
        batches: one batch, or all batches of a window. With `collate`, each is a list of samples;
            without, each is a tensor or a mapping, tuple, named tuple, list or dataclass of them,
            nested as you like, with the samples along dimension 0. Lists and tuples without
            tensors that have an item for each sample go with the samples; whatever else is no
            tensor, and tensors of shape `()`, is shared by all micro-batches.
        lengths: size of each sample without padding, in elements: one sequence or tensor for the
            whole window, or a function: `batch -> lengths`, with `collate` `sample -> length`.
        collate: makes a batch of a list of samples; it pads to the longest of them.
        trim: where padding columns are cut (dimension 1 of every tensor that is padded), a
            function `(micro_batch, width) -> micro_batch` that cuts them, or None to cut nothing.
            Cutting is exact for losses that do not count padding, as with the whole batch.

    Raises:
        BatchError: if a batch cannot be split, the lengths do not belong to it, what would be cut
            is not padding, or the batches of a window are not alike.
        InputError: for tensors on the meta device.

    Examples:
        >>> import torch
        >>> ids = torch.tensor([[5, 6, 7, 8], [9, 0, 0, 0], [3, 4, 0, 0]])
        >>> samples = gather([{"ids": ids, "name": ["a", "b", "c"]}], lengths=[4, 1, 2])
        >>> samples.microbatch([1, 2], width=2)
        {'ids': tensor([[9, 0],
                [3, 4]]), 'name': ['b', 'c']}
    """
    _check_trim(trim)
    if collate is not None:
        return _gather_samples(batches, lengths, collate)
    for batch in batches:
        _refuse_samples(batch)
    if not batches:
        raise _empty("no batches")
    trees = [flatten(batch) for batch in batches]
    counts = [count_samples(tree) for tree in trees]
    check_alike(trees)
    _refuse_hollow(trees[0])  # and the others are like it
    sizes = None if lengths is None else _lengths_of(batches, counts, lengths)
    padding, side = None, "left" if trim == "left" else "right"
    if sizes is not None and isinstance(trim, str):
        padding = find_padding(padded_leaves(trees), _by_batch(sizes, counts), side)
    return Rows(
        leaves=merge(trees, counts, padding, side),
        build=trees[0].build,
        count=sum(counts),
        lengths=sizes,
        side=side,
        trim=trim if callable(trim) else None,
    )


def move(batch: Any, device: torch.device | str) -> Any:
    """The batch with its tensors on `device`, in new containers; all else stays as it is.

    Copies to an accelerator do not wait; tensors that are there already are not copied.

    Raises:
        InputError: for a tensor on the meta device, which has no numbers to move.

    Examples:
        >>> move({"x": torch.zeros(2), "name": "a"}, "cpu")
        {'x': tensor([0., 0.]), 'name': 'a'}
    """
    target = torch.device(device)
    # To the CPU a copy that does not wait could be read before it is there.
    ahead = target.type != "cpu"
    tree = flatten(batch)
    if target.type != "meta":
        _refuse_hollow(tree)

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor | PackedSequence):
            return leaf.to(target, non_blocking=ahead)
        return leaf

    return tree.build(iter([moved(leaf) for leaf in tree.leaves]))


def even(n: int, k: int) -> list[range]:
    """`n` samples in at most `k` groups of neighbours whose sizes differ by at most 1.

    Args:
        n: samples, at least 1.
        k: most groups, at least 1.

    Returns:
        The groups in order, the larger ones first.

    Examples:
        >>> even(7, 3)
        [range(0, 3), range(3, 5), range(5, 7)]
    """
    groups = min(n, k)
    size, larger = divmod(n, groups)
    starts = [group * size + min(group, larger) for group in range(groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def hollow_batch(paths: Sequence[str]) -> InputError:
    """The refusal of tensors in which there is nothing."""
    return InputError(
        "on-meta",
        "The batch has tensors on the meta device: there are no numbers in them.",
        got=listed(paths),
        expected="samples on a device that holds them",
        do="a batch of your loader's",
    )


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown_names = ", ".join(f"`{name}`" for name in names[:4])
    return shown_names if len(names) <= 4 else f"{shown_names} and {len(names) - 4} more"


def _refuse_hollow(tree: Tree) -> None:
    hollow = []
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        tensor = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if isinstance(tensor, Tensor) and tensor.is_meta:
            hollow.append(path)
    if hollow:
        raise hollow_batch(hollow)


def _gather_samples(
    batches: Sequence[Any],
    lengths: Iterable[Any] | Callable[[Any], Any] | None,
    collate: Callable[[list[Any]], Any],
) -> Samples:
    samples: list[Any] = []
    for batch in batches:
        if isinstance(batch, Mapping | Tensor | str | bytes) or not isinstance(batch, Iterable):
            raise BatchError(
                "batch-samples",
                "With `collate=` a batch is a list of samples.",
                got=f"a {type(batch).__name__}",
                expected="a list of samples, from which collate(samples) makes a batch",
                do="leave out collate= for a batch that is made already, or let the loader yield "
                "lists: DataLoader(..., collate_fn=list)",
            )
        samples.extend(batch)
    if not samples:
        raise _empty("an empty list")
    sizes = None
    if lengths is not None:
        found = [lengths(sample) for sample in samples] if callable(lengths) else lengths
        sizes = _counted(found, len(samples))
    return Collated(samples, collate, sizes)


def _empty(got: str) -> BatchError:
    return BatchError(
        "batch-empty",
        "The batch holds no samples.",
        got=got,
        expected="at least one sample",
        do="leave out empty batches",
    )


def _lengths_of(
    batches: Sequence[Any], counts: Sequence[int], lengths: Iterable[Any] | Callable[[Any], Any]
) -> tuple[int, ...]:
    if not callable(lengths):
        return _counted(lengths, sum(counts))
    parts = [_counted(lengths(batch), n) for batch, n in zip(batches, counts, strict=True)]
    return tuple(size for part in parts for size in part)


def _counted(lengths: Iterable[Any], count: int) -> tuple[int, ...]:
    sizes = checked_lengths(lengths, kind=BatchError, slug="batch-lengths")
    if len(sizes) != count:
        raise BatchError(
            "batch-lengths",
            "There must be one length for each sample of the batch.",
            got=f"{len(sizes)} lengths for {count} samples",
            expected=f"{count} lengths",
            do='lengths=lambda batch: batch["attention_mask"].sum(1)',
        )
    return sizes


def _by_batch(sizes: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    ends = [sum(counts[: position + 1]) for position in range(len(counts))]
    return [sizes[end - n : end] for end, n in zip(ends, counts, strict=True)]


def _check_trim(trim: object) -> None:
    if not (trim is None or trim == "right" or trim == "left" or callable(trim)):
        raise BatchError(
            "batch-trim",
            "`trim` says where the padding of a batch is, and this is no such place.",
            got=f"trim={trim!r}",
            expected="'right', 'left', a function (micro_batch, width) -> micro_batch, or None",
            do="trim='right' where samples are followed by padding",
        )


def _refuse_samples(batch: object) -> None:
    if not isinstance(batch, list):
        return
    mappings = all(isinstance(item, Mapping) for item in batch)
    tuples = all(isinstance(item, tuple | list) for item in batch)
    tensors = all(isinstance(item, Tensor) for item in batch)
    alike = tensors and len(batch) > 2 and len({(t.shape, t.dtype) for t in batch}) == 1
    if not (mappings or (tuples and len({len(item) for item in batch}) == 1) or alike):
        return
    # Samples of equal size would otherwise each be cut in the middle, without a word.
    if holds_tensors(batch):
        raise BatchError(
            "batch-samples",
            "The batch is a list of things that are all alike, which is how single samples come.",
            got=f"a list of {len(batch)} {type(batch[0]).__name__} objects",
            expected="containers of tensors that hold all samples along dimension 0",
            do="for single samples pass collate=, such as torch.utils.data.default_collate; "
            "for several views of a batch pass a tuple",
        )
