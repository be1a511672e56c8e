"""Three ways to make the same updates, and what is measured of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.demo.data import collate, length
from gradaccum.demo.measure import distance, gradients_of, peak_memory, stopwatch
from gradaccum.demo.model import loss_fn
from gradaccum.engine.accumulator import Accumulator

__all__ = ["WAYS", "Made", "Probe", "Timed", "Way", "probe", "train", "true_gradients"]

_MICROBATCH = 8
_LEARNING_RATE = 3e-3

Batch = Sequence[Tensor]


class Made(NamedTuple):
    """One update, as the run that made it saw it."""

    loss: Tensor
    """Mean over all tokens of the batch; shape `()`."""

    padded: int
    """Tokens computed, padding included."""

    microbatches: int


Step = Callable[[Batch], Made]


@dataclass(frozen=True)
class Way:
    """A way to make updates; `prepare(model, optimizer, budget)` gives the function that does."""

    name: str
    title: str
    prepare: Callable[[nn.Module, Optimizer, int], Step]


def _whole(model: nn.Module, optimizer: Optimizer, budget: int) -> Step:
    del budget

    def step(batch: Batch) -> Made:
        tokens = collate(batch)
        loss_sum, count = loss_fn(model, tokens)
        (loss_sum / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        return Made(loss_sum.detach() / count, _positions(tokens), 1)

    return step


def _usual(model: nn.Module, optimizer: Optimizer, budget: int) -> Step:
    del budget

    def step(batch: Batch) -> Made:
        micro_batches = [batch[i : i + _MICROBATCH] for i in range(0, len(batch), _MICROBATCH)]
        total_loss, total_count, padded = torch.zeros(()), torch.zeros(()), 0
        for samples in micro_batches:
            tokens = collate(samples)
            loss_sum, count = loss_fn(model, tokens)
            mean = loss_sum / count
            (mean / len(micro_batches)).backward()
            total_loss, total_count = total_loss + loss_sum.detach(), total_count + count
            padded += _positions(tokens)
        optimizer.step()
        optimizer.zero_grad()
        return Made(total_loss / total_count, padded, len(micro_batches))

    return step


def _ours(model: nn.Module, optimizer: Optimizer, budget: int) -> Step:
    acc = Accumulator(model, optimizer, every=_MICROBATCH)

    def step(batch: Batch) -> Made:
        update = acc.step(batch, loss_fn, lengths=length, budget=budget, collate=collate)
        padded = sum(map(length, batch)) + update.padding
        return Made(update.loss, padded, update.microbatches)

    return step


def _positions(tokens: Tensor) -> int:
    return tokens.shape[0] * (tokens.shape[1] - 1)


WAYS = (
    Way("whole", "whole batch", _whole),
    Way("usual", "usual loop", _usual),
    Way("ours", "gradaccum", _ours),
)


def true_gradients(start: nn.Module, batch: Batch) -> list[Tensor]:
    """Gradients of the undivided batch in float64, on the CPU: what every way is held against."""
    model = copy.deepcopy(start).cpu().double()
    loss_sum, count = loss_fn(model, collate(batch))
    parameters = list(model.parameters())
    return list(torch.autograd.grad(loss_sum / count, parameters))


@dataclass(frozen=True)
class Probe:
    """What is measured once, in an update that is not timed."""

    peak_bytes: int
    distance: float


def probe(way: Way, start: nn.Module, batch: Batch, budget: int, truth: Sequence[Tensor]) -> Probe:
    """Peak memory of one update from `start`, and how far its gradient is from `truth`."""
    model = copy.deepcopy(start)
    # Adam would blow the rounding of a gradient near zero up to a whole learning rate; a step of
    # SGD is the gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    step = way.prepare(model, optimizer, budget)
    device = next(model.parameters()).device
    # The copies are made when all activations are gone again, so they do not show in the peak.
    with gradients_of(optimizer) as gradients, peak_memory(device) as peak:
        step(batch)
    return Probe(int(peak.value), distance(gradients, truth))


class Timed(NamedTuple):
    """One timed update of one way."""

    seconds: float
    loss: float
    made: Made


def train(start: nn.Module, batches: Sequence[Batch], budget: int) -> Iterator[tuple[Timed, ...]]:
    """Train a copy of `start` in every way on the same batches, and yield update by update.

    The ways take turns within each update, in an order that rotates, so that what else the
    machine does hits all of them alike. What is yielded is in the order of `WAYS`.
    """
    for step in _steps(start, budget):
        step(batches[0][:2])  # on copies that are thrown away: torch loads parts of itself late
    steps = _steps(start, budget)
    device = next(start.parameters()).device
    for number, batch in enumerate(batches):
        timed: dict[int, Timed] = {}
        for turn in range(len(steps)):
            way = (number + turn) % len(steps)
            with stopwatch(device) as watch:
                made = steps[way](batch)
            timed[way] = Timed(watch.value, float(made.loss), made)
        yield tuple(timed[way] for way in range(len(steps)))


def _steps(start: nn.Module, budget: int) -> list[Step]:
    steps: list[Step] = []
    for way in WAYS:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        steps.append(way.prepare(model, optimizer, budget))
    return steps
