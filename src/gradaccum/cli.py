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


if __name__ == "__main__":
    main()
