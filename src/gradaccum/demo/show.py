"""The demo in the terminal: progress while it runs, then the verdict and the table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from gradaccum.demo.results import DemoResult, RunResult, megabytes, seconds, short

__all__ = ["line", "progress_bar", "show"]


def progress_bar(console: Console) -> Progress:
    """Progress over steps of unequal length."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def line(number: int, done: Sequence[tuple[str, float, float]]) -> str:
    """One update in every run: its title, seconds and loss."""
    parts = (f"{title} {seconds(time)} {loss:.2f}" for title, time, loss in done)
    return f"{number:>2}  " + " · ".join(parts)


def show(result: DemoResult, console: Console) -> None:
    """Print the verdict, then every number it rests on."""
    style = "bold green" if result.same else "bold red"
    console.print(f"\n{result.verdict()}\n", style=style, highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in (
        "update time\nof usual",
        "peak memory\nof whole",
        "tokens",
        "computed\nof tokens",
        "distance",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in result.runs:
        table.add_row(*_row(run, result), style="bold" if run is result.ours else "")
    console.print(table)
    console.print(
        "Time: median. Memory: most bytes alive at once, beyond weights, optimizer and data.\n"
        "Distance: first gradient from that of the whole batch in float64, relative.\n",
        style="dim",
        highlight=False,
    )


def _row(run: RunResult, result: DemoResult) -> tuple[str, ...]:
    return (
        run.title,
        f"{seconds(run.time)}  {run.time / result.usual.time:.2f}",
        f"{megabytes(run.peak_bytes)}  {run.peak_bytes / result.whole.peak_bytes:.2f}",
        f"{run.tokens:,}",
        f"{run.padded:,}  {run.waste:.2f}",
        short(run.distance),
    )
