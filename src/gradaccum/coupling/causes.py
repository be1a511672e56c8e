"""One experiment for each cause: what happens to the difference when one thing is held still."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gradaccum.coupling.company import coupled
from gradaccum.coupling.examine import Examination, Measured
from gradaccum.coupling.runs import Conditions, Group
from gradaccum.coupling.stage import Change
from gradaccum.engine.policies.sites import Site
from gradaccum.records.report import Cause

__all__ = ["find_causes"]

_SHOWN = 4
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def find_causes(exam: Examination) -> list[Cause]:
    """Why the split batch's update is another one; each reason proved by itself."""
    raw = exam.measure()
    everything = _held_still(exam)
    clean = exam.measure(everything)
    found: list[Cause] = []
    if everything.fixed:
        found += _batchnorm(exam, everything)
    if everything.quiet:
        found += _random(exam, everything)
    if everything.restored:
        found += _side_effect(exam, everything)
    found += _uncounted(exam, clean)
    for term, explained in clean.explained.items():
        if explained.kind == "shares" and not _same_shares(exam, everything, term):
            continue
        found += _scale(term, explained.kind, explained.evidence, exam.runner.reduction)
    kinds = {one.kind for one in clean.explained.values()}
    if kinds & {"none", "small"} and not _unheld(found):
        small = "none" not in kinds
        found += coupled(exam, everything, small=small) or ([_too_small()] if small else [])
    if clean.errors.keys() & raw.errors.keys():  # else it fails for what is held still
        found.append(_error(clean))
    if not found:
        found.append(_unexplained(raw, clean))
    return found


def _held_still(exam: Examination) -> Conditions:
    """Everything that can be held still and that the forward has."""
    runner = exam.runner
    state = any(change.name not in _STATISTICS for change in runner.changed)
    return Conditions(quiet=runner.drew, fixed=bool(runner.normalised), restored=state)


def _matters(exam: Examination, held: Conditions, without: Conditions) -> tuple[bool, str]:
    """Whether letting one thing go brings a difference that is not there while it is held."""
    clean, loose = exam.measure(held), exam.measure(without)
    if clean.equal:
        says = f"the distance falls from {_far(loose)} to {_far(clean)} with"
    else:
        says = "micro-batches' gradients add up to the whole batch's, by some weights, only with"
    for term, one in clean.explained.items():
        if one.kind not in ("none", "small", "unseen") and loose.explained[term].kind != one.kind:
            return True, says
    return bool(loose.errors.keys() - clean.errors.keys()), "no split fails with"


def _batchnorm(exam: Examination, held: Conditions) -> list[Cause]:
    matters, evidence = _matters(exam, held, replace(held, fixed=False))
    apart = {site: far for site, far in exam.runner.normalised.items() if far > exam.bound}
    loose = exam.measure(replace(held, fixed=False))
    coupled_too = any(
        one.kind in ("none", "small") for one in exam.measure(held).explained.values()
    )
    if not (matters or (coupled_too and apart)):
        return []
    names = _modules(apart or exam.runner.normalised)
    widest = max(exam.runner.normalised.values())
    lines = [
        f"statistics of micro-batches are up to {widest:.2g} standard deviations from the whole's"
    ]
    if matters:
        lines.insert(0, f"{evidence} every layer normalising by the whole batch's statistics")
    lines += [f"{split}: {error}" for split, error in list(loose.errors.items())[:1]]
    return [
        Cause(
            "batchnorm",
            f"BatchNorm normalises each micro-batch by its own statistics: {_listed(names)}.",
            tuple(lines),
            'ga.Accumulator(..., batchnorm="frozen") is exact; "pooled" moves the running '
            "estimates as the whole batch would; or use GroupNorm",
            names,
            "GA701",
        )
    ]


def _random(exam: Examination, held: Conditions) -> list[Cause]:
    runner = exam.runner
    matters, evidence = _matters(exam, held, replace(held, quiet=False))
    free = replace(held, quiet=False)
    seeds = exam.apart(exam.gradient(free), exam.gradient(replace(free, seed=1)))
    if not (matters or seeds > exam.bound):
        return []
    kinds = {site.kind for site in runner.drawn}
    dropout = bool(kinds) and not kinds & {"uniform", "normal"}
    names = _modules(runner.drawn)
    found = []
    if runner.drawn:
        what = "Dropout draws" if dropout else "The forward draws random numbers: it draws"
        lines = [f"two seeds give the whole batch gradients {seeds:.1e} apart"]
        if matters:
            lines.insert(0, f"{evidence} nothing dropped and no noise")
        found.append(
            Cause(
                "dropout" if dropout else "random",
                f"{what} other masks for other micro-batches: {_listed(names)}."
                if dropout
                else f"{what} other ones for other micro-batches: {_listed(names)}.",
                tuple(lines),
                "right on average, and usually meant; "
                'ga.Accumulator(..., dropout="per-sample") makes acc.step independent of the split',
                names,
            )
        )
    if runner.others_drew:
        far = exam.apart(exam.gradient(held), exam.gradient(replace(held, seed=1)))
        if far > exam.bound:
            found.append(
                Cause(
                    "random",
                    "The forward draws random numbers of a kind that cannot be held still.",
                    (f"two seeds give gradients {far:.1e} apart with all dropout held",),
                    "draw them per sample, before the batch is split; further causes, if any, "
                    "cannot be told while they are there",
                )
            )
    return found


def _side_effect(exam: Examination, held: Conditions) -> list[Cause]:
    """State that one micro-batch leaves for the next."""
    runner = exam.runner
    loose = replace(held, restored=False)
    groups = next(iter(exam.splits.values()))
    changes = [change for change in runner.changed if change.name not in _STATISTICS]
    try:
        free = exam.gradient(loose, groups)
        far = exam.apart(free, exam.gradient(held, groups))
    except Exception:  # noqa: BLE001 - the split fails in the user's code, which is another cause
        return []
    if far <= exam.bound:
        return []
    guilty = [one for one in changes if _carries(exam, held, groups, one)] or changes
    names = tuple(map(str, guilty))
    return [
        Cause(
            "side-effect",
            f"The forward changes what the next one computes with: {_listed(names)}.",
            (f"putting it back before each micro-batch moves the gradient by {far:.1e}",),
            "update such state once for each window (in on_update), or not in the forward",
            names,
        )
    ]


def _carries(exam: Examination, held: Conditions, groups: Sequence[Group], change: Change) -> bool:
    """Whether the gradient moves when this one change is let go, all others put back."""
    runner = exam.runner
    full, every = exam.gradient(held, groups), runner.changed
    runner.changed = [one for one in every if one != change]
    try:
        return exam.apart(full, exam.gradient(held, groups)) > exam.bound
    finally:
        runner.changed = every


def _uncounted(exam: Examination, clean: Measured) -> list[Cause]:
    if not exam.runner.uncounted:
        return []
    kinds = {one.kind for one in clean.explained.values()}
    behaves = {
        "mean": "it behaves as a mean over the samples",
        "equal": f"it behaves as a {exam.runner.reduction} over the samples",
        "sum": "it behaves as a sum",
        "shares": "it behaves as a mean over something else than the samples (tokens, pixels)",
    }
    return [
        Cause(
            "factor",
            "`loss_fn` returned a loss without the count of its terms.",
            tuple(text for kind, text in behaves.items() if kind in kinds),
            "return (loss_sum, count)",
            fault="GA203",
        )
    ]


def _scale(term: str, kind: str, evidence: tuple[str, ...], reduction: str) -> list[Cause]:
    of = f" of term {term!r}" if term else ""
    where = (term,) if term else ()
    if kind == "mean" and reduction == "sum":
        return [
            Cause(
                "factor",
                f"The loss{of} is a mean, and was handed over as a sum: the update is off by the "
                "number of micro-batches.",
                evidence,
                'pass reduction="mean", or return the sum',
                where,
                "GA201",
            )
        ]
    if kind == "sum":
        return [
            Cause(
                "factor",
                f'The loss{of} is a sum, and was handed over with reduction="mean".',
                evidence,
                'leave out reduction="mean"',
                where,
                "GA202",
            )
        ]
    if kind == "counts":
        return [
            Cause(
                "factor",
                f"The counts{of} of the micro-batches do not add up to the whole batch's.",
                evidence,
                "count the loss terms of the micro-batch at hand: mask.sum(), len(x)",
                where,
                "GA201",
            )
        ]
    if kind == "shares":
        return [
            Cause(
                "shares",
                f"The loss{of} is a mean of other terms than `count` counts: a mean of means.",
                evidence,
                "count what the mean divides by: unmasked tokens, or the sum of class weights",
                where,
                "GA203",
            )
        ]
    if kind == "constant":
        return [
            Cause(
                "constant",
                f"The loss{of} has a part that does not grow with the samples, such as a penalty "
                "on the weights: each micro-batch adds it whole.",
                evidence,
                'return it as a term of its own: {"loss": (loss_sum, count), "penalty": (p, 1)}',
                where,
            )
        ]
    return []


def _same_shares(exam: Examination, held: Conditions, term: str) -> bool:
    """Whether the terms have these shares with other random numbers too, if any are drawn."""
    if not exam.runner.others_drew:
        return True
    one, other = exam.measure(held), exam.measure(replace(held, seed=1))
    return term in other.explained and one.explained[term] == other.explained[term]


def _error(clean: Measured) -> Cause:
    return Cause(
        "error",
        "The model or the loss fails on a part of the batch.",
        tuple(f"{split}: {error}" for split, error in clean.errors.items()),
        "a batch can only be split where each micro-batch alone has a loss",
    )


def _unheld(found: list[Cause]) -> bool:
    return any("cannot be held" in cause.title for cause in found)


def _too_small() -> Cause:
    return Cause(
        "unexplained",
        "Either the loss is a mean of other terms than `count` counts, or it couples samples.",
        ("the gradient has too few elements to tell: any gradient is some weights of the others",),
        "return (loss_sum, count); or check with a larger model",
    )


def _unexplained(raw: Measured, clean: Measured) -> Cause:
    return Cause(
        "unexplained",
        "The split batch has another gradient, and no experiment says why.",
        (f"distance {_far(raw)}; {_far(clean)} with everything held still that can be",),
        "please report it, with the model and the loss",
    )


def _far(measured: Measured) -> str:
    far = measured.farthest
    return "that of a failure" if math.isinf(far) else f"{far:.1e}"


def _modules(sites: Iterable[Site]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(site.name for site in sites))


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
