"""`gradaccum.check`: may this model and this loss be split?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradaccum.coupling.causes import find_causes
from gradaccum.coupling.examine import Examination, flat, group_of, rounding, ways
from gradaccum.coupling.finite import all_finite, not_finite
from gradaccum.coupling.inputs import read_samples
from gradaccum.coupling.runs import Conditions, Piece, Runner
from gradaccum.coupling.stage import Stage
from gradaccum.engine.memory.refused import batch_tensors, no_terms, unreached
from gradaccum.errors import GradaccumError
from gradaccum.planner.padding import Side
from gradaccum.planner.split import Samples
from gradaccum.records.report import Cause, Report, SplitSeen

__all__ = ["assert_splittable", "check"]

LossFn = Callable[[nn.Module, Any], object]
_HELD = Conditions(quiet=True)


def check(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    lengths: Iterable[Any] | Callable[[Any], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    trim: Side | Callable[[Any, int], Any] | None = "right",
    reduction: Literal["sum", "mean"] = "sum",
    dtype: torch.dtype | None = torch.float64,
) -> Report:
    """Run a batch whole and split in several ways, and say whether the update is the same.

    If it is not, each cause is proved by an experiment that holds one thing still: BatchNorm's
    statistics, random numbers, what a forward leaves behind; and by what the gradients of the
    micro-batches say about their weights. The model, its buffers, gradients, attributes and mode,
    and every random state, are afterwards what they were, also if something raises.

    Args:
        model: as it is trained: what is checked is the mode that it is in.
        loss_fn: `(model, micro_batch) -> (loss_sum, count)`, or a dict of such pairs, as in
            `acc.step`.
        batch: a real batch of at least 2 samples, better 8; as in `acc.step`.
        lengths: as in `acc.step`.
        collate: as in `acc.step`.
        trim: as in `acc.step`.
        reduction: `"mean"` if `loss_fn` returns means with their counts.
        dtype: what to compute in, so that rounding hides nothing; a model or loss that cannot is
            run as it is. `None` does so at once, at half the memory.

    Returns:
        A record that prints well and is true where the update is equal.

    Raises:
        InputError: if the loss or the count cannot be meant, all counts are 0, or the loss depends
            on no parameter of the model.
        BatchError: if the batch cannot be split, or has one sample only.

    Examples:
        >>> import torch, gradaccum as ga
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> def loss_fn(model, x):
        ...     return model(x).square().sum(), len(x)
        >>> report = ga.check(model, loss_fn, torch.randn(8, 3))
        >>> [cause.kind for cause in report.causes], report.causes[0].where
        (['batchnorm'], ('1',))
    """
    samples = read_samples(
        model,
        loss_fn,
        batch,
        lengths=lengths,
        collate=collate,
        trim=trim,
        reduction=reduction,
        dtype=dtype,
    )
    met: dict[int, Tensor] = {}
    given = {id(tensor): tensor for _, tensor in batch_tensors(batch)}
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    with Stage(model, loss_fn, None) as stage:
        # What raises here raises in training too, and is the user's to see as it is.
        runner = Runner(stage, loss_fn, samples, reduction, met, given)
        held = _whole(runner, samples)
        coarse, broken = _gradients(held), _first_look(runner, samples, held, own)
    note = ""
    if dtype is not None:
        finer = torch.finfo(dtype).eps < torch.finfo(own).eps
        with Stage(model, loss_fn, dtype) as stage:
            runner = Runner(stage, loss_fn, samples, reduction, met, given)
            try:
                fine = _gradients(_whole(runner, samples))
            except GradaccumError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the user's code says of the dtype
                first = " ".join(str(error).strip().splitlines()[:1])
                note = f"not in {_name(dtype)}: {type(error).__name__}: {first}"[:200]
            else:
                share = torch.finfo(dtype).eps / torch.finfo(own).eps
                measured = _apart(fine, coarse) * share if finer else 0.0
                return _report(runner, samples, dtype, measured, note, broken)
    with Stage(model, loss_fn, None) as stage:
        runner = Runner(stage, loss_fn, samples, reduction, met, given)
        _whole(runner, samples)
        return _report(runner, samples, own, 0.0, note, broken)


def assert_splittable(model: nn.Module, loss_fn: LossFn, batch: Any, **options: Any) -> Report:
    """`check`, and raise with the report as the message if the update depends on the split.

    Args:
        model: as in `check`.
        loss_fn: as in `check`.
        batch: as in `check`.
        **options: those of `check`.

    Raises:
        UnequalError: an `AssertionError`, so that a test fails as by `assert`.

    Examples:
        >>> import torch, gradaccum as ga
        >>> def test_my_loss_may_be_split():
        ...     loss_fn = lambda model, x: (model(x).square().sum(), len(x))
        ...     ga.assert_splittable(torch.nn.Linear(3, 1), loss_fn, torch.randn(8, 3))
        >>> test_my_loss_may_be_split()
    """
    return check(model, loss_fn, batch, **options).assert_equal()


def _first_look(
    runner: Runner, samples: Samples, held: dict[str, list[Piece]], own: torch.dtype
) -> list[Cause]:
    """Refuse a loss without terms or parameters; the cause, if it is not finite.

    In the model's own dtype, as it would be trained; and where it is amiss with random numbers
    held still, once more with its own.
    """
    if all_finite(held) and _counted(held) and runner.reached:
        return []
    whole = group_of(samples, range(len(samples)))
    pieces = runner.run([whole], Conditions())
    if not _counted(pieces):
        raise no_terms(1)
    if not runner.reached:
        raise unreached(runner.stage.model.parameters())
    return [] if all_finite(pieces) else [not_finite(runner, whole, pieces, _name(own))]


def _counted(pieces: dict[str, list[Piece]]) -> bool:
    return any(piece.count for term in pieces.values() for piece in term)


def _whole(runner: Runner, samples: Samples) -> dict[str, list[Piece]]:
    return runner.run([group_of(samples, range(len(samples)))], _HELD)


def _gradients(pieces: dict[str, list[Piece]]) -> Tensor:
    return torch.stack([term[0].gradient for term in pieces.values()])


def _apart(fine: Tensor, coarse: Tensor) -> float:
    fine = fine[:, : coarse.shape[1]]  # what was taken onto the stage later comes last
    size, apart = float(fine.norm()), float((fine - coarse).norm())
    return apart / size if size and math.isfinite(size) and math.isfinite(apart) else 0.0


def _report(
    runner: Runner,
    samples: Samples,
    dtype: torch.dtype,
    measured: float,
    note: str,
    broken: list[Cause],
) -> Report:
    whole = group_of(samples, range(len(samples)))
    notes = [note] if note else []
    pieces = runner.run([whole], Conditions())
    first = flat(pieces)
    runner.changed = runner.stage.changes()
    narrowest = runner.widen.narrowest if runner.widen is not None else dtype
    bound = rounding(_terms(runner, samples), torch.finfo(narrowest).eps, measured)
    exam = Examination(runner, ways(samples), whole, bound)
    if not all_finite(pieces):
        broken = broken or [not_finite(runner, whole, pieces, _name(dtype))]
    causes = [*broken, *_stale(exam)]
    repeated = exam.apart(first, exam.gradient(Conditions()))
    comparable = math.isfinite(repeated)
    if comparable and repeated > bound:
        causes.append(_nondeterministic(exam, repeated))
        exam.bound = bound = bound + 4 * repeated
    found = exam.measure()
    if comparable and (not found.equal or runner.uncounted):
        causes += find_causes(exam)
    notes += _notes(runner, causes)
    splits = tuple(
        SplitSeen(
            name,
            tuple(len(indices) for indices, _ in groups),
            found.distances.get(name, math.inf),
            found.counts.get(name, ()),
            found.errors.get(name, ""),
        )
        for name, groups in exam.splits.items()
    )
    return Report(
        equal=not causes,
        verdict=_verdict(causes, found.farthest, bound, len(splits)),
        distance=found.farthest,
        bound=bound,
        dtype=_name(dtype),
        samples=len(samples),
        loss=found.loss,
        splits=splits,
        causes=tuple(causes),
        notes=tuple(notes),
    )


def _terms(runner: Runner, samples: Samples) -> int:
    """How many terms a gradient may be the sum of: elements of the batch's largest tensor."""
    sizes = [leaf.numel() for leaf in runner.leaves(group_of(samples, range(len(samples))))]
    return max([len(samples), *sizes])


def _stale(exam: Examination) -> list[Cause]:
    found = []
    stale = {n: g for n, g in exam.runner.stage.stale().items() if bool(g.to_dense().any())}
    if stale:
        size = math.sqrt(
            sum(float(g.to_dense().abs().double().square().sum()) for g in stale.values())
        )
        whole = float(exam.gradient(Conditions()).norm())
        found.append(
            Cause(
                "stale",
                "A gradient stands in the parameters already, and a window would add to it.",
                (
                    f"{len(stale)} of {len(exam.runner.stage.parameters)} parameters, norm "
                    f"{size:.3g}; the batch's own summed gradient has {whole:.3g}",
                ),
                "optimizer.zero_grad() before the window",
                tuple(stale)[:8],
                "GA104",
            )
        )
    if exam.runner.leaked:
        found.append(
            Cause(
                "stale",
                "`loss_fn` leaves gradients in the parameters: it runs a backward of its own.",
                (f"after the forward {len(exam.runner.leaked)} parameters had one",),
                "return the loss, and leave backward to the accumulator",
                tuple(exam.runner.leaked)[:8],
                "GA104",
            )
        )
    return found


def _nondeterministic(exam: Examination, repeated: float) -> Cause:
    lines = [f"the same batch, state and seeds, twice: gradients {repeated:.1e} apart"]
    torch.use_deterministic_algorithms(True)
    try:
        once, twice = (flat(exam.runner.run([exam.whole], Conditions())) for _ in range(2))
        again = exam.apart(once, twice)
    except RuntimeError as error:
        lines.append(str(error).strip().splitlines()[0][:200])
        lines.append("so it is that operation")
    else:
        lines.append(
            "torch's deterministic algorithms make it go away"
            if again <= exam.bound
            else f"and {again:.1e} apart with torch's deterministic algorithms: something outside "
            "of the model is read or kept (a global, a clock, a generator of its own)"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    return Cause(
        "nondeterministic",
        "The loss is not a function of its batch: run again, it has another gradient.",
        tuple(lines),
        "torch.use_deterministic_algorithms(True); keep no state in globals",
    )


def _notes(runner: Runner, causes: list[Cause]) -> list[str]:
    notes = []
    if runner.widen is not None and runner.widen.narrowest != torch.float64:
        notes.append(f"part of the forward computes in {_name(runner.widen.narrowest)}")
    blamed = {name for cause in causes for name in cause.where}
    left = [f"`{change}`" for change in runner.changed if str(change) not in blamed]
    if left:
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        notes.append(
            f"a forward changes {', '.join(left[:4])}{more}: once for each micro-batch, "
            "which no gradient shows"
        )
    return notes


def _verdict(causes: list[Cause], distance: float, bound: float, splits: int) -> str:
    if not causes:
        return (
            f"equal: {splits} ways to split give the whole batch's gradient, the farthest "
            f"{distance:.1e} away, where rounding may reach {bound:.1e}"
        )
    if causes[0].kind == "not-finite":
        more = [_WORDS[cause.kind] for cause in causes[1:]]
        also = f" Besides: {', '.join(dict.fromkeys(more))}." if more else ""
        return f"not finite: {causes[0].evidence[0]}.{also}"
    kinds = ", ".join(dict.fromkeys(_WORDS[cause.kind] for cause in causes))
    far = "a split failed" if math.isinf(distance) else f"distance {distance:.1e}"
    return f"not equal: {kinds} ({far}, where rounding may reach {bound:.1e})"


_WORDS = {
    "not-finite": "not finite",
    "factor": "off by a factor",
    "shares": "off by the share of terms (a mean of means)",
    "constant": "a part that does not grow with the samples",
    "batchnorm": "BatchNorm",
    "dropout": "dropout",
    "random": "random numbers",
    "coupled": "samples are coupled",
    "stale": "a stale gradient",
    "nondeterministic": "non-deterministic",
    "side-effect": "a side effect in the forward",
    "error": "it fails on a part of the batch",
    "unexplained": "for no cause that is known",
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
