"""The thin shell that users hold: `Accumulator`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradaccum.engine import state as states
from gradaccum.engine.batch import Batches
from gradaccum.engine.core import Core
from gradaccum.engine.grads import Gradients
from gradaccum.engine.grouping import Grouping, Work
from gradaccum.engine.loop import Loop, Microbatch
from gradaccum.engine.memory.refused import refuse_hollow
from gradaccum.engine.policies.batchnorm import BatchNormChoice, Normalisation
from gradaccum.engine.policies.dropout import read_dropout
from gradaccum.engine.precision import Scaling
from gradaccum.engine.refuse import (
    read_every,
    read_limit,
    read_optimizers,
    read_schedulers,
    read_width,
    refuse_ranks,
)
from gradaccum.engine.stream import counted, read_counts, regrouped
from gradaccum.engine.update import Settings
from gradaccum.errors import InputError, LoopError, shown
from gradaccum.planner.padding import Side
from gradaccum.planner.split import gather
from gradaccum.records import Update

__all__ = ["Accumulator"]

T = TypeVar("T")


Lengths: TypeAlias = Iterable[Any] | Callable[[Any], Any]
Trim: TypeAlias = Side | Callable[[Any, int], Any]


class Accumulator:
    """Gradient accumulation whose update equals the update of the whole batch.

    Every micro-batch adds the gradient of its *summed* loss and the *count* of terms in that sum;
    the window's update divides once, by the total count:

        gradient = ∇ ( Σ_i sum_i / Σ_i count_i )

    So ragged micro-batches and a short last window are right without anything known ahead. The
    model and the optimizer stay your own: nothing is wrapped, patched or replaced.

    Args:
        model: the module whose loss is accumulated.
        optimizer: one optimizer, or several that together serve this loss. Two losses that are
            stepped apart (a GAN) have one `Accumulator` each.
        every: micro-batches in a window, >= 1; or a function of the update index that returns it.
        clip_norm: largest total norm of the update's gradient, > 0.
        clip_value: largest magnitude of one element of the update's gradient, > 0.
        scheduler: stepped once per successful update; one or several.
        scaler: a `torch.amp.GradScaler`: unscaled, stepped and updated once per window.
        on_update: called with the `Update` after each successful one (an EMA, a log).
        on_stale: what to do with a gradient that is there when a window opens: `"raise"`, or
            `"zero"` where another loss is meant to pass through these parameters. With `"zero"`
            the window's gradients are kept out of `.grad` between its micro-batches.
        on_nonfinite: what to do about a NaN or infinite loss or gradient. `"raise"` waits for the
            device once per micro-batch, and names what it found. `"drop"` leaves the micro-batch
            out as if it had never been, gradients, counts, buffers and random states, and reports
            it in the `Update`; on a device nobody waits to know. `"skip"` gives up the window.
            `None` does not look. With `"raise"` and `"drop"` a micro-batch's gradients stay apart
            from the sum until all are there, and the sum may differ in its last bits from what it
            is otherwise. Under a scaler an infinite gradient of a finite loss is part of
            its search for a scale, and skips the update as usual.
        isolate: with `on_nonfinite="drop"`, what `step` drops: the `"microbatch"`, or the
            `"sample"`s in it that are bad, which it finds by halves (a wait per micro-batch).
        accumulate_dtype: what gradients of narrower parameters are summed in: `torch.float32` for
            bfloat16 and float16, `torch.float64` for float32 too, `"compensated"` for sums of 24
            bits (3 bytes for each parameter instead of 4); `None` sums in the parameters' own
            dtype. The optimizer gets the sum rounded once to the parameter's dtype, after clipping
            and unscaling, so any optimizer will do.
        restore: whether a micro-batch whose backward fails leaves no trace in a loop of your own:
            gradients, counts, and where it began with this on, buffers and random states.
            `True`: always, for a copy of the gradients at the end of each backward, and its time
            (`docs/memory.md` has figures). `None`: once memory has run out in a backward; of that
            first one, what had arrived of its gradients breaks the window. `False`: never.
        batchnorm: what BatchNorm does in a window of several micro-batches: `"pooled"`,
            `"frozen"` or `"microbatch"`; see `docs/coupling.md`. `None` is `"microbatch"` with a
            `SplitWarning` that names the layers.
        dropout: `"per-sample"`: in `step`, masks and random numbers depend on the update, the
            sample and the place in the model, not on how the batch is split; see
            `docs/coupling.md`. `None` draws them as torch does.

    Raises:
        InputError: for what accumulation cannot serve, such as LBFGS, an optimizer that steps
            inside backward, or one that holds none of the model's parameters.

    Examples:
        >>> import torch, gradaccum as ga
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> acc = ga.Accumulator(model, optimizer, every=2)
        >>> data = [torch.ones(3, 1), torch.ones(1, 1), torch.ones(2, 1)]
        >>> for micro in acc.microbatches(data):
        ...     error = model(micro.batch) - 2
        ...     micro.backward((error**2).sum(), len(error))
        ...     if micro.update:
        ...         print(micro.update.index, micro.update.microbatches, micro.update.count)
        0 2 4
        1 1 2
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int | Callable[[int], int] = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scheduler: object = None,
        scaler: GradScaler | None = None,
        on_update: Callable[[Update], object] | None = None,
        on_stale: Literal["raise", "zero"] = "raise",
        on_nonfinite: Literal["raise", "drop", "skip"] | None = None,
        isolate: Literal["microbatch", "sample"] = "microbatch",
        accumulate_dtype: torch.dtype | Literal["compensated"] | None = None,
        restore: bool | None = None,
        batchnorm: BatchNormChoice | None = None,
        dropout: Literal["per-sample"] | None = None,
    ) -> None:
        refuse_ranks(model)
        optimizers = read_optimizers(optimizer, model)
        refuse_hollow(
            model, (p for one in optimizers for g in one.param_groups for p in g["params"])
        )
        if not callable(every):
            read_every(every, 0)
        _refuse_choice("on_stale", on_stale, ("raise", "zero"))
        _refuse_choice("on_nonfinite", on_nonfinite, ("raise", "drop", "skip", None))
        _refuse_choice("isolate", isolate, ("microbatch", "sample"))
        if isolate == "sample" and on_nonfinite != "drop":
            raise InputError(
                "choice",
                "`isolate` says what is dropped, and nothing is.",
                got=f"isolate='sample', on_nonfinite={on_nonfinite!r}",
                expected='on_nonfinite="drop"',
                do='Accumulator(..., on_nonfinite="drop", isolate="sample")',
            )
        _refuse_choice("restore", restore, (True, False, None))
        _refuse_choice("batchnorm", batchnorm, ("pooled", "frozen", "microbatch", None))
        _refuse_choice("dropout", dropout, ("per-sample", None))
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise InputError(
                "choice",
                "That is no scaler.",
                got=f"scaler={shown(scaler)}",
                expected="a torch.amp.GradScaler, or None",
                do='scaler=torch.amp.GradScaler("cuda")',
            )
        if on_update is not None and not callable(on_update):
            raise InputError(
                "choice",
                "`on_update` cannot be called.",
                got=f"on_update={shown(on_update)}",
                expected="a function of an Update, or None",
                do="on_update=lambda update: log(update.loss)",
            )
        settings = Settings(
            clip_norm=read_limit("clip_norm", clip_norm),
            clip_value=read_limit("clip_value", clip_value),
            schedulers=read_schedulers(scheduler, optimizers),
            on_update=on_update,
            on_nonfinite=on_nonfinite,
        )
        if settings.clip_norm is not None and settings.clip_value is not None:
            raise InputError(
                "clip",
                "Clip by norm or by value: which comes first would decide the update.",
                got=f"clip_norm={clip_norm!r}, clip_value={clip_value!r}",
                expected="one of the two",
                do="leave one out",
            )
        self._model = model
        self._every = every
        self._core = Core(
            optimizers,
            Gradients(
                model,
                optimizers,
                on_stale,
                read_width(accumulate_dtype, model, apart=on_nonfinite in ("raise", "drop")),
                restore,
            ),
            Scaling(scaler, optimizers),
            settings,
            Normalisation(model, batchnorm),
        )
        self._dropout = read_dropout(model, dropout)
        self._grouping = Grouping(model, optimizers)
        self._batches = Batches(model, self._core, isolate == "sample")
        self._loop = Loop(self._core, self._next_every, self._batches.snapshots)

    def __repr__(self) -> str:
        names = ", ".join(type(optimizer).__name__ for optimizer in self._core.optimizers)
        return (
            f"Accumulator({type(self._model).__name__}, {names}, updates={self.updates}, "
            f"pending={self.pending})"
        )

    @property
    def updates(self) -> int:
        """Updates made so far, skipped ones included: the index of the next."""
        return self._core.updates

    @property
    def pending(self) -> int:
        """Micro-batches in the open window; 0 if none is open."""
        return self._core.window.microbatches if self._core.window is not None else 0

    def microbatches(
        self,
        loader: Iterable[T],
        *,
        lengths: Lengths | None = None,
        budget: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        trim: Trim | None = "right",
        counts: Callable[[T], object] | None = None,
    ) -> Generator[Microbatch[T], None, None]:
        """Loop over micro-batches; the last one of each window makes its update.

        One batch is fetched ahead, so that the end is known: a tail, the short last window, is
        stepped with its own count. A window that was left open, by `break` or by loading a state,
        is gone on with.

        With `lengths` and `budget`, `every` of the loader's batches are one window: its samples
        are regrouped by length, and the micro-batches are those of the plan, however many.

        Args:
            loader: any iterable of batches, with or without a length.
            lengths: each sample's true length: a function of a batch, or of a sample where
                `collate` is given.
            budget: most padded elements (samples times width) in one micro-batch.
            collate: makes a batch of a list of samples; the loader then gives lists of samples.
            trim: side that keeps its columns when padding is cut: `"right"` for padding on the
                right, `"left"` for padding on the left, `None`, or a function
                `(micro_batch, width) -> micro_batch`.
            counts: a function of a batch that returns its count of loss terms, or
                `{name: count}`. Then the window's batches are held on the host first and its
                denominators are known ahead: several terms need one backward instead of one each.

        Raises:
            LoopError: if the loop leaves a micro-batch without a backward.
            InputError: if `every` returns no int >= 1, or the options do not fit together.
        """
        if self._dropout is not None:
            raise InputError(
                "dropout-loop",
                'dropout="per-sample" must be told which samples a forward is for, and in a loop '
                "of your own the forward is yours.",
                got='acc.microbatches(...) of an accumulator with dropout="per-sample"',
                expected="acc.step(batch, loss_fn), which runs the forward",
                do="update = acc.step(batch, loss_fn)",
            )
        if lengths is None and (budget is not None or collate is not None):
            raise InputError(
                "lengths-missing",
                "Regrouping a stream needs to know how long its samples are.",
                got=f"budget={budget!r}, collate={'given' if collate else None}, lengths=None",
                expected="lengths=, a function of a batch (of a sample with collate=)",
                do='lengths=lambda batch: batch["attention_mask"].sum(1)',
            )
        if lengths is not None and budget is None:
            raise InputError(
                "budget-missing",
                "Regrouping a stream needs to know how large a micro-batch may be.",
                got="lengths= without budget=",
                expected="budget=, the most padded elements in one micro-batch",
                do="budget=8 * longest keeps the memory of 8 samples of full length",
            )
        if budget is not None:
            return self._loop.over(
                loader,
                lambda groups: regrouped(
                    groups,
                    lambda group: gather(group, lengths=lengths, collate=collate, trim=trim),
                    budget,
                    counts,
                ),
            )
        if counts is not None:
            return self._loop.over(loader, lambda groups: counted(groups, counts))
        return self._loop.over(loader, None)

    def step(
        self,
        batch: Any,
        loss_fn: Callable[[nn.Module, Any], object],
        *,
        lengths: Lengths | None = None,
        budget: int | None = None,
        memory: int | str | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        trim: Trim | None = "right",
        counts: object = None,
        reduction: Literal["sum", "mean"] = "sum",
    ) -> Update:
        """Make one update of a batch of any size, split into micro-batches.

        Without options it is split evenly into `every`. With `lengths`, samples of like length go
        together; with `budget` or `memory`, no micro-batch is larger than that. Each micro-batch
        is moved to the model's device when its turn comes, and one that runs out of memory leaves
        no trace and is run in smaller parts. After an error nothing of the batch is left behind.

        Args:
            batch: a tensor, or tensors in dicts, tuples, lists and dataclasses, with samples along
                dimension 0; or a list of samples, with `collate`.
            loss_fn: `loss_fn(model, micro_batch)` returns `(loss_sum, count)`, or
                `{name: (loss_sum, count)}` for several terms.
            lengths: each sample's true length: numbers, or a function of the batch (of a sample,
                with `collate`).
            budget: most padded elements (samples times width) in one micro-batch; without
                `lengths`, most samples.
            memory: most bytes at the peak, with the model, its gradients and the optimizer's
                state: `"12GiB"`, a number of bytes, or `"auto"` for what the device can give. A
                few small micro-batches are measured the first time (see `gradaccum.fit`). With
                `lengths` the plan is then the one of least padded work that fits, else the one of
                fewest micro-batches.
            collate: makes a micro-batch of a list of samples.
            trim: as in `microbatches`.
            counts: the batch's count of loss terms if it is known ahead: a number, `{name:
                number}`, or a function of the batch. Several terms then need one backward per
                micro-batch instead of one each.
            reduction: `"mean"` if `loss_fn` returns means with their counts, as most models do.

        Raises:
            BatchError: if the batch cannot be split as asked.
            LoopError: if a window is open.
            PlanError: if a sample alone is beyond `budget` or `memory`.
            ShortageError: if a single sample does not fit in memory, or the optimizer's step.
            NonFiniteError: with `on_nonfinite="raise"`.
        """
        if self._core.begun:
            self._core.sound_window()
            raise LoopError(
                "window-open",
                "A window is open, and this batch would be mixed into it.",
                got=f"{self.pending} micro-batches that have not been stepped",
                expected="no open window",
                do="acc.flush() steps it, acc.discard() drops it",
            )
        if not callable(loss_fn):
            raise InputError(
                "loss-fn-result",
                "`loss_fn` cannot be called.",
                got=shown(loss_fn),
                expected="a function of the model and a micro-batch",
                do="acc.step(batch, lambda model, batch: (loss_sum, count))",
            )
        samples = gather([batch], lengths=lengths, collate=collate, trim=trim)
        declared = None
        if counts is not None:
            declared = read_counts([counts(batch) if callable(counts) else counts])
        work = Work(samples, loss_fn, reduction, declared)
        self._loop.stand_aside()
        groups = self._grouping.groups(work, self._next_every, budget, memory)
        draws = None
        if self._dropout is not None:
            draws = self._dropout.update(self.updates, from_end=trim == "left")
        update = self._batches.run(work, groups, draws)
        self._core.announce(update)
        return update

    def flush(self) -> Update | None:
        """Make the update of the open window as it stands; `None` if there is none."""
        if not self._core.begun:
            return None
        self._loop.void()
        return self._core.announce(self._core.finish())

    def discard(self) -> None:
        """Drop the open window: its gradients, its sums and its counts."""
        if self._core.begun or self._loop.failed:
            self._loop.void()
            self._core.discard()

    def state_dict(self) -> dict[str, Any]:
        """Copy the open window: gradients, counts, random states and the scaler, at any point.

        The model, the optimizer and the scheduler are yours to save beside it. The result holds
        plain types and tensors, so `torch.load(..., weights_only=True)` reads it.
        """
        state = states.save(self._core, self._loop.stage)
        state["dropout"] = None if self._dropout is None else self._dropout.base
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved window, bit for bit.

        Load the model, the optimizer and the scheduler first. Then hand the loop the batches that
        follow: from the micro-batch after the last one added, or, where a window's batches are
        gathered first (`lengths` or `counts`), from that window's first batch.

        Raises:
            StateError: if the state is of another model, optimizer, scaler or version; it names
                the first difference, and nothing has changed.
        """
        states.load(self._core, state)
        if self._dropout is not None and state.get("dropout") is not None:
            self._dropout.base = state["dropout"]
        self._loop.resume(state)

    def _next_every(self) -> int:
        return read_every(self._every, self.updates)


def _refuse_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise InputError(
            "choice",
            f"`{name}` has no such value.",
            got=f"{name}={value!r:.60}",
            expected=" or ".join(repr(choice) for choice in choices),
            do=f"{name}={choices[0]!r}",
        )
