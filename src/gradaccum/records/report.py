"""Whether a model and a loss may be split, and if not, why not: what `gradaccum.check` returns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gradaccum.errors import InputError, UnequalError

__all__ = ["Cause", "Report", "SplitSeen"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class SplitSeen:
    """One way in which the batch was split, and how far its update was from the whole batch's."""

    name: str
    sizes: tuple[int, ...]
    """Samples of each micro-batch."""

    distance: float
    """Largest relative distance of a parameter's gradient; infinite where the split failed."""

    counts: tuple[float, ...]
    """Count of loss terms of each micro-batch, all terms together."""

    error: str = ""
    """What the model or the loss raised on one of the micro-batches."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why the update of the split batch is not that of the whole, as it was proved."""

    kind: str
    """`factor`, `shares`, `constant`, `batchnorm`, `dropout`, `random`, `coupled`, `stale`,
    `nondeterministic`, `side-effect`, `not-finite`, `error` or `unexplained`."""

    title: str
    """One sentence."""

    evidence: tuple[str, ...] = ()
    """The experiments and what they gave."""

    mend: str = ""
    where: tuple[str, ...] = ()
    """Modules, parameters or terms, by name."""

    fault: str = ""
    """The catalogue's code, where the fault is in it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What `gradaccum.check` found; `print(report)` shows it, the verdict first.

    Examples:
        >>> import torch, gradaccum as ga
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, x):
        ...     return model(x).square().sum(), len(x)
        >>> report = ga.check(model, loss_fn, torch.randn(8, 3))
        >>> report.equal, report.verdict.split(":")[0]
        (True, 'equal')
        >>> ga.Report.from_json(report.to_json()) == report
        True
    """

    equal: bool
    verdict: str
    """One sentence; it begins with `equal`, `not equal` or `not finite`."""

    distance: float
    """Largest relative distance of a parameter's gradient, the batch whole against split."""

    bound: float
    """What rounding alone may make of that distance."""

    dtype: str
    """What was computed in."""

    samples: int
    loss: float
    """The objective of the whole batch."""

    splits: tuple[SplitSeen, ...] = ()
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    """What does not change the update, but may surprise."""

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        lines = [self.verdict, ""]
        for number, cause in enumerate(self.causes, 1):
            code = f" ({cause.fault})" if cause.fault else ""
            lines.append(f"{number}. {cause.title}{code}")
            lines += [f"     {text}" for text in cause.evidence]
            if cause.mend:
                lines.append(f"     Do this: {cause.mend}")
        if self.causes:
            lines.append("")
        lines.append(f"   {'split':<28}{'micro-batches':<20}{'distance':>10}")
        for split in self.splits:
            sizes = "+".join(map(str, split.sizes[:6])) + ("+..." if len(split.sizes) > 6 else "")
            far = "failed" if split.error else _short(split.distance)
            lines.append(f"   {split.name:<28}{sizes:<20}{far:>10}")
        lines.append(
            f"   whole batch: {self.samples} samples, loss {self.loss:.6g}, in {self.dtype}; "
            f"rounding alone may reach {_short(self.bound)}"
        )
        lines += [f"   note: {note}" for note in self.notes]
        return "\n".join(lines)

    def assert_equal(self) -> Report:
        """Return the report; raise with it as the message if the update depends on the split.

        Raises:
            UnequalError: an `AssertionError` too, so that a test fails as by `assert`.
        """
        if not self.equal:
            finite = all(cause.kind != "not-finite" for cause in self.causes)
            raise UnequalError(
                "check-unequal",
                "The update depends on how the batch is split."
                if finite
                else "The update is not finite, so no split of the batch can be compared with it.",
                got=str(self),
                expected="the whole batch's gradient from every way to split it",
                do="what the report says under each cause",
            )
        return self

    def to_json(self) -> str:
        """The report as a JSON object; a number that is not finite is a string."""
        return json.dumps({"version": _VERSION, **_plain(asdict(self))})

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote.

        Raises:
            InputError: if the text is not a report, or one of another version.
        """
        try:
            found = json.loads(text)
            if found.pop("version") != _VERSION:
                raise ValueError("another version")
            found["splits"] = tuple(SplitSeen(**_split(one)) for one in found["splits"])
            found["causes"] = tuple(
                Cause(**_tuples(one, "evidence", "where")) for one in found["causes"]
            )
            found["notes"] = tuple(found["notes"])
            for name in ("distance", "bound", "loss"):
                found[name] = float(found[name])
            return cls(**found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                "check-json",
                "The text is not a report that this version can read.",
                got=f"{type(error).__name__}: {error}",
                expected=f"what `report.to_json()` writes, version {_VERSION}",
                do="check again: gradaccum.check(model, loss_fn, batch)",
            ) from None


def _tuples(one: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {**one, **{name: tuple(one[name]) for name in names}}


def _split(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **one,
        "sizes": tuple(one["sizes"]),
        "counts": tuple(float(count) for count in one["counts"]),
        "distance": float(one["distance"]),
    }


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
