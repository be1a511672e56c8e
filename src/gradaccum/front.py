"""Where the `gradaccum` command starts: `lint` and `explain` at once, all else through cli.py.

A pre-commit hook pays for every import, and typer alone costs more than linting a script.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] in (["lint"], ["explain"]):
        from gradaccum.lint import command  # noqa: PLC0415 - only what this command needs

        try:
            sys.exit(command.main(sys.argv[1], sys.argv[2:]))
        except KeyboardInterrupt:
            sys.exit(130)
    from gradaccum import cli  # noqa: PLC0415 - typer and rich

    cli.main()
