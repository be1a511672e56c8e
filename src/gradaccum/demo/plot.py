"""The demo's picture: what an update costs above, whether it is the same update below."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import MaxNLocator

from gradaccum.demo.results import DemoResult, RunResult, megabytes, seconds, short

__all__ = ["draw"]

# Okabe and Ito's palette: told apart by every kind of colour vision, and in grey.
_COLOURS = {"whole": "#5b6470", "usual": "#e69f00", "ours": "#0072b2"}
_INK, _FAINT = "#1f2328", "#6e7781"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _FAINT,
    "axes.edgecolor": "#c9ced6",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "svg.fonttype": "none",
    "svg.hashsalt": "gradaccum",
}


def draw(result: DemoResult, folder: Path) -> tuple[Path, Path]:
    """Write `demo.png` and `demo.svg` into `folder`, and return their paths."""
    paths = folder / "demo.png", folder / "demo.svg"
    with context(_STYLE):
        # A figure of its own, without pyplot: no window system is asked, and nothing is left open.
        figure = Figure(figsize=(14, 8.4), facecolor="white")
        FigureCanvasAgg(figure)
        _fill(figure, result)
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _fill(figure: Figure, result: DemoResult) -> None:
    figure.text(
        0.045, 0.965, textwrap.fill(result.verdict(), 110), size=15, weight="bold", va="top"
    )
    figure.text(0.045, 0.875, _subtitle(result), size=10, color=_FAINT, va="top")
    grid = figure.add_gridspec(
        2, 3, left=0.115, right=0.975, top=0.785, bottom=0.075, wspace=0.36, hspace=0.42
    )
    axes = [figure.add_subplot(grid[row, column]) for row in range(2) for column in range(3)]
    _time(axes[0], result)
    _memory(axes[1], result)
    _tokens(axes[2], result)
    _distance(axes[3], result)
    _losses(axes[4], result)
    _gaps(axes[5], result)


def _subtitle(result: DemoResult) -> str:
    settings = result.settings
    return (
        f"Batches of {settings['batch']} functions of Python's standard library, cut at "
        f"{settings['max_length']:,} tokens · decoder of {int(settings['parameters']) / 1e6:.2f} M "
        f"parameters · {settings['device']}, {settings['threads']} threads · "
        f"micro-batches of at most {settings['budget']:,} padded tokens"
    )


def _bars(
    axes: Axes,
    result: DemoResult,
    value: Callable[[RunResult], float],
    label: Callable[[RunResult], str],
) -> None:
    rows = range(len(result.runs))
    for row, run in zip(rows, result.runs, strict=True):
        axes.barh(row, value(run), height=0.62, color=_COLOURS[run.name])
    largest = max(map(value, result.runs))
    for row, run in zip(rows, result.runs, strict=True):
        axes.text(value(run) + 0.02 * largest, row, label(run), va="center", size=10)
    _rows(axes, result.runs)
    axes.set_xlim(0, 1.5 * largest)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _rows(axes: Axes, runs: Sequence[RunResult]) -> None:
    axes.set_yticks(range(len(runs)), [run.title for run in runs], color=_INK)
    axes.set_ylim(len(runs) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)


def _time(axes: Axes, result: DemoResult) -> None:
    usual = result.usual.time
    _bars(
        axes,
        result,
        lambda run: run.time,
        lambda run: seconds(run.time) + _times(run.time / usual, run is result.usual),
    )
    axes.set_title("Median update time (of the usual loop's)")


def _memory(axes: Axes, result: DemoResult) -> None:
    whole = result.whole.peak_bytes
    _bars(
        axes,
        result,
        lambda run: run.peak_bytes / 1e6,
        lambda run: megabytes(run.peak_bytes) + _times(run.peak_bytes / whole, run is result.whole),
    )
    axes.set_title("Peak memory (of the whole batch's)")


def _times(ratio: float, reference: bool) -> str:
    return "" if reference else f"  ({ratio:.2f})"


def _tokens(axes: Axes, result: DemoResult) -> None:
    _bars(axes, result, lambda run: run.padded, lambda run: f"{run.waste:.2f} of the real")
    for row, run in enumerate(result.runs):
        padding = run.padded - run.tokens
        axes.barh(
            row, padding, left=run.tokens, height=0.62, color="white", alpha=0.62, linewidth=0
        )
    axes.axvline(result.ours.tokens, color=_INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_title("Tokens computed (pale: padding)")


def _distance(axes: Axes, result: DemoResult) -> None:
    for row, run in enumerate(result.runs):
        shown = max(run.distance, 1e-17)
        axes.plot(shown, row, "o", color=_COLOURS[run.name], markersize=11)
        axes.text(shown * 2.2, row, short(run.distance), va="center", size=10)
    _rows(axes, result.runs)
    shown = [max(run.distance, 1e-17) for run in result.runs]
    axes.set_xscale("log")
    axes.set_xlim(min(shown) / 10, max(1.0, *shown) * 30)
    axes.grid(axis="x", color="#eaeef2")
    axes.set_axisbelow(True)
    axes.set_title("Distance from the float64 whole batch")
    axes.set_xlabel("first update's gradient, relative, log scale")


def _losses(axes: Axes, result: DemoResult) -> None:
    for run in result.runs:
        # Ours lies on the whole batch's line: a wide one below, dashes above, and both are seen.
        axes.plot(
            range(1, len(run.losses) + 1),
            run.losses,
            color=_COLOURS[run.name],
            label=run.title,
            linewidth=6 if run is result.whole else 2,
            alpha=0.4 if run is result.whole else 1,
            linestyle=(0, (4, 2)) if run is result.ours else "-",
        )
    axes.legend(frameon=False, loc="upper right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Loss of each batch before its update")
    axes.set_xlabel("update")
    axes.set_ylabel("nats per token")


def _gaps(axes: Axes, result: DemoResult) -> None:
    # Equal to the last bit has no place on a log scale; no float32 is known better than this.
    floor = 6e-8
    for run in (result.usual, result.ours):
        gaps = [
            max(floor, abs(a - b) / abs(b))
            for a, b in zip(run.losses, result.whole.losses, strict=True)
        ]
        axes.plot(
            range(1, len(gaps) + 1),
            gaps,
            "o-",
            color=_COLOURS[run.name],
            label=run.title,
            markersize=4.5,
            linewidth=1.5,
        )
    axes.set_yscale("log")
    axes.grid(axis="y", color="#eaeef2")
    axes.legend(frameon=False, loc="best")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Drift of that loss from the whole batch")
    axes.set_xlabel("update")
    axes.set_ylabel("relative, log scale")
