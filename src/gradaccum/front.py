"""Where the `gradaccum` command starts: what checks at once, all else through cli.py.

A pre-commit hook pays for every import, and typer alone costs more than linting a script; the
doctor's own process stays while the script runs.
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
    if sys.argv[1:2] in (["doctor"], ["report"]):
        from gradaccum.doctor import command as doctor  # noqa: PLC0415 - only what it needs

        try:
            sys.exit(doctor.main(sys.argv[1], sys.argv[2:]))
        except KeyboardInterrupt:
            sys.exit(130)
    from gradaccum import cli  # noqa: PLC0415 - typer and rich

    cli.main()
