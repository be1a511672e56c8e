"""`gradaccum lint` and `gradaccum explain`: arguments in, a report and an exit code out.

Plain argparse: this starts in a pre-commit hook on every commit, and typer alone takes longer than
linting a script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gradaccum.errors import GradaccumError, InputError, MissingExtraError
from gradaccum.faults import CATALOGUE, Fault, find
from gradaccum.lint.engine import Result, lint
from gradaccum.lint.files import sources
from gradaccum.lint.settings import Settings, load
from gradaccum.records import Finding

__all__ = ["explain", "run"]

CLEAN, FOUND, USAGE = 0, 1, 2


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
        "--jobs", type=int, metavar="N", help="processes; one a processor if not given"
    )
    parser.add_argument("--stdin-name", default="<stdin>", metavar="PATH",
                        help="what standard input is called in the report")  # fmt: skip
    parser.add_argument("--diff", action="store_true", help="show what --fix would change")
    parser.add_argument("--fix", action="store_true", help="mend what can be mended for certain")
    return parser


def run(argv: Sequence[str]) -> int:
    """Lint; returns the exit code."""
    options = _parser().parse_args(argv)
    settings = load(options.select, options.ignore)
    wanted, problems = sources.collect([p for p in options.paths if p != "-"], settings.exclude)
    texts: list[sources.Source] = []
    if "-" in options.paths:
        texts.append(sources.Source(options.stdin_name, sys.stdin.buffer.read()))
    for path in wanted:
        try:
            texts.append(sources.read(path))
        except InputError as problem:  # noqa: PERF203 - one bad file must not stop the others
            problems.append(problem)
    result = lint(texts, settings, options.jobs)
    if options.fix or options.diff:
        return _mend(result, options, settings)
    _write(_report(result, options.format, options.output), options.output)
    for problem in problems:
        sys.stderr.write(f"gradaccum: {problem.problem} See docs/messages.md#{problem.slug}\n")
    if problems:
        return USAGE
    return FOUND if any(item.severity != "note" for item in result.findings) else CLEAN


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


def _write(report: str, output: str | None) -> None:
    if output is None:
        if report:
            stream = sys.stdout
            encoding = stream.encoding or "utf-8"
            stream.write(report.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        return
    try:
        Path(output).write_text(report + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            "lint-output",
            f"cannot write {output}: {error.strerror}.",
            got=f"--output {output}",
            expected="a file in a folder that exists and that you may write to",
            do="--output another file, or leave it out and redirect the output",
        ) from None


def _mend(result: Result, options: argparse.Namespace, settings: Settings) -> int:
    try:
        from gradaccum.lint.mends.apply import mend  # noqa: PLC0415 - needs libcst, an extra
    except ModuleNotFoundError:
        raise MissingExtraError(
            "fix-missing", "`--fix` and `--diff` need libcst: pip install 'gradaccum[fix]'"
        ) from None

    left: list[Finding] = []
    changed = 0
    for path, source in result.texts.items():
        own = [item for item in result.findings if item.path == path]
        new, rest = mend(source, own, lambda text: lint([text], settings, 1).findings)
        left.extend(rest)
        if new == source.data:
            continue
        changed += 1
        if options.diff:
            _write(_difference(path, source.data, new), None)
        else:
            Path(path).write_bytes(new)
    verb = "would change" if options.diff else "changed"
    _write(f"{verb} {changed} file{'s' if changed != 1 else ''}; {len(left)} findings left.", None)
    return FOUND if left or (options.diff and changed) else CLEAN


def _difference(path: str, old: bytes, new: bytes) -> str:
    import difflib  # noqa: PLC0415 - beside its only use

    before = old.decode("utf-8", "replace").splitlines(keepends=True)
    after = new.decode("utf-8", "replace").splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, path, path))


def explain(argv: Sequence[str]) -> int:
    """Explain a code; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gradaccum explain", description="Say what a fault is, why it hurts, how to mend it."
    )
    parser.add_argument("codes", nargs="*", metavar="CODE")
    parser.add_argument("--list", action="store_true", help="all codes, one a line")
    options = parser.parse_args(argv)
    if options.list or not options.codes:
        _write("\n".join(f"{code}  {fault.title}" for code, fault in CATALOGUE.items()), None)
        return CLEAN
    for code in options.codes:
        fault = find(code)
        if fault is None:
            raise InputError(
                "lint-unknown-code",
                f"no fault has the code {code}.",
                got=code,
                expected="a code such as GA102",
                do="gradaccum explain --list",
            )
        _write(_page(fault), None)
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
