"""Batches of 64 functions of Python's standard library, cut at 1,024 and at 512 tokens.

The usual hand-written loop, Accelerate, Lightning Fabric, transformers' two samplers for ragged
lengths and gradaccum, each with its own copy of the model, taking turns update by update in one
process, so that whatever else the machine does falls on all alike.

    python benchmarks/ragged.py [--out DIR] [--rounds N]
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import fmean, median, pvariance

import torch
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch import Tensor, nn
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

import gradaccum as ga
from common import Table, arguments, interleaved
from gradaccum.demo.data import Corpus, collate, length, load
from gradaccum.demo.measure import peak_memory
from gradaccum.demo.model import Decoder, DecoderConfig, loss_fn

BATCH, MICRO, EVERY, ROUNDS = 64, 8, 8, 9
BUDGET = 2048

Batch = Sequence[Tensor]
Update = Callable[[Batch], None]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The same for everyone."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def in_order(batch: Batch) -> list[Batch]:
    """Micro-batches of 8 in the order in which the samples were drawn."""
    return [batch[i : i + MICRO] for i in range(0, len(batch), MICRO)]


def rebalanced(batch: Batch) -> list[Batch]:
    """The micro-batches of `train_sampling_strategy="batch_rebalance"` for this batch."""
    lengths = [length(sample) for sample in batch]
    sampler = BatchRebalanceSampler(lengths, len(batch), dp_size=1, grad_accum=EVERY, shuffle=False)
    return [[batch[i] for i in indices] for indices in sampler]


def planned(batch: Batch) -> list[Batch]:
    """The micro-batches of our plan."""
    plan = ga.plan(map(length, batch), budget=BUDGET)
    return [[batch[i] for i in micro.indices] for micro in plan]


def mean_loss(model: nn.Module, samples: Batch) -> Tensor:
    """What a criterion returns by default: the mean over one micro-batch."""
    loss_sum, count = loss_fn(model, collate(samples))
    return loss_sum / count


def hand_written(model: nn.Module, split: Callable[[Batch], list[Batch]]) -> Update:
    """The usual loop: each micro-batch's mean, divided by how many there are."""
    optimizer = optimizer_of(model)

    def update(batch: Batch) -> None:
        micro_batches = split(batch)
        for samples in micro_batches:
            (mean_loss(model, samples) / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def accelerate(model: nn.Module) -> Update:
    """The usual loop through `accelerator.accumulate`."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=EVERY)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))

    def update(batch: Batch) -> None:
        for samples in in_order(batch):
            with accelerator.accumulate(prepared):
                accelerator.backward(mean_loss(prepared, samples))
                optimizer.step()
                optimizer.zero_grad()

    return update


def fabric(model: nn.Module) -> Update:
    """The usual loop through `fabric.no_backward_sync`."""
    fabric = Fabric(accelerator="cpu", devices=1)
    prepared, optimizer = fabric.setup(model, optimizer_of(model))

    def update(batch: Batch) -> None:
        micro_batches = in_order(batch)
        for i, samples in enumerate(micro_batches):
            accumulating = i + 1 < len(micro_batches)
            with fabric.no_backward_sync(prepared, enabled=accumulating):
                fabric.backward(mean_loss(prepared, samples) / len(micro_batches))
        optimizer.step()
        optimizer.zero_grad()

    return update


def ours(model: nn.Module) -> Update:
    """The whole batch in one call, regrouped by length."""
    acc = ga.Accumulator(model, optimizer_of(model), every=EVERY)

    def update(batch: Batch) -> None:
        acc.step(batch, loss_fn, lengths=length, budget=BUDGET, collate=collate)

    return update


def a_tenth(model: nn.Module, batch: Batch) -> int:
    """Bytes for what stays, and for a tenth of the activations that the whole batch takes."""
    fit = ga.fit(
        model, loss_fn, batch, optimizer=optimizer_of(model), lengths=length, collate=collate
    )
    stays = fit.parameters + fit.gradients + fit.optimizer
    whole = fit.memory.bytes(len(batch), max(map(length, batch)))
    return stays + (whole - stays) // 10


def ours_in(model: nn.Module, memory: int) -> Update:
    """The whole batch in one call, in so many bytes."""
    acc = ga.Accumulator(model, optimizer_of(model))

    def update(batch: Batch) -> None:
        acc.step(batch, loss_fn, lengths=length, memory=memory, collate=collate)

    return update


def in_a_tenth(start: nn.Module, batches: Sequence[Batch], cut: int, rounds: int) -> Table:
    """The same update in a tenth of the memory: time beside the usual loop, and the peak."""
    memory = a_tenth(copy.deepcopy(start), batches[0])
    ways: dict[str, Update] = {
        "usual loop": hand_written(copy.deepcopy(start), in_order),
        "gradaccum, memory=": ours_in(copy.deepcopy(start), memory),
    }
    seconds = interleaved(
        {name: fed(update, batches) for name, update in ways.items()},
        rounds=rounds,
        clock=time.perf_counter,
    )
    ways["whole batch"] = hand_written(copy.deepcopy(start), lambda batch: [batch])
    table = Table(f"In a tenth of the whole batch's activations, cut at {cut:,} tokens")
    peaks = {}
    for name, update in ways.items():
        with peak_memory(torch.device("cpu")) as peak:
            update(batches[1])
        peaks[name] = peak.value
    for name in ways:
        pairs = zip(seconds.get(name, ()), seconds["usual loop"], strict=False)
        ratios = [value / base for value, base in pairs]
        table.add(
            loop=name,
            ratio=round(median(ratios), 3) if ratios else "",
            peak_MB=round(peaks[name] / 1e6, 1),
            of_the_whole=round(peaks[name] / peaks["whole batch"], 3),
        )
    return table


def grouped_order(corpus: Corpus) -> list[int]:
    """One epoch of `train_sampling_strategy="group_by_length"`, as the Trainer asks for it."""
    lengths = [length(sample) for sample in corpus.samples]
    generator = torch.Generator().manual_seed(0)
    return list(LengthGroupedSampler(MICRO * EVERY, lengths=lengths, generator=generator))


def batches_of(order: Sequence[int], corpus: Corpus) -> list[Batch]:
    """The full batches of an epoch in this order."""
    full = len(order) // BATCH * BATCH
    return [[corpus.samples[i] for i in order[k : k + BATCH]] for k in range(0, full, BATCH)]


def spread(batches: Sequence[Batch], number: int) -> list[Batch]:
    """`number` batches evenly from the first 50: one sorted block of `LengthGroupedSampler`."""
    block = batches[:50]
    return [block[int((k + 0.5) * len(block) / number)] for k in range(number)]


def fed(update: Update, batches: Sequence[Batch]) -> Callable[[], None]:
    """A call without arguments that makes the next update; the first batch also warms up."""
    coming: Iterator[Batch] = chain(batches[:1], batches)
    return lambda: update(next(coming))


def waste(micro_batches: Sequence[Sequence[Batch]]) -> float:
    """Padded tokens for each real one, over all updates."""
    sizes = [[length(s) for s in samples] for update in micro_batches for samples in update]
    return sum(len(s) * max(s) for s in sizes) / sum(map(sum, sizes))


def explained(batches: Sequence[Batch]) -> float:
    """Share of the lengths' variance that lies between batches: 1/64 for uniform sampling."""
    lengths = [[length(sample) for sample in batch] for batch in batches]
    return pvariance([fmean(x) for x in lengths]) / pvariance(list(chain.from_iterable(lengths)))


def seconds_to_plan(batch: Batch) -> float:
    """Median time of one plan for this batch."""
    lengths = [length(sample) for sample in batch]
    times = []
    for _ in range(9):
        start = time.perf_counter()
        ga.plan(lengths, budget=BUDGET)
        times.append(time.perf_counter() - start)
    return median(times)


def measure(corpus: Corpus, cut: int, grouped_epoch: Sequence[Batch], rounds: int) -> Table:
    """Time every loop on functions cut at `cut` tokens."""
    torch.manual_seed(0)
    start = Decoder(DecoderConfig(len(corpus.tokenizer.words), cut))
    uniform = corpus.batches(BATCH, rounds, seed=0)
    grouped = spread(grouped_epoch, rounds)
    made: dict[str, tuple[Update, list[Batch], Callable[[Batch], list[Batch]]]] = {
        "usual loop": (hand_written(copy.deepcopy(start), in_order), uniform, in_order),
        "Accelerate": (accelerate(copy.deepcopy(start)), uniform, in_order),
        "Fabric": (fabric(copy.deepcopy(start)), uniform, in_order),
        "group_by_length": (hand_written(copy.deepcopy(start), in_order), grouped, in_order),
        "batch_rebalance": (hand_written(copy.deepcopy(start), rebalanced), uniform, rebalanced),
        "gradaccum": (ours(copy.deepcopy(start)), uniform, planned),
    }
    loops = {name: fed(update, batches) for name, (update, batches, _) in made.items()}
    seconds = interleaved(loops, rounds=rounds, clock=time.perf_counter)
    base = seconds["usual loop"]
    table = Table(f"Seconds per update, {BATCH} functions cut at {cut:,} tokens, {rounds} rounds")
    for name, (_, batches, split) in made.items():
        values = seconds[name]
        micro_batches = [split(batch) for batch in batches]
        # Batches of another kind cannot be paired with the usual loop's, only their sums can.
        pairs = [v / b for v, b in zip(values, base, strict=True)]
        ratio = sum(values) / sum(base) if batches is grouped else median(pairs)
        table.add(
            loop=name,
            median_s=round(median(values), 3),
            mean_s=round(fmean(values), 3),
            ratio=round(ratio, 3),
            padded_of_real=round(waste(micro_batches), 3),
            microbatches=round(fmean(map(len, micro_batches)), 1),
            uniform_batches="no" if batches is grouped else "yes",
        )
    planning = median(map(seconds_to_plan, uniform))
    share = planning / median(seconds["gradaccum"])
    table.add(loop="our plan alone", median_s=round(planning, 6), share_of_ours=round(share, 5))
    return table


def sampling(corpus: Corpus, cut: int, grouped_epoch: Sequence[Batch]) -> Table:
    """What each way of sampling makes of the batches of an epoch."""
    table = Table(f"What the sampling does, one epoch cut at {cut:,} tokens")
    uniform = corpus.batches(BATCH, len(grouped_epoch), seed=0)
    for name, batches in (("uniform", uniform), ("group_by_length", grouped_epoch)):
        means = [fmean(map(length, batch)) for batch in batches]
        table.add(
            sampling=name,
            shortest_mean_length=round(min(means)),
            longest_mean_length=round(max(means)),
            variance_between_batches=round(explained(batches), 3),
        )
    return table


READING = f"""
ratio: to the usual loop, median of the rounds' own ratios; for group_by_length of the means, over
batches spread evenly over one of its sorted blocks of {50 * BATCH:,} samples.
group_by_length is no longer uniform sampling: each of its updates sees functions of one size only
(in uniform batches 1/{BATCH} = {1 / BATCH:.3f} of the variance lies between batches).
batch_rebalance and gradaccum regroup the samples of the batch that was drawn; the mean of the
means of batch_rebalance's unequal micro-batches is not the mean over the batch's tokens."""


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__)
    for cut in (1024, 512):
        corpus = load(cut)
        grouped_epoch = batches_of(grouped_order(corpus), corpus)
        timed = measure(corpus, cut, grouped_epoch, options.rounds or ROUNDS)
        timed.show(options.out, f"ragged-{cut}")
        torch.manual_seed(0)
        start = Decoder(DecoderConfig(len(corpus.tokenizer.words), cut))
        rounds = options.rounds or ROUNDS
        batches = corpus.batches(BATCH, rounds, seed=0)
        in_a_tenth(start, batches, cut, rounds).show(options.out, f"ragged-{cut}-memory")
        sampling(corpus, cut, grouped_epoch).show(options.out, f"ragged-{cut}-sampling")
    print(READING)


if __name__ == "__main__":
    main()
