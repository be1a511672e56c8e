"""Random functions of torch, as functions of the sample that they are for.

Within `Keyed`, a mode of torch's own for replacing functions (nothing is patched), dropout of every
kind and plain random numbers come from `counter.py` instead of a generator.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradaccum.engine.policies.opened import RUNS_BACKWARD, opened
from gradaccum.errors import InputError

__all__ = ["Keyed", "Source"]


class Source(Protocol):
    """Where random numbers come from."""

    @property
    def active(self) -> bool:
        """Whether it is to be asked now; else torch draws as ever."""

    def keep(self, kind: str, shape: tuple[int, ...], like: Tensor, probability: float) -> Tensor:
        """A bool mask on the device of `like`, true with a probability."""

    def uniform(
        self, kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Numbers in [0, 1)."""

    def normal(
        self, kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Numbers of the standard normal distribution."""


class Keyed(TorchFunctionMode):
    """Within it, random functions take their numbers from a source."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RUNS_BACKWARD:
            with self:
                return opened(func)(*args, **kwargs)
        handler = _HANDLERS.get(func)
        own = kwargs.get("generator") is not None or kwargs.get("out") is not None
        if handler is None or own or not self.source.active:
            return func(*args, **kwargs)
        return handler(self, func, *args, **kwargs)


Handler = Callable[..., Any]


# --- dropout -----------------------------------------------------------------------------------


def _dropout(
    mode: Keyed,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not _drops(input, p, training):
        return func(input, p, training, inplace)
    return _masked(mode, "dropout", input, p, tuple(input.shape), inplace)


def _feature_dropout(
    mode: Keyed,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not _drops(input, p, training):
        return func(input, p, training, inplace)
    # `dropout1d` and `dropout3d` know unbatched inputs, `dropout2d` does not
    unbatched = {F.dropout1d: 2, F.dropout3d: 4}.get(func) == input.dim()
    whole = 1 if unbatched else 2
    shape = (*input.shape[:whole], *[1] * (input.dim() - whole))
    return _masked(mode, "feature_dropout", input, p, shape, inplace)


def _alpha_dropout(
    mode: Keyed,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if not _drops(input, p, training):
        return func(input, p, training, inplace)
    shape = tuple(input.shape)
    if func is F.feature_alpha_dropout:
        shape = (*shape[:2], *[1] * (input.dim() - 2))
    # the negative saturation of SELU, and what keeps mean and variance where they were
    alpha = 1.7580993408473766
    mask = mode.source.keep("alpha_dropout", shape, input, 1 - p)
    scale = 0.0 if p == 1 else 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    shift = mask.to(input.dtype).sub_(1).mul_(alpha * scale).add_(alpha * scale * p)
    if inplace:
        return input.mul_(mask).mul_(scale).add_(shift)
    return (input * mask * scale).add_(shift)


def _plain(base: Handler, in_place: bool) -> Handler:
    """The handler of `torch.dropout(input, p, train)` and its kin."""

    def handle(mode: Keyed, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        if not _drops(input, p, train):
            return func(input, p, train)
        return base(mode, _OF_BUILTIN.get(func, func), input, p, train, in_place)

    return handle


def _native_dropout(
    mode: Keyed, func: Any, input: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False or not _drops(input, p, training=True):
        return func(input, p, train)
    mask = mode.source.keep("dropout", tuple(input.shape), input, 1 - p)
    return input * mask * _inverse(1 - p), mask


def _drops(input: Tensor, p: float, training: bool) -> bool:
    # what is not a probability is torch's to refuse
    return training and 0 < p <= 1 and input.numel() > 0


def _masked(
    mode: Keyed, kind: str, input: Tensor, p: float, shape: tuple[int, ...], inplace: bool
) -> Tensor:
    mask = mode.source.keep(kind, shape, input, 1 - p)
    if inplace:
        return input.mul_(mask).mul_(_inverse(1 - p))
    return input * mask * _inverse(1 - p)  # autograd saves the mask alone, a byte an element


def _inverse(kept: float) -> float:
    return 1 / kept if kept else 0.0


# --- attention and recurrent layers --------------------------------------------------------------


def _attention(
    mode: Keyed,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not dropout_p > 0:
        return func(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # Fused kernels draw their masks inside; this is torch's own plain definition.
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    weights = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        allowed = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
        weights = weights.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        bias = attn_mask.dtype != torch.bool
        weights = weights + attn_mask if bias else weights.masked_fill(~attn_mask, -math.inf)
    weights = torch.softmax(weights, -1)
    if attn_mask is not None:
        # a row in which everything is masked is NaN here, and zero in torch's
        weights = weights.masked_fill(weights.isnan().all(-1, keepdim=True), 0.0)
    shape = tuple(weights.shape)
    return _masked(mode, "attention", weights, dropout_p, shape, inplace=False) @ value


def _multi_head(mode: Keyed, func: Any, *args: Any, **kwargs: Any) -> Any:
    given = _MULTI_HEAD.bind(*args, **kwargs)
    given.apply_defaults()
    if not (given.arguments["training"] and given.arguments["dropout_p"] > 0):
        return func(*args, **kwargs)
    with mode:
        return opened(func)(*args, **kwargs)


def _recurrent(mode: Keyed, func: Any, *args: Any) -> Any:
    """Layer by layer, with the dropout between them keyed."""
    packed = isinstance(args[3], list | tuple)
    *_, layers, p, train, bidirectional = args[: 8 + packed]
    if layers == 1 or not train or not p > 0:
        return func(*args)
    if packed:
        raise InputError(
            "dropout-layout",
            "Dropout between the layers of a recurrent module cannot be keyed by sample on a "
            "PackedSequence, which keeps its samples in an order of its own.",
            got=f"{func.__name__} of {layers} layers with dropout={p} on a packed sequence",
            expected="a padded tensor, or layers with nn.Dropout between them",
            do="pass the padded tensor; or one layer at a time with nn.Dropout in between",
        )
    out, state, weights, bias, *_, batch_first = args
    several = isinstance(state, list | tuple)
    states = list(state) if several else [state]
    each, ways = len(weights) // layers, 2 if bidirectional else 1
    ends: list[list[Tensor]] = [[] for _ in states]
    for layer in range(layers):
        own = [s[layer * ways : (layer + 1) * ways] for s in states]
        mine = weights[layer * each : (layer + 1) * each]
        begin = own if several else own[0]
        out, *last = func(out, begin, mine, bias, 1, 0.0, train, bidirectional, batch_first)
        for found, end in zip(ends, last, strict=True):
            found.append(end)
        if layer + 1 < layers:
            out = _masked(mode, "recurrent", out, p, tuple(out.shape), inplace=False)
    return (out, *(torch.cat(found) for found in ends))


# --- plain random numbers ------------------------------------------------------------------------


def _bernoulli_(
    mode: Keyed, func: Any, input: Tensor, p: Any = 0.5, generator: Any = None
) -> Tensor:
    if not isinstance(p, Tensor):
        return input.copy_(mode.source.keep("bernoulli", tuple(input.shape), input, float(p)))
    return input.copy_(_number(mode, "uniform", input.shape, input.device, p.dtype) < p)


def _bernoulli(
    mode: Keyed, func: Any, input: Tensor, p: Any = None, generator: Any = None
) -> Tensor:
    if p is None:
        drawn = _number(mode, "uniform", input.shape, input.device, input.dtype) < input
    else:
        drawn = mode.source.keep("bernoulli", tuple(input.shape), input, float(p))
    return drawn.to(input.dtype)


def _like(which: str) -> Handler:
    def handle(mode: Keyed, func: Any, input: Tensor, **kwargs: Any) -> Tensor:
        dtype, device = kwargs.get("dtype") or input.dtype, kwargs.get("device") or input.device
        drawn = _number(mode, which, input.shape, torch.device(device), dtype)
        return drawn.requires_grad_(bool(kwargs.get("requires_grad", False)))

    return handle


def _of_size(which: str) -> Handler:
    def handle(mode: Keyed, func: Any, *size: Any, **kwargs: Any) -> Tensor:
        given = kwargs.get("size", size[0] if len(size) == 1 else size)
        shape = tuple(given) if isinstance(given, list | tuple | torch.Size) else (given,)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        drawn = _number(mode, which, shape, device, dtype)
        return drawn.requires_grad_(bool(kwargs.get("requires_grad", False)))

    return handle


def _uniform_(mode: Keyed, func: Any, input: Tensor, *ends: float, **kwargs: Any) -> Tensor:
    low, high = (*ends, *(0.0, 1.0)[len(ends) :])
    low, high = kwargs.get("from", low), kwargs.get("to", high)
    drawn = _number(mode, "uniform", input.shape, input.device, input.dtype)
    return input.copy_(drawn.mul_(high - low).add_(low))


def _normal_(mode: Keyed, func: Any, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    drawn = _number(mode, "normal", input.shape, input.device, input.dtype)
    return input.copy_(drawn.mul_(std).add_(mean))


def _number(
    mode: Keyed, which: str, shape: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    draw = mode.source.uniform if which == "uniform" else mode.source.normal
    return draw(which, tuple(shape), device, dtype)


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
_OF_BUILTIN = {torch.feature_alpha_dropout: F.feature_alpha_dropout}
_OF_BUILTIN |= {torch.feature_alpha_dropout_: F.feature_alpha_dropout}
_HANDLERS: dict[Any, Handler] = {
    F.dropout: _dropout,
    F.dropout1d: _feature_dropout,
    F.dropout2d: _feature_dropout,
    F.dropout3d: _feature_dropout,
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: _alpha_dropout,
    torch.dropout: _plain(_dropout, False),
    torch.dropout_: _plain(_dropout, True),
    torch.feature_dropout: _plain(_feature_dropout, False),
    torch.feature_dropout_: _plain(_feature_dropout, True),
    torch.alpha_dropout: _plain(_alpha_dropout, False),
    torch.alpha_dropout_: _plain(_alpha_dropout, True),
    torch.feature_alpha_dropout: _plain(_alpha_dropout, False),
    torch.feature_alpha_dropout_: _plain(_alpha_dropout, True),
    torch.native_dropout: _native_dropout,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.Tensor.bernoulli: _bernoulli,
    torch.bernoulli: _bernoulli,
    torch.rand: _of_size("uniform"),
    torch.randn: _of_size("normal"),
    torch.rand_like: _like("uniform"),
    torch.randn_like: _like("normal"),
    torch.Tensor.uniform_: _uniform_,
    torch.Tensor.normal_: _normal_,
}
