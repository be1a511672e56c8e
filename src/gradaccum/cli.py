"""The command line: the only place that prints errors and sets exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gradaccum.errors import GradaccumError

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


if __name__ == "__main__":
    main()
