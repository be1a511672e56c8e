"""What the demo found, and the sentence that sums it up: numbers and text, no tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median

__all__ = ["DemoResult", "RunResult", "megabytes", "seconds", "short"]


@dataclass(frozen=True)
class RunResult:
    """One way to make the updates."""

    name: str
    """`whole`, `usual` or `ours`."""

    title: str
    """The name that people read."""

    seconds: tuple[float, ...]
    """Wall time of each update."""

    losses: tuple[float, ...]
    """Mean loss over all tokens of each update's batch, before the update; in nats."""

    peak_bytes: int
    """Most bytes alive in the first update, beyond weights, optimizer state and data."""

    tokens: int
    """Real tokens of all updates."""

    padded: int
    """Tokens of all updates with the padding that was computed."""

    microbatches: tuple[int, ...]
    """Micro-batches of each update."""

    distance: float
    """The first update's gradient against the whole batch's in float64, relative, L2."""

    @property
    def time(self) -> float:
        """Median seconds of an update."""
        return median(self.seconds)

    @property
    def waste(self) -> float:
        """Tokens computed for each real one."""
        return self.padded / self.tokens


@dataclass(frozen=True)
class DemoResult:
    """All three runs, and how they were made."""

    whole: RunResult
    usual: RunResult
    ours: RunResult
    settings: Mapping[str, str | int]

    @property
    def runs(self) -> tuple[RunResult, RunResult, RunResult]:
        """The runs in the order in which they are shown."""
        return self.whole, self.usual, self.ours

    def of_usual_time(self, run: RunResult) -> float:
        """Its time as a share of the usual loop's: the median of the updates' own ratios.

        Both made the same update within seconds, so what else the machine did cancels out.
        """
        pairs = zip(run.seconds, self.usual.seconds, strict=True)
        return median(mine / usual for mine, usual in pairs)

    def of_whole_memory(self, run: RunResult) -> float:
        """Its peak memory as a share of the whole batch's."""
        return run.peak_bytes / self.whole.peak_bytes

    @property
    def same(self) -> bool:
        """Whether our update differs from the truth by no more than rounding does.

        The whole batch in the same precision has a distance of its own from the float64 one; ours
        adds its numbers in another order, so a few times that is still rounding.
        """
        return self.ours.distance <= 10 * max(self.whole.distance, 1e-7)

    def verdict(self) -> str:
        """One sentence: same update or not, at what time and memory."""
        ours = self.ours
        if self.same:
            start = f"The same update as the whole batch, to {short(ours.distance)}"
        else:
            start = f"NOT the update of the whole batch: {short(ours.distance)} away from it"
        return (
            f"{start}, in {self.of_usual_time(ours):.2f} of the usual loop's time and "
            f"{self.of_whole_memory(ours):.2f} of the whole batch's memory{self._contrast()}."
        )

    def _contrast(self) -> str:
        if self.usual.distance < 1e-4:  # one micro-batch: its mean of means is the mean
            return ""
        return f"; the usual loop's update is {_share(self.usual.distance)} off"

    def to_json(self) -> str:
        """Every number, as JSON."""
        runs = {
            run.name: asdict(run)
            | {
                "median_seconds": run.time,
                "of_usual_time": self.of_usual_time(run),
                "of_whole_memory": self.of_whole_memory(run),
                "waste": run.waste,
            }
            for run in self.runs
        }
        record = {
            "version": 1,
            "verdict": self.verdict(),
            "same": self.same,
            "settings": dict(self.settings),
            "runs": runs,
        }
        return json.dumps(record, indent=2) + "\n"


def short(value: float) -> str:
    """Two decimals where they say something, else a digit and a power of ten: `0.16`, `2e-7`."""
    if value >= 0.01:
        return f"{value:.2f}"
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}"


def seconds(value: float) -> str:
    """A time with its unit: `1.25 s`, `31 ms`."""
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.0f} ms"


def megabytes(value: float) -> str:
    """A size with its unit: `1,890 MB`, `5.9 MB`."""
    return f"{value / 1e6:,.0f} MB" if value >= 1e7 else f"{value / 1e6:.1f} MB"


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 else short(value)
