"""The command line: the only place that prints errors and sets exit codes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradaccum.demo.options import DemoOptions
from gradaccum.errors import GradaccumError
from gradaccum.planner.lengths import read_lengths
from gradaccum.planner.pack import plan
from gradaccum.planner.usual import compare_json, compare_text, usual_loop

__all__ = ["app", "main"]

app = typer.Typer(
    name="gradaccum",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact gradient accumulation for PyTorch: the same gradient, and the proof.",
)


def main() -> None:
    """Run the command line; exit 0 done, 2 for what the user can mend, 130 on Ctrl-C."""
    try:
        app()
    except GradaccumError as error:
        print(f"gradaccum: {error}", file=sys.stderr)  # noqa: T201 - this is the place that prints
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@app.callback(invoke_without_command=True)
def _front(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        import gradaccum  # noqa: PLC0415 - reads package metadata, which only this option needs

        typer.echo(f"gradaccum {gradaccum.__version__}")
        raise typer.Exit


@app.command("plan")
def _plan(
    file: Annotated[
        str,
        typer.Argument(
            help="Lengths of the samples: whole numbers, or a JSON list of them; - reads stdin."
        ),
    ],
    budget: Annotated[
        int | None,
        typer.Option(help="Most padded elements in a micro-batch.", show_default="size * longest"),
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="Most micro-batches.")] = None,
    overhead: Annotated[
        int | None,
        typer.Option(
            help="Price of one more micro-batch, in padded elements.",
            show_default="budget / 64, at least 128",
        ),
    ] = None,
    size: Annotated[int, typer.Option(help="Samples in a micro-batch of the usual loop.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Print which samples form which micro-batch, and what the usual loop would waste."""
    lengths = read_lengths(file)
    usual = usual_loop(lengths, size)
    if budget is None and microbatches is None:
        budget = size * max(lengths)
    found = plan(lengths, budget=budget, microbatches=microbatches, overhead=overhead)
    typer.echo(compare_json(found, usual) if as_json else compare_text(found, usual))


@app.command("demo")
def _demo(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    updates: Annotated[
        int | None,
        typer.Option(
            help="Updates that each run makes.", show_default="8, or what 2 minutes allow"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Functions in a batch.")] = 64,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the numbers.")] = Path(
        "demo-out"
    ),
    seed: Annotated[int, typer.Option(help="Of the initial weights and the data's order.")] = 0,
    max_length: Annotated[int, typer.Option(help="Tokens at which a function is cut.")] = 1024,
) -> None:
    """Train on Python's own library in three ways, and compare time, memory and updates."""
    options = DemoOptions(device, updates, batch, out, seed, max_length)
    options.check()
    # Threads that spin long while they wait fight over the cores when anything else runs, and those
    # that sleep at once are slow to wake: torch's OpenMP reads this when it is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    from gradaccum.demo.command import run_demo  # noqa: PLC0415 - loads torch and matplotlib

    run_demo(options, Console())


_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command("lint", context_settings=_PASS_ON, help="Find faults in training loops.")
def _lint(context: typer.Context) -> None:
    raise typer.Exit(_checking("lint", context.args))


@app.command("explain", context_settings=_PASS_ON, help="Explain a fault by its code.")
def _explain(context: typer.Context) -> None:
    raise typer.Exit(_checking("explain", context.args))


def _checking(name: str, arguments: list[str]) -> int:
    from gradaccum.lint import command  # noqa: PLC0415 - front.py starts these two without typer

    return command.main(name, arguments)


@app.command("doctor", context_settings=_PASS_ON, help="Run a script and judge its loop.")
def _doctor(context: typer.Context) -> None:
    raise typer.Exit(_watching("doctor", context.args))


@app.command("report", context_settings=_PASS_ON, help="Show the doctor's report again.")
def _report(context: typer.Context) -> None:
    raise typer.Exit(_watching("report", context.args))


def _watching(name: str, arguments: list[str]) -> int:
    from gradaccum.doctor import command  # noqa: PLC0415 - front.py starts these two without typer

    return command.main(name, arguments)


if __name__ == "__main__":
    main()
