"""Where the padding of a batch is: what may be cut away without changing a number.

A tensor whose second dimension is as wide as the batch is padded is cut only on evidence: beyond
every sample's length, on the side that is to be cut, it holds one constant, and on the other side
it does not. Where no tensor shows that, nothing is cut: the numbers stay right and some padding
stays with them. Tensors whose rows are all alike (position ids) are cut along with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradaccum.errors import BatchError

__all__ = ["Padding", "Side", "find_padding", "read_flags"]

Side: TypeAlias = Literal["right", "left"]
Width: TypeAlias = tuple[int, ...]

# Elements looked at in one step on the CPU: torch would spread more over its threads, and waking
# them costs more than the work.
_BLOCK = 32_000
_OWN_TRIM = "pass trim=function(micro_batch, width) to cut it yourself, or trim=None to cut nothing"


@dataclass(frozen=True, slots=True)
class Padding:
    """Which leaves are padded, and how wide they are."""

    paths: frozenset[str]
    """Leaves that are cut with their samples."""

    widths: Width
    """Padded width of each batch of the window, in elements."""

    fill: Mapping[str, Any]
    """By path, what stands in the padding: one value, of shape `()` or that of one position.
    Leaves whose rows are all alike are absent."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A leaf in one batch of the window, and the samples' lengths there."""

    values: Any
    lengths: Sequence[int]
    own: dict[tuple[Side, int, int, str], Any]
    """Which elements are a sample's own, found once for all leaves of the batch."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What the tensors of one width show."""

    widths: Width
    failed: tuple[str, ...]
    confirmed: bool
    fill: Mapping[str, Any]
    paths: tuple[str, ...]


def find_padding(
    leaves: Mapping[str, Sequence[Any]], lengths: Sequence[Sequence[int]], side: Side
) -> Padding | None:
    """The padded leaves of a window of batches, or None where nothing may be cut.

    Args:
        leaves: by path, the tensors (or arrays) of the window's batches, `(samples, width, ...)`.
        lengths: of each batch's samples, in elements.
        side: where the padding is to be cut.

    Raises:
        BatchError: if a sample is longer than every tensor is wide, if what would be cut is not
            padding, or if tensors of several widths could be meant.
    """
    longest = [max(part) for part in lengths]
    groups: dict[Width, dict[str, list[_Part]]] = {}
    owns: dict[Width, list[dict[tuple[Side, int, int, str], Any]]] = {}
    for path, tensors in leaves.items():
        widths = tuple(tensor.shape[1] for tensor in tensors)
        if all(width >= least for width, least in zip(widths, longest, strict=True)):
            caches = owns.setdefault(widths, [{} for _ in widths])
            parts = [_Part(*part) for part in zip(tensors, lengths, caches, strict=True)]
            groups.setdefault(widths, {})[path] = parts
    if not groups:
        raise _too_long(leaves, longest)
    if tuple(longest) in groups and all(len(set(part)) == 1 for part in lengths):
        return _dense(tuple(longest), groups)
    verdicts = [_judge(widths, group, side) for widths, group in groups.items()]
    proven = [verdict for verdict in verdicts if verdict.confirmed and not verdict.failed]
    if len(proven) == 1:
        return Padding(frozenset(proven[0].paths), proven[0].widths, proven[0].fill)
    if proven:
        raise _several(proven, longest)
    if all(verdict.failed for verdict in verdicts):
        raise _not_padding(verdicts[0], side)
    return None


def read_flags(flags: Iterable[Any]) -> list[bool]:
    """Tensors of shape `()` and plain booleans as booleans, with one read for each device."""
    found = list(flags)
    by_device: dict[torch.device, list[int]] = {}
    for position, flag in enumerate(found):
        if isinstance(flag, Tensor):
            by_device.setdefault(flag.device, []).append(position)
    for positions in by_device.values():
        # `tolist` of a vector copies it once; `item` and `bool` would read one number at a time.
        values = torch.stack([found[position] for position in positions]).tolist()
        for position, value in zip(positions, values, strict=True):
            found[position] = value
    return [bool(flag) for flag in found]


def _dense(widths: Width, groups: Mapping[Width, Mapping[str, list[_Part]]]) -> Padding | None:
    # No sample is shorter than its batch is wide: within a batch there is nothing to cut.
    if len(set(widths)) == 1:
        return None
    return Padding(frozenset(groups[widths]), widths, {})


def _judge(widths: Width, group: Mapping[str, list[_Part]], side: Side) -> _Verdict:
    other: Side = "left" if side == "right" else "right"
    here = {path: _constant(parts, side) for path, parts in group.items()}
    flags = read_flags(flag for flag, _ in here.values())
    fill = {path: here[path][1] for path, filled in zip(group, flags, strict=True) if filled}
    doubtful = [path for path in group if path not in fill]
    alike = read_flags(_alike(group[path]) for path in doubtful)
    # One at a time: the first tensor with padding on the one side and not on the other is enough.
    confirmed = any(not read_flags([_constant(group[path], other)[0]])[0] for path in fill)
    if not confirmed:
        confirmed = any(read_flags(_is_mask(group[path], fill[path]) for path in fill))
    return _Verdict(
        widths,
        failed=tuple(path for path, same in zip(doubtful, alike, strict=True) if not same),
        confirmed=confirmed,
        fill=fill,
        paths=tuple(group),
    )


def _constant(parts: Sequence[_Part], side: Side) -> tuple[Any, Any]:
    """Whether the padding of all parts holds one value (a flag, unread), and that value."""
    value, flag = None, True
    for part in parts:
        width, shortest = part.values.shape[1], min(part.lengths)
        if shortest == width:
            continue
        values = _detached(part.values)
        own = values[part.lengths.index(shortest), width - 1 if side == "right" else 0]
        flag = flag & (True if value is None else _equal(own, value).all())
        value = own if value is None else value
        beyond = values[:, shortest:] if side == "right" else values[:, : width - shortest]
        flag = flag & _everywhere(beyond, partial(_padded_with, part, beyond, own, side))
    return flag, value


def _padded_with(part: _Part, beyond: Any, fill: Any, side: Side, rows: slice) -> Any:
    """Of columns that some sample has as padding: where `fill` is, or a sample's own elements."""
    device = str(beyond.device) if isinstance(beyond, Tensor) else "numpy"
    key = (side, rows.start, rows.stop, device)
    if key not in part.own:
        part.own[key] = _own(part, beyond, side, rows)
    own = part.own[key]
    return _equal(beyond[rows], fill) | own.reshape(own.shape + (1,) * (len(beyond.shape) - 2))


def _own(part: _Part, beyond: Any, side: Side, rows: slice) -> Any:
    on_device = isinstance(beyond, Tensor)
    device = beyond.device if on_device else torch.device("cpu")
    lengths = torch.tensor(part.lengths[rows], device="cpu")[:, None].to(device, non_blocking=True)
    column = torch.arange(beyond.shape[1], device=device)
    if side == "right":
        own = column < lengths - min(part.lengths)
    else:
        own = column >= part.values.shape[1] - lengths
    return own if on_device else own.numpy()


def _everywhere(values: Any, test: Callable[[slice], Any]) -> Any:
    """Whether `test` holds for all rows: a flag, unread where reading would wait for a device."""
    n, on_host = len(values), not (isinstance(values, Tensor) and values.device.type != "cpu")
    step = max(1, _BLOCK // max(1, math.prod(values.shape[1:]))) if on_host else n
    flag = True
    for start in range(0, n, step):
        flag = flag & test(slice(start, start + step)).all()
        if on_host and not read_flags([flag])[0]:
            return False
    return flag


def _alike(parts: Sequence[_Part]) -> Any:
    """Whether the rows are the same whatever their samples are: position ids, tables."""
    flag = True
    for part in parts:
        values = _detached(part.values)
        flag = flag & _everywhere(values, partial(_same_as_first, values))
        # Samples of one length, or only one sample, say nothing: then it has to count upwards.
        if len(set(part.lengths)) == 1:
            if not _is_whole(values):
                return False
            steps = values[:1, 1:] - values[:1, :-1]
            flag = flag & (steps == steps[:, :1]).all()
    return flag


def _same_as_first(values: Any, rows: slice) -> Any:
    return _equal(values[rows], values[:1])


def _is_whole(values: Any) -> bool:
    if isinstance(values, Tensor):
        kind = values.dtype
        return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    return values.dtype.kind in "iu"


def _is_mask(parts: Sequence[_Part], fill: Any) -> Any:
    """Whether this is an attention mask: ones for the elements, zeros for the padding."""
    flag = fill is not None
    for part in parts:
        values = _detached(part.values)
        if len(values.shape) != 2 or fill is None:
            return False
        ones = (values == 1).sum(1)
        zeros = (values == 0).sum(1)
        lengths = torch.tensor(part.lengths, device="cpu")
        known = lengths.to(values.device) if isinstance(values, Tensor) else lengths.numpy()
        counted = (ones == known).all() & (zeros == values.shape[1] - known).all()
        flag = flag & counted & (fill == 0)
    return flag


def _equal(left: Any, right: Any) -> Any:
    same = left == right
    if isinstance(left, Tensor):
        floating = left.is_floating_point() or left.is_complex()
    else:
        floating = left.dtype.kind in "fc"
    # Padding may be NaN, which is not equal to itself.
    return same | ((left != left) & (right != right)) if floating else same


def _detached(values: Any) -> Any:
    return values.detach() if isinstance(values, Tensor) else values


def _too_long(leaves: Mapping[str, Sequence[Any]], longest: Sequence[int]) -> BatchError:
    shapes = ", ".join(f"{path} {tuple(tensors[0].shape)}" for path, tensors in leaves.items())
    return BatchError(
        "batch-lengths",
        "A sample is longer than any tensor of the batch is wide.",
        got=f"length {max(longest)}, and {shapes or 'no tensor of two dimensions'}",
        expected="tensors of shape (samples, width, ...) with every length <= width",
        do=f"check `lengths`; if they do not count columns, {_OWN_TRIM}",
    )


def _several(verdicts: Sequence[_Verdict], longest: Sequence[int]) -> BatchError:
    shown = "; ".join(f"width {max(v.widths)}: {', '.join(v.paths)}" for v in verdicts)
    return BatchError(
        "batch-widths",
        "Tensors of several widths look padded, and one `lengths` cannot fit them all.",
        got=f"{shown}; the longest sample has {max(longest)}",
        expected="one padded width for all tensors that are padded",
        do=_OWN_TRIM,
    )


def _not_padding(verdict: _Verdict, side: Side) -> BatchError:
    other = "left" if side == "right" else "right"
    return BatchError(
        "batch-not-padding",
        f"What trim={side!r} would cut away is not padding.",
        got=f"different values beyond the samples' lengths in {', '.join(verdict.failed)}",
        expected=f"one constant on the {side} of every sample, from its length to the width",
        do=f"trim={other!r} if the batch is padded on the {other}; mend `lengths` if they count "
        f"something else than elements up to the padding; or, if the tensor only happens to be "
        f"{max(verdict.widths)} wide, {_OWN_TRIM}",
    )
