"""What `gradaccum.fit` found: bytes and time by size of micro-batch, and what it would choose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from gradaccum.errors import PlanError
from gradaccum.records.memory import MemoryModel
from gradaccum.records.plan import Plan

__all__ = ["Fit", "FitRow", "show_bytes"]

_FIT_VERSION = 1


def show_bytes(size: float) -> str:
    """A number of bytes for people to read, in units of 1,024.

    Examples:
        >>> show_bytes(900), show_bytes(12 * 1024**3), show_bytes(1536)
        ('900 B', '12.0 GiB', '1.5 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


@dataclass(frozen=True, slots=True)
class FitRow:
    """One size of micro-batch."""

    samples: int

    width: int | None
    """Length of its longest sample in elements; None where no lengths were given."""

    bytes: int
    """At its peak, all that stays in memory included."""

    seconds: float
    """Of one forward and backward."""

    measured: bool
    """Whether this size was run; else both numbers are predicted."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How many samples at a time fit in memory; made by `gradaccum.fit`.

    `print(fit)` shows it as a table.
    """

    device: str

    samples: int
    """Samples of the batch."""

    limit: int
    """Most bytes that were allowed, all that stays in memory included."""

    auto: bool
    """Whether the limit is what the device could give; else it was passed."""

    parameters: int
    """Bytes of the model: its parameters and buffers."""

    gradients: int
    """Bytes of the gradients while a window is open."""

    optimizer: int
    """Bytes of the optimizer's state once it has stepped; 0 where no optimizer was given."""

    others: int
    """Bytes of other tensors on the device, where its allocator counts them."""

    assumed: bool
    """Whether the optimizer could not tell what its state will take, and was taken for Adam."""

    memory: MemoryModel
    """Predicts the bytes of other sizes."""

    rows: tuple[FitRow, ...]

    plan: Plan | None
    """Which samples would form which micro-batch; None without lengths, or if not all fit."""

    microbatch: int
    """Most samples in one of the micro-batches that it would choose; 0 if some sample does not
    fit."""

    microbatches: int
    """How many micro-batches it would make of the batch; 0 if some sample does not fit."""

    seconds: float
    """Predicted time of all of them; 0.0 if some sample does not fit."""

    peak: int
    """Predicted peak of the largest of them; if some sample does not fit, of that sample alone."""

    @property
    def fits(self) -> bool:
        """Whether the batch can be trained on within the limit."""
        return self.microbatches > 0

    def __str__(self) -> str:
        stays = [
            f"model {show_bytes(self.parameters)}",
            f"gradients {show_bytes(self.gradients)}",
            f"optimizer {show_bytes(self.optimizer)}" + (" (assumed)" if self.assumed else ""),
        ]
        if self.others:
            stays.append(f"others {show_bytes(self.others)}")
        known = "what the device can give" if self.auto else "given"
        sized = any(row.width is not None for row in self.rows)
        lines = [
            f"{self.samples:,} samples on {self.device}, memory {show_bytes(self.limit)} ({known})",
            f"stays: {', '.join(stays)}; {show_bytes(self.memory.step)} more in the step",
            "",
            f"{'samples':>9}" + (f"{'width':>9}" if sized else "") + f"{'bytes':>13}{'time':>11}",
        ]
        for row in self.rows:
            width = f"{row.width or 0:>9,}" if sized else ""
            kind = "measured" if row.measured else "predicted"
            over = "" if row.bytes <= self.limit else ", does not fit"
            lines.append(
                f"{row.samples:>9,}{width}{show_bytes(row.bytes):>13}"
                f"{_duration(row.seconds):>11}  {kind}{over}"
            )
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        """What it would choose, or what would have to change, in words."""
        if self.fits:
            whole = "the whole batch" if self.microbatches == 1 else ""
            size = f"at most {self.microbatch:,} samples each"
            chosen = whole or f"{self.microbatches:,} micro-batches, {size}"
            return (
                f"Choice: {chosen}. Peak {show_bytes(self.peak)}, "
                f"{_duration(self.seconds)} for forward and backward."
            )
        floor = self.memory.floor
        if floor > self.limit:
            return (
                f"Nothing fits: what stays and the optimizer's step take {show_bytes(floor)} "
                f"without a single sample. Give at least {show_bytes(self.peak)}, "
                "or take an optimizer with less state."
            )
        return (
            f"Not every sample fits: one alone takes {show_bytes(self.peak)}. Give at least that "
            "(memory=), cut the longest samples, or checkpoint activations "
            "(torch.utils.checkpoint)."
        )

    def to_json(self) -> str:
        """The record as a JSON object."""
        found = {name: getattr(self, name) for name in _PLAIN}
        found["memory"] = self.memory.as_dict()
        found["rows"] = [asdict(row) for row in self.rows]
        found["plan"] = None if self.plan is None else json.loads(self.plan.to_json())
        return json.dumps({"version": _FIT_VERSION, **found})

    @classmethod
    def from_json(cls, text: str) -> Fit:
        """Read what `to_json` wrote.

        Raises:
            PlanError: if the text is no such record, or one of another version.
        """
        try:
            found = json.loads(text)
            if found["version"] != _FIT_VERSION:
                raise ValueError(f"version {found['version']}")
            plain = {name: _checked(found[name], kind) for name, kind in _PLAIN.items()}
            rows = tuple(_row(row) for row in found["rows"])
            plan = None if found["plan"] is None else Plan.from_json(json.dumps(found["plan"]))
            memory = MemoryModel.from_dict(found["memory"])
            return cls(memory=memory, rows=rows, plan=plan, **plain)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(
                "fit-json",
                "The text is not a `Fit` that this version can read.",
                got=f"{type(error).__name__}: {error}",
                expected=f"what `fit.to_json()` writes, version {_FIT_VERSION}",
                do="measure again: gradaccum.fit(model, loss_fn, batch)",
            ) from None


_PLAIN: dict[str, type] = {
    "device": str,
    "samples": int,
    "limit": int,
    "auto": bool,
    "parameters": int,
    "gradients": int,
    "optimizer": int,
    "others": int,
    "assumed": bool,
    "microbatch": int,
    "microbatches": int,
    "seconds": float,
    "peak": int,
}


def _row(found: Mapping[str, Any]) -> FitRow:
    width = found["width"]
    return FitRow(
        _checked(found["samples"], int),
        None if width is None else _checked(width, int),
        _checked(found["bytes"], int),
        _checked(found["seconds"], float),
        _checked(found["measured"], bool),
    )


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind or (kind is float and not isfinite(value)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
