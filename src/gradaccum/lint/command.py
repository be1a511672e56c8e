"""`gradaccum lint` and `gradaccum explain`: arguments in, a report and an exit code out.

Plain argparse: this starts in a pre-commit hook on every commit, and typer alone takes longer than
linting a script.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from gradaccum.errors import GradaccumError, InputError, MissingExtraError
from gradaccum.faults import CATALOGUE, Fault, find
from gradaccum.lint.engine import Result, lint
from gradaccum.lint.files import sources
from gradaccum.lint.settings import INTERNAL, SYNTAX, Settings, load

__all__ = ["explain", "run"]

CLEAN, FOUND, USAGE = 0, 1, 2


_OWN = {
    INTERNAL: "not linted: the linter itself failed on this file. Please report it.",
    SYNTAX: "does not parse: the Python that runs the linter cannot read this file, or this cell "
    "of a notebook.\nMend what the message names; newer syntax asks for a newer Python.",
}
"""Codes that are no faults of a training loop."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradaccum lint",
        description="Find faults in training loops from their source alone. Exit 0 clean, "
        "1 findings, 2 usage.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, patterns, or -")
    parser.add_argument("--format", choices=("text", "json", "sarif", "github"), default="text")
    parser.add_argument("--select", action="append", default=[], metavar="CODES",
                        help="report only these codes or beginnings of codes")  # fmt: skip
    parser.add_argument("--ignore", action="append", default=[], metavar="CODES",
                        help="leave these out")  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="write the report there")
    parser.add_argument(
        "--jobs", type=_jobs, metavar="N", help="processes; one a processor if not given"
    )
    parser.add_argument("--stdin-name", default="<stdin>", metavar="PATH",
                        help="what standard input is called in the report")  # fmt: skip
    parser.add_argument(
        "--force-exclude",
        action="store_true",
        help="leave out what `exclude` names even where it is named here",
    )
    mends = parser.add_mutually_exclusive_group()
    mends.add_argument("--diff", action="store_true", help="show what --fix would change")
    mends.add_argument(
        "--fix",
        action="store_true",
        help="mend what can be mended for certain, in the files; standard input is mended to "
        "standard output",
    )
    return parser


def _jobs(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is no number of processes, at least 1")
    return number


def run(argv: Sequence[str]) -> int:
    """Lint; returns the exit code."""
    options = _parser().parse_args(argv)
    settings = load(options.select, options.ignore)
    wanted, problems = sources.collect(
        [p for p in options.paths if p != "-"], settings.exclude, named=options.force_exclude
    )
    texts: list[sources.Source] = []
    reads: list[Callable[[], sources.Source]] = [partial(sources.read, path) for path in wanted]
    if "-" in options.paths:
        data = sys.stdin.buffer.read()
        reads.insert(0, partial(sources.piped, options.stdin_name, data))
    for read in reads:
        try:
            texts.append(read())
        except InputError as problem:  # noqa: PERF203 - one bad file must not stop the others
            problems.append(problem)
    result = lint(texts, settings, options.jobs)
    changed = 0
    if options.fix or options.diff:
        result, changed = _mend(result, options, settings)
    if (result.files or not problems) and not options.diff:
        _write(_report(result, options.format, options.output), options.output,
               sys.stderr if options.fix and "-" in options.paths else sys.stdout)  # fmt: skip
    for problem in problems:
        sys.stderr.write(f"gradaccum: {problem.problem} See docs/messages.md#{problem.slug}\n")
    if problems:
        return USAGE
    found = any(item.severity != "note" for item in result.findings)
    return FOUND if found or (options.diff and changed) else CLEAN


def _report(result: Result, form: str, output: str | None) -> str:
    from gradaccum.report import machine, text  # noqa: PLC0415 - parsing `--help` needs neither

    if form == "json":
        return machine.to_json(result.findings, result.files)
    if form == "sarif":
        from gradaccum import __version__  # noqa: PLC0415 - reads package metadata

        return machine.sarif(result.findings, str(__version__))
    if form == "github":
        return machine.github(result.findings)
    colour = output is None and sys.stdout.isatty()
    return text.render(result.findings, result.files, _excerpt(result), colour)


def _excerpt(result: Result) -> Callable[[str, int], str]:
    def excerpt(path: str, line: int) -> str:
        name, _, cell = path.partition(":cell ")
        source = result.texts.get(name)
        if source is None:
            return ""
        first = next((c.first for c in source.cells if str(c.number) == cell), 1)
        return source.text(line + first - 1)

    return excerpt


def _write(report: str, output: str | None = None, stream: TextIO = sys.stdout) -> None:
    try:
        if output is not None:
            Path(output).write_text(report + "\n", encoding="utf-8")
        elif report:
            encoding = stream.encoding or "utf-8"
            stream.write(report.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if output is None:
            # else Python tries once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise InputError(
            "lint-output",
            f"cannot write {output or 'the report'}: {error.strerror}.",
            got=f"--output {output}" if output else "an output that takes nothing more",
            expected="a file in a folder that exists and that you may write to",
            do="--output another file, or leave it out and redirect the output",
        ) from None


def _mend(result: Result, options: argparse.Namespace, settings: Settings) -> tuple[Result, int]:
    """Mend; returns what is left, and how many files changed."""
    try:
        # needs libcst, an extra
        from gradaccum.lint.mends.everywhere import difference, mended  # noqa: PLC0415
    except ModuleNotFoundError:
        raise MissingExtraError(
            "fix-missing", "`--fix` and `--diff` need libcst: pip install 'gradaccum[fix]'"
        ) from None

    done = mended(result, settings)
    piped = options.stdin_name if "-" in options.paths else None
    if options.diff:
        parts = [difference(path, result.texts[path].data, new) for path, new in done.texts.items()]
        _write("".join(parts).removesuffix("\n"), options.output)
    else:
        for path, new in done.texts.items():
            if path != piped:
                _overwrite(path, new)
        if piped in result.texts and not result.texts[piped].cells:
            sys.stdout.buffer.write(done.texts.get(piped, result.texts[piped].data))
            sys.stdout.flush()
    verb = "would change" if options.diff else "changed"
    left = len(done.left.findings)
    sys.stderr.write(f"{verb} {_many(len(done.texts), 'file')}; {_many(left, 'finding')} left.\n")
    return done.left, len(done.texts)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _overwrite(path: str, data: bytes) -> None:
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise InputError(
            "lint-output",
            f"cannot write {path}: {error.strerror}.",
            got=f"--fix {path}",
            expected="a file that you may write to",
            do="--diff, which shows what would change",
        ) from None


def explain(argv: Sequence[str]) -> int:
    """Explain a code; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gradaccum explain", description="Say what a fault is, why it hurts, how to mend it."
    )
    parser.add_argument("codes", nargs="*", metavar="CODE")
    parser.add_argument("--list", action="store_true", help="all codes, one a line")
    options = parser.parse_args(argv)
    if options.list or not options.codes:
        _write("\n".join(f"{code}  {fault.title}" for code, fault in CATALOGUE.items()))
        return CLEAN
    for code in options.codes:
        fault = find(code)
        if fault is None and code.upper() in _OWN:
            _write(f"{code.upper()} {_OWN[code.upper()]}")
            continue
        if fault is None:
            raise InputError(
                "lint-unknown-code",
                f"no fault has the code {code}.",
                got=code,
                expected="a code such as GA102",
                do="gradaccum explain --list",
            )
        _write(_page(fault))
    return CLEAN


def _page(fault: Fault) -> str:
    seen = "the linter" if fault.static else "the doctor only: the source alone does not show it"
    lines = [
        f"{fault.code} {fault.title} ({fault.severity})", "", fault.what, "", fault.reason, "",
        f"Mend: {fault.mend}", f"Seen by: {seen}", "", "Wrong:", "", _indented(fault.bad), "",
        "Right:", "", _indented(fault.good),
    ]  # fmt: skip
    return "\n".join(lines)


def _indented(code: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in code.splitlines())


def main(name: str, argv: Sequence[str]) -> int:
    """Run one of the two commands; errors in one line, exit 2."""
    try:
        return run(argv) if name == "lint" else explain(argv)
    except GradaccumError as error:
        sys.stderr.write(f"gradaccum: {error}\n")
        return USAGE
    except BrokenPipeError:
        sys.stderr.close()
        return CLEAN
