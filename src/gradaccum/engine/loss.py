"""Reads the losses and counts that a user hands over, before anything changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import NamedTuple, TypeAlias

from torch import Tensor

from gradaccum.errors import InputError, shown

__all__ = [
    "Count",
    "Loss",
    "Number",
    "Part",
    "is_one",
    "is_zero",
    "read_count",
    "read_parts",
    "read_result",
]

Number: TypeAlias = int | float
Count: TypeAlias = int | float | Tensor
Loss: TypeAlias = Tensor | Mapping[str, tuple[Tensor, Count]]


class Part(NamedTuple):
    """One term's share of one micro-batch."""

    name: str
    """Name of the term; empty for a loss of one term."""

    loss: Tensor
    """Sum of the loss terms, or their mean; shape `()`, with a graph."""

    count: Count
    """Loss terms in `loss`: a number, or a tensor of shape `()` that lives on a device."""

    mean: bool
    """Whether `loss` is the mean of its terms."""


def read_parts(
    loss: Loss, count: Count | None, reduction: str, where: Callable[[], str]
) -> list[Part]:
    """Check the arguments of `backward` and return them in one form.

    Args:
        loss: a scalar, or `{name: (loss, count)}`.
        count: loss terms in a scalar `loss`.
        reduction: `"sum"` or `"mean"`: what the losses are of their terms.
        where: says which micro-batch it is, for messages.
    """
    if reduction != "sum" and reduction != "mean":
        raise InputError(
            "reduction",
            f"{where()}: `reduction` must be 'sum' or 'mean'.",
            got=f"reduction={reduction!r:.60}",
            expected="what the loss is of its terms",
            do="return a sum from your loss and pass it with its count",
        )
    mean = reduction == "mean"
    if isinstance(loss, Tensor):
        if count is None:
            raise _no_count(where(), mean)
        if loss.ndim or not loss.requires_grad or loss.is_complex():
            _check_loss(loss, where())
        if type(count) is not int or not 0 <= count <= sys.float_info.max:
            count = read_count(count, where())
        return [Part("", loss, count, mean)]
    if isinstance(loss, Mapping):
        return _read_terms(loss, count, mean, where())
    raise InputError(
        "loss-without-graph",
        f"{where()}: the loss is not a tensor.",
        got=shown(loss),
        expected="a tensor of shape () that `backward` can differentiate",
        do="pass the loss itself, without `.item()` or `float()`",
    )


def read_result(result: object, where: str) -> tuple[Loss, Count | None]:
    """Check what a `loss_fn` returned: `(loss_sum, count)`, or a dict of such pairs."""
    if isinstance(result, Mapping):
        return result, None
    if isinstance(result, tuple) and len(result) == 2:
        return result
    if isinstance(result, Tensor):
        raise _no_count(where, mean=False)
    raise InputError(
        "loss-fn-result",
        f"{where}: `loss_fn` did not return a loss and its count.",
        got=shown(result),
        expected="(loss_sum, count), or {'name': (loss_sum, count), ...}",
        do="return per_token_loss[mask].sum(), mask.sum()",
    )


def read_count(count: object, where: str) -> Count:
    """Return a count as a plain number where the host holds it, else as its tensor.

    A tensor on the CPU is read straight from its memory, which waits for no device. What lives on
    a device stays there unread; such a count is taken on trust.
    """
    if isinstance(count, Tensor):
        if count.ndim != 0 or count.requires_grad or count.is_complex():
            raise _bad_count(
                f"Tensor{tuple(count.shape)}, {count.dtype}, requires_grad={count.requires_grad}",
                where,
            )
        if count.device.type != "cpu":
            return count
        count = count.tolist()
    if isinstance(count, bool) or not isinstance(count, Real):
        raise _bad_count(shown(count), where)
    number = count if type(count) is int or type(count) is float else _plain(count)
    if not 0 <= number <= sys.float_info.max:  # NaN is in no interval
        raise _bad_count(repr(number), where)
    return number


def _plain(count: Real) -> Number:
    # numpy's integers and floats register as Real without being int or float
    return int(count) if isinstance(count, Integral) else float(count)


def _read_terms(
    terms: Mapping[str, tuple[Tensor, Count]], count: Count | None, mean: bool, where: str
) -> list[Part]:
    if not terms or count is not None:
        raise InputError(
            "loss-terms",
            f"{where}: several terms carry each their own count.",
            got=f"{len(terms)} terms, count={count!r}",
            expected="{'name': (loss_sum, count), ...} with at least one term, and no other count",
            do='micro.backward({"ce": (ce_sum, tokens), "aux": (aux_sum, layers)})',
        )
    parts = []
    for name, pair in terms.items():
        label = f"{where}, term {name!r}"
        if not isinstance(name, str) or not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(
                "loss-terms",
                f"{label}: a term is a pair of a loss and its count under a name.",
                got=shown(pair),
                expected="(loss_sum, count)",
                do='micro.backward({"ce": (ce_sum, tokens), "aux": (aux_sum, layers)})',
            )
        _check_loss(pair[0], label)
        parts.append(Part(name, pair[0], read_count(pair[1], label), mean))
    return parts


def _check_loss(loss: Tensor, where: str) -> None:
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise InputError(
            "loss-without-graph",
            f"{where}: the loss has no graph, so it has no gradient.",
            got=_describe(loss),
            expected="a tensor that depends on a parameter",
            do="look for `.item()`, `.detach()`, `torch.no_grad()` or `inference_mode` between "
            "the parameters and the loss, or for frozen parameters",
        )
    if loss.ndim != 0:
        raise InputError(
            "loss-not-scalar",
            f"{where}: the loss has shape {tuple(loss.shape)}, but it must be a scalar.",
            got=_describe(loss),
            expected="shape ()",
            do="per_token_loss[mask].sum(), with mask.sum() as the count",
        )
    if loss.is_complex():
        raise InputError(
            "loss-not-scalar",
            f"{where}: the loss is complex, so it has no smallest value.",
            got=_describe(loss),
            expected="a real scalar",
            do="take `.abs()` or `.real` of what you minimise",
        )


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return shown(value)
    dtype = str(value.dtype).removeprefix("torch.")
    return f"Tensor{tuple(value.shape)}, {dtype}, requires_grad={value.requires_grad}"


def _no_count(where: str, mean: bool) -> InputError:
    kind = "mean" if mean else "sum"
    return InputError(
        "loss-without-count",
        f"{where}: the loss comes without the count of its terms, so the window could only take a "
        "mean of means, which is wrong as soon as micro-batches differ.",
        got=f"a {kind}, count=None",
        expected="the number of loss terms (tokens, pixels, samples) in it",
        do='micro.backward(loss, (labels != -100).sum(), reduction="mean")'
        if mean
        else "micro.backward(loss_sum, count), or return (loss_sum, count) from your loss_fn",
    )


def _bad_count(got: str, where: str) -> InputError:
    return InputError(
        "count",
        f"{where}: the count of loss terms cannot be used as a denominator.",
        got=got,
        expected="a finite number >= 0, or a tensor of shape () without gradient",
        do="(labels != -100).sum() for tokens, len(x) for samples",
    )


def is_one(count: Count) -> bool:
    """Whether the host knows that it is 1."""
    return not isinstance(count, Tensor) and count == 1


def is_zero(count: Count) -> bool:
    """Whether the host knows that it is 0."""
    return not isinstance(count, Tensor) and count == 0
