"""Ways to give the same batches to an accumulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum as ga
from cases import Case, micro_batches, whole_batches
from models import WIDTH

JUNK = -7.0

Way = Callable[[ga.Accumulator, nn.Module, Case], Iterator[ga.Update]]
WAYS: dict[str, tuple[Way, dict[str, Any]]] = {}


def way(name: str, **options: Any) -> Callable[[Way], Way]:
    """Register a way to give the batches to an accumulator that was made with `options`."""

    def register(function: Way) -> Way:
        WAYS[name] = (function, options)
        return function

    return register


def stream(
    acc: ga.Accumulator, model: nn.Module, case: Case, micros: Any, **options: Any
) -> Iterator[ga.Update]:
    for micro in acc.microbatches(micros, **options):
        micro.backward(*case.loss(model, micro.batch))
        if micro.update:
            yield micro.update


@way("even", every=4)
def even(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    yield from stream(acc, model, case, micro_batches(2, 2, 2, 2))


@way("largest first", every=4)
@way("clipped", every=4, clip_norm=0.75)
@way("kept apart", every=4, on_stale="zero")
def largest_first(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    yield from stream(acc, model, case, micro_batches(4, 2, 1, 1))


@way("smallest first", every=4)
def smallest_first(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    yield from stream(acc, model, case, micro_batches(1, 1, 2, 4))


@way("tails", every=8)
def tails(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for batch in whole_batches():
        yield from stream(acc, model, case, iter(batch.split([2, 4, 1, 1])))


@way("even tails", every=8)
def even_tails(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for batch in whole_batches():
        yield from stream(acc, model, case, iter(batch.split(2)))


@way("step", every=4)
def step(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for batch in whole_batches():
        yield acc.step(batch, case.loss)


@way("counts known ahead", every=4)
def counts_ahead(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    yield from stream(acc, model, case, micro_batches(4, 2, 1, 1), counts=len)


@way("means", every=4)
def means(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for micro in acc.microbatches(micro_batches(1, 4, 2, 1)):
        total, count = case.loss(model, micro.batch)
        micro.backward(total / count, count, reduction="mean")
        if micro.update:
            yield micro.update


@way("two terms", every=4)
def two_terms(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for micro in acc.microbatches(micro_batches(1, 1, 2, 4)):
        total, count = case.loss(model, micro.batch)
        # half of the mean each, over denominators that differ
        micro.backward({"a": (total / 2, count), "b": (total, 2 * count)})
        if micro.update:
            yield micro.update


@way("two terms, counts known ahead", every=4)
def two_terms_ahead(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    def counts(batch: Tensor) -> dict[str, int]:
        return {"a": len(batch), "b": 2 * len(batch)}

    for micro in acc.microbatches(micro_batches(1, 1, 2, 4), counts=counts):
        total, count = case.loss(model, micro.batch)
        micro.backward({"a": (total / 2, count), "b": (total, 2 * count)})
        if micro.update:
            yield micro.update


@way("one skipped", every=4)
def one_skipped(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    micros: list[Tensor] = []
    for i, batch in enumerate(whole_batches()):
        parts = list(batch.split([4, 2, 2]))
        parts.insert([0, 2, 3][i], torch.full((1, WIDTH), JUNK))  # the first, one within, the last
        micros += parts
    for micro in acc.microbatches(micros):
        if micro.batch[0, 0] == JUNK:
            micro.skip()
        else:
            micro.backward(*case.loss(model, micro.batch))
        if micro.update:
            yield micro.update


@way("flushed", every=64)
def flushed(acc: ga.Accumulator, model: nn.Module, case: Case) -> Iterator[ga.Update]:
    for i, micro in enumerate(acc.microbatches(micro_batches(2, 4, 1, 1))):
        micro.backward(*case.loss(model, micro.batch))
        if i % 4 == 3 and not micro.last:
            update = acc.flush()
            assert update is not None
            yield update
        if micro.update:
            yield micro.update
