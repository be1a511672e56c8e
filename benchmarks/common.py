"""What the benchmarks share: interleaving, medians, ratios, a table and a JSON file beside it."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch


def arguments(description: str | None) -> argparse.Namespace:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--rounds", type=int, help="how often each loop is timed")
    return parser.parse_args()


def interleaved(
    loops: dict[str, Callable[[], object]],
    *,
    rounds: int,
    clock: Callable[[], float],
    warm: bool = True,
) -> dict[str, list[float]]:
    """Seconds of each call, the loops taking turns; the order turns too, after a warm-up round.

    Args:
        loops: what is called, by name.
        rounds: how often each is timed.
        clock: gives seconds.
        warm: whether a round goes before that is not timed.
    """
    names = list(loops)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-int(warm), rounds):
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            start = clock()
            loops[name]()
            if turn >= 0:
                seconds[name].append(clock() - start)
    return seconds


class Table:
    """Rows under a title, printed and written as JSON."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: object) -> None:
        """Add a row."""
        self.rows.append(row)

    def add_timings(self, each: dict[str, list[float]], *, base: str, unit: str) -> None:
        """A row for each loop: its median, and paired with the base round by round."""
        for name, values in each.items():
            pairs = list(zip(values, each[base], strict=True))
            self.add(
                loop=name,
                **{
                    f"median_{unit}": round(median(values), 3),
                    f"more_than_base_{unit}": round(median(v - b for v, b in pairs), 3),
                    "ratio": round(median(v / b for v, b in pairs), 3),
                },
                rounds=len(values),
            )

    def show(self, folder: Path | None, name: str) -> None:
        """Print, and write `folder/name.json`."""
        print(f"\n{self.title}")
        keys = list(dict.fromkeys(key for row in self.rows for key in row))
        cells = [[str(row.get(key, "")) for key in keys] for row in self.rows]
        widths = [max(len(c[i]) for c in [keys, *cells]) for i in range(len(keys))]
        for line in [keys, *cells]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            machine = {"python": platform.python_version(), "torch": torch.__version__}
            content = {"title": self.title, "machine": machine, "rows": self.rows}
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
