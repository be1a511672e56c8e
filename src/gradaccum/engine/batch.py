"""Runs one batch as one window, whatever its size: every micro-batch is a transaction.

A micro-batch that runs out of memory leaves no trace: gradients, counts, random states and buffers
are what they were, and its samples are run in smaller micro-batches. Where taking it back is not
possible to the bit, the window is begun again with the sizes that are known by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.engine.core import Core, Rejected
from gradaccum.engine.finite import all_finite, loss_flag, source_of
from gradaccum.engine.grouping import Group, Work
from gradaccum.engine.loss import Part, read_parts, read_result
from gradaccum.engine.memory.move import ahead
from gradaccum.engine.memory.probe import probe
from gradaccum.engine.memory.resident import state_tensors
from gradaccum.engine.memory.shortage import asked_bytes, first_line, is_shortage, let_go
from gradaccum.engine.memory.sizes import Needs, Sizes, bucket_of
from gradaccum.engine.memory.transaction import Snapshot, Snapshots
from gradaccum.engine.memory.untouched import untouched
from gradaccum.engine.policies.dropout import Draws, undisturbed
from gradaccum.errors import InputError, NonFiniteError, ShortageError
from gradaccum.planner.meter import Meter, meter_for
from gradaccum.planner.split import even, move
from gradaccum.records import Update
from gradaccum.records.fit import show_bytes

__all__ = ["Batches"]


class _Shortage(NamedTuple):
    """What is left of an error, once the frames that held memory are gone."""

    text: str
    asked: int | None


class Batches:
    """What an accumulator keeps from one batch to the next: sizes that fit, copies of buffers.

    Args:
        model: runs the batches.
        core: takes the micro-batches.
        isolate: whether only the bad samples of a rejected micro-batch are dropped.
    """

    def __init__(self, model: nn.Module, core: Core, isolate: bool) -> None:
        self.model = model
        self.core = core
        self.isolate = isolate
        self.sizes = Sizes()
        self.snapshots = Snapshots(model)

    @property
    def device(self) -> torch.device:
        """Where micro-batches run."""
        return next(self.model.parameters()).device

    def owned(self) -> list[Tensor]:
        """Tensors that stay between micro-batches."""
        parameters = list(self.model.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]
        state = state_tensors(self.core.optimizers)
        return [*parameters, *grads, *self.model.buffers(), *state]

    def meter(self) -> Meter | None:
        """Counts the device's bytes; `None` where nobody does."""
        try:
            return meter_for(self.device)
        except InputError:
            return None

    def run(self, work: Work, groups: Iterable[Group], draws: Draws | None) -> Update:
        """Make the update of a batch.

        Args:
            work: the batch.
            groups: which of its samples form which micro-batch, in order.
            draws: random numbers by sample, where dropout is not to depend on the split.
        """
        run = _Run(self, work, draws)
        self.core.must_arrive = True  # a whole batch that moves nothing is no batch of this model
        try:
            update = run.all([piece for group in groups for piece in run.fitting(group)])
        except BaseException:
            self.core.discard()
            run.restore_start()
            raise
        finally:
            self.core.must_arrive = False
            run.close()
        meter = self.meter() if self.sizes.decided else None
        self.sizes.rest(None if meter is None else _room(meter))
        return update


def _room(meter: Meter) -> float:
    """Bytes that tensors may take: operators need work space, which only allocators count."""
    return meter.free() / (1.5 if meter.device.type == "cpu" else 1.1)


class _Run:
    """One batch on its way through its window."""

    def __init__(self, batches: Batches, work: Work, draws: Draws | None) -> None:
        self._batches = batches
        self._core = batches.core
        self._work = work
        self._draws = draws
        self._samples = work.samples
        self._where = ""
        self._short: _Shortage | None = None
        self._start = batches.snapshots.take()
        self._coming: Iterator[Any] = iter(())

    def restore_start(self) -> None:
        """Leave random states and buffers as they were before the batch."""
        self._batches.snapshots.restore(self._start)

    def all(self, groups: list[Group]) -> Update:
        """Run all micro-batches, and others in place of those that do not fit."""
        snapshots = self._batches.snapshots
        here = self._start
        done: list[Group] = []
        todo = deque(groups)
        self._core.open(len(todo), self._work.declared)
        self._send(todo)
        while True:
            self._where = f"micro-batch {len(done) + 1} of {len(done) + len(todo)}"
            result = self._attempt(todo[0], last=len(todo) == 1)
            if isinstance(result, Rejected):
                self._restore(here)
                bad = self._bad_samples(todo[0]) if self._batches.isolate else ()
                good = [index for index in todo[0].indices if index not in bad]
                if bad and good:
                    self._without(bad)
                    todo[0] = self._group(good)
                    self._send(todo)
                    continue
                dropped = self._core.drop(len(todo) == 1, todo.popleft().indices)
                if not todo:
                    assert dropped is not None
                    return dropped
            elif isinstance(result, _Shortage):
                failed = todo.popleft()
                window = self._core.window
                assert window is not None
                # What follows must not depend on how often it was tried.
                keep = bool(done) and not window.broken and window.rescalable
                if not keep:
                    self._core.discard()
                    here = self._start
                self._restore(here)
                smaller = self._smaller(failed, result)
                rest = [piece for group in todo for piece in self.fitting(group)]
                todo = deque([*smaller, *rest] if keep else [*done, *smaller, *rest])
                if keep:
                    window.expected = len(done) + len(todo)
                else:
                    done = []
                    self._core.open(len(todo), self._work.declared)
                self._send(todo)
            elif result is not None:
                return result
            else:
                done.append(todo.popleft())
                here = snapshots.take()

    def fitting(self, group: Group) -> list[Group]:
        """The group in pieces that are known to fit."""
        wanted = len(group.indices)
        return self._pieces(group, self._batches.sizes.allowed(self._bucket(group), wanted))

    def _attempt(self, group: Group, last: bool) -> Update | _Shortage | Rejected | None:
        try:
            self._begin()
            parts = self._read(group, next(self._coming))
            with self._mode():
                return self._core.add(parts, last=last, padding=group.padding, retain_graph=False)
        except Rejected:
            return Rejected()
        except NonFiniteError as error:
            raise self._located(error, group) from None
        except Exception as error:
            if not is_shortage(error):
                if self._short is not None and len(group.indices) == 1:
                    # batch norm cannot normalise a single sample, which is what was left to try
                    raise self._too_large(group, self._short) from error
                raise
            shortage = self._short = _Shortage(first_line(error), asked_bytes(error))
            self.close()
            let_go(error)
        return shortage

    def _send(self, groups: Iterable[Group]) -> None:
        """Let the groups' batches travel to the device, each while the one before it computes."""
        self.close()
        take = self._samples.microbatch
        batches = (take(group.indices, group.width) for group in list(groups))
        self._coming = ahead(batches, self._batches.device)

    def close(self) -> None:
        """Drop what is on its way."""
        self._coming = iter(())

    def _begin(self) -> None:
        """A forward is about to run: what layers saw in the one before does not count."""
        window = self._core.window
        self._core.normalisation.start(0 if window is None else window.microbatches)

    def _mode(self) -> AbstractContextManager[object]:
        # Activation checkpointing runs parts of the forward again, inside backward.
        return nullcontext() if self._draws is None else self._draws.mode

    def _parts(self, group: Group) -> list[Part]:
        taken = self._samples.microbatch(group.indices, group.width)
        self._begin()
        return self._read(group, move(taken, self._batches.device))

    def _read(self, group: Group, micro_batch: Any) -> list[Part]:
        where, work = self._where, self._work
        run = partial(work.loss_fn, self._batches.model, micro_batch)
        if self._draws is None:
            result = run()
        else:
            trial = partial(self._trial, group)
            result = self._draws.forward(group.indices, run, trial, self._unlike_first())
        loss, count = read_result(result, where)
        return read_parts(loss, count, work.reduction, lambda: where)

    def _trial(self, group: Group, indices: Sequence[int]) -> None:
        """Run the forward of other samples, from which it is learned where samples lie."""
        alike = len(indices) >= len(group.indices) and set(indices) <= set(group.indices)
        taken = self._samples.microbatch(indices, group.width if alike else None)
        model = self._batches.model
        with undisturbed(model):
            self._work.loss_fn(model, move(taken, self._batches.device))
        self._begin()

    def _unlike_first(self) -> list[int]:
        """The shortest and the longest sample, or some others."""
        n, lengths = len(self._samples), self._samples.lengths
        if lengths is None:
            return sorted({n // 2, n - 1} - {0})
        return sorted({lengths.index(min(lengths)), lengths.index(max(lengths))} - {0})

    def _restore(self, snapshot: Snapshot) -> None:
        lost = self._batches.snapshots.restore(snapshot)
        if lost is not None:
            raise ShortageError(
                "memory-buffer",
                "Memory ran out in a micro-batch that had changed a large buffer, which no "
                "micro-batch before it had done, so that there is no copy to go back to.",
                got=f"a new value of the buffer `{lost}`",
                expected="buffers that change in every forward or in none",
                do="the batch was dropped: run it again, and the buffer is copied from now on",
            )

    def _smaller(self, group: Group, shortage: _Shortage) -> list[Group]:
        samples, bucket = len(group.indices), self._bucket(group)
        if samples == 1:
            raise self._too_large(group, shortage)
        meter = self._batches.meter()
        needs = None if meter is None else self._needs(group, meter)
        free = 0.0 if meter is None else _room(meter)
        return self._pieces(group, self._batches.sizes.failed(bucket, samples, needs, free))

    def _needs(self, group: Group, meter: Meter) -> Needs | None:
        """What micro-batches like this one take: small ones are run, and leave no trace."""
        if len(self._samples) <= 4:
            return None
        batches = self._batches
        model, optimizers = batches.model, self._core.optimizers
        try:
            found = probe(
                model,
                self._work.loss_fn,
                self._samples,
                meter=meter,
                optimizers=optimizers,
                reduction=self._work.reduction,
                declared=self._work.declared is not None,
            )
        except Exception as error:  # noqa: BLE001 - what is wrong shows where it counts
            let_go(error)
            return None
        memory, width = found.memory, group.width or 1
        return lambda samples: memory.bytes(samples, width) - meter.used(batches.owned())

    def _bad_samples(self, group: Group) -> list[int]:
        """The samples of a group that are not finite, found by halves."""
        bad: list[int] = []
        good: list[int] = []
        alone: list[int] = []
        suspects = [list(group.indices)]
        while suspects:
            indices = suspects.pop()
            if len(indices) == 1:
                alone += indices
            elif self._is_finite(indices):
                good += indices
            else:
                half = len(indices) // 2
                suspects += [indices[:half], indices[half:]]
        for index in alone:
            # Batch norm refuses a sample on its own: another one goes along, that is known to be
            # good, or may turn out to be.
            others = good[:1] or [i for i in [*alone, *range(len(self._samples))] if i != index][:9]
            tried = [[index], *([index, other] for other in others)]
            (good if any(map(self._is_finite, tried)) else bad).append(index)
        return sorted(bad)

    def _is_finite(self, indices: list[int]) -> bool:
        with untouched(self._batches.model) as writes, writes:
            try:
                parts = self._parts(self._group(sorted(indices)))
            except Exception:
                if len(indices) > 1:
                    raise
                return False
            if bool(loss_flag(parts)):
                return False
            with self._mode():
                torch.autograd.backward([part.loss for part in parts])
            return bool(all_finite(p.grad for p in self._batches.model.parameters()))

    def _without(self, bad: Sequence[int]) -> None:
        window = self._core.window
        assert window is not None
        window.dropped_samples += tuple(bad)

    def _located(self, error: NonFiniteError, group: Group) -> NonFiniteError:
        """The error with the samples and the module that it comes from."""
        bad = self._bad_samples(group)
        named = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        with untouched(self._batches.model) as writes, writes:
            source = source_of(
                self._batches.model, lambda: self._parts(self._group(bad or group.indices))
            )
        where = f"sample {named} of the batch" if bad else "no sample on its own"
        got = f"{error.got}; {where}" + (
            f", first seen in the output of {source}" if source else ""
        )
        return NonFiniteError(
            "non-finite",
            error.problem,
            got=got,
            expected="finite losses and gradients; nothing of the batch was kept",
            do='on_nonfinite="drop" leaves such micro-batches out, isolate="sample" only the '
            "samples; or look for log(0), sqrt(0), 0/0 in what is named",
        )

    def _group(self, indices: Sequence[int]) -> Group:
        lengths = self._samples.lengths
        if lengths is None:
            return Group(indices, None, 0)
        width = max(lengths[index] for index in indices)
        padding = len(indices) * width - sum(lengths[index] for index in indices)
        return Group(indices, width, padding)

    def _pieces(self, group: Group, size: int) -> list[Group]:
        samples = len(group.indices)
        if size >= samples:
            return [group]
        lengths = self._samples.lengths
        order = list(group.indices)
        if lengths is not None and group.width is not None:
            order.sort(key=lambda index: -lengths[index])
        parts = even(samples, -(-samples // size))
        return [self._group(sorted(order[i] for i in part)) for part in parts]

    def _bucket(self, group: Group) -> int:
        return bucket_of(group.width if group.width is not None else self._samples.elements)

    def _too_large(self, group: Group, shortage: _Shortage) -> ShortageError:
        index = group.indices[0]
        width = "" if group.width is None else f", {group.width:,} elements long,"
        meter = self._batches.meter()
        least = "" if meter is None else f"; {self._least(group, meter)}"
        return ShortageError(
            "memory-sample",
            f"Sample {index} of the batch{width} does not fit in memory on its own.",
            got=f"{shortage.text}{least}",
            expected="room for the activations of one sample",
            do="activation checkpointing (torch.utils.checkpoint), bfloat16 autocast, a shorter "
            f"sample, or leave sample {index} out; nothing of the batch was kept",
        )

    def _least(self, group: Group, meter: Meter) -> str:
        """What a micro-batch that does not fit needs at least, from one more try."""
        asked = 0
        with untouched(self._batches.model), meter.peak(marks=False) as peak:
            try:
                parts = self._parts(group)
                with self._mode():
                    torch.autograd.backward([part.loss for part in parts])
            except Exception as error:  # noqa: BLE001 - how far it came is all that is asked
                asked = asked_bytes(error) or 0
                let_go(error)
        needs = show_bytes(peak.bytes + asked)
        return f"it needs {needs} or more, and {show_bytes(meter.free())} are free"
