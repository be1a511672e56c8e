"""`gradaccum doctor` and `gradaccum report`: what is asked for in, reports and an exit code out."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gradaccum.doctor.execute import Outcome, execute
from gradaccum.errors import GradaccumError, InputError
from gradaccum.records.diagnosis import Diagnosis

__all__ = ["main"]

USAGE = 2
_VALUED = {"--json", "--html", "--trace", "--perfetto"}


def main(name: str, argv: Sequence[str]) -> int:
    """Run one of the two commands; returns the exit code, or dies as the script did."""
    try:
        return doctor(argv) if name == "doctor" else report(argv)
    except GradaccumError as error:
        _say(f"gradaccum: {error}")
        return USAGE
    except BrokenPipeError:
        return 0


def _say(text: str) -> None:
    encoding = sys.stderr.encoding or "utf-8"
    try:
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # full or closed: the exit code is the script's all the same
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.close()


# -- doctor --------------------------------------------------------------------------------------


def _doctor_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradaccum doctor",
        usage="gradaccum doctor [options] (-m module | script.py | -) [arguments ...]",
        description="Run a script as `python` would, and say what its training loop really does. "
        "The exit code is the script's own.",
        allow_abbrev=False,
    )
    _outputs(parser)
    parser.add_argument("--trace", metavar="FILE", help="keep the trace there, as JSON lines")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no report")
    return parser


def _outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the report there as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the report there as one page")
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace that Perfetto opens")


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and from the script or `-m` on what is Python's."""
    i = 0
    while i < len(argv):
        word = argv[i]
        if word == "--":
            return list(argv[:i]), list(argv[i + 1 :])
        if word in ("-m", "-c", "-") or not word.startswith("-"):
            return list(argv[:i]), list(argv[i:])
        if word.startswith(("-m", "-c")):
            return list(argv[:i]), list(argv[i:])
        i += 2 if word in _VALUED else 1
    return list(argv), []


def doctor(argv: Sequence[str]) -> int:
    """Run a script under hooks and report."""
    own, script = _split(argv)
    parser = _doctor_parser()
    options = parser.parse_args(own)
    if not script or script in (["-m"], ["-c"]):
        raise InputError(
            "doctor-no-script",
            "there is nothing to run.",
            got="gradaccum doctor " + " ".join(argv),
            expected="a script, `-m module`, or - for standard input",
            do="gradaccum doctor train.py",
        )
    folder = Path(tempfile.mkdtemp(prefix="gradaccum-"))
    keep = False
    try:
        outcome = execute(script, folder)
        keep = not _reported(options, script, outcome, folder)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return _leave(outcome)


def _reported(
    options: argparse.Namespace, script: Sequence[str], outcome: Outcome, folder: Path
) -> bool:
    """Write all reports; whatever fails, the run's exit code and its trace are kept."""
    try:
        _report(options, script, outcome, folder)
    except GradaccumError as error:
        _say(f"gradaccum: {error}")
    except Exception as error:  # noqa: BLE001 - a fault of ours must not change the run's outcome
        _say(f"gradaccum doctor: no report: {type(error).__name__}: {error}")
    else:
        return True
    if any(folder.iterdir()):
        _say(f"gradaccum doctor: the trace is kept in {folder}")
        return False
    return True


def _report(
    options: argparse.Namespace, script: Sequence[str], outcome: Outcome, folder: Path
) -> None:
    from gradaccum.doctor import assemble  # noqa: PLC0415 - not needed while the script runs

    name = " ".join(script[:2]) if script[0] in ("-m", "-c") else script[0]
    traces = assemble.read(folder)
    failed: GradaccumError | None = None
    if options.trace and traces:
        try:
            assemble.keep(traces, options.trace)
        except GradaccumError as error:  # the other files are written all the same
            failed = error
    if not traces:
        if not options.quiet:
            _say("gradaccum doctor: no training was seen: " + assemble.why_nothing(outcome))
        return
    diagnoses = [assemble.diagnosis(t, name, outcome, len(traces)) for t in traces]
    try:
        if len(diagnoses) == 1 and diagnoses[0].run.ranks > 1:
            _write_as_rank(diagnoses[0], options)
        else:
            _write_all(diagnoses, options)
    except GradaccumError as error:
        if failed is not None:
            _say(f"gradaccum: {failed}")
        failed = error
    if not options.quiet:
        _say(_text(assemble.together(diagnoses)))
    if failed is not None:
        raise failed


def _text(diagnosis: Diagnosis) -> str:
    from gradaccum.report import terminal  # noqa: PLC0415 - not needed while the script runs

    return terminal.text(diagnosis, colour=sys.stderr.isatty())


def _leave(outcome: Outcome) -> int:
    """The script's exit code; or its death, if a signal killed it, as the shell would see it."""
    if outcome.status >= 0:
        return outcome.status
    number = -outcome.status
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script has left the core already
        signal.signal(number, signal.SIG_DFL)
    except (OSError, ValueError):
        pass  # SIGKILL has no handler
    sys.stdout.flush()
    os.kill(os.getpid(), number)
    return 128 + number


# -- report --------------------------------------------------------------------------------------


def report(argv: Sequence[str]) -> int:
    """Show a report or a trace again."""
    parser = argparse.ArgumentParser(
        prog="gradaccum report",
        description="Show again what `gradaccum doctor --json` or `--trace` has written.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="a report (JSON) or a trace (JSON lines)")
    _outputs(parser)
    options = parser.parse_args(argv)
    from gradaccum.doctor import assemble  # noqa: PLC0415 - `--help` needs none of it

    diagnosis = assemble.load(options.file)
    _write_all([diagnosis], options)
    if not (options.json or options.html or options.perfetto):
        sys.stdout.write(_text(diagnosis) + "\n")
    return 0


def _write_as_rank(diagnosis: Diagnosis, options: argparse.Namespace) -> None:
    """Where each rank has a doctor of its own: its own files, and from the first one for all."""
    from gradaccum.doctor import assemble  # noqa: PLC0415 - not needed while the script runs

    run = diagnosis.run
    own = argparse.Namespace(**vars(options))
    for form in ("json", "html", "perfetto"):
        path = getattr(options, form)
        setattr(own, form, str(assemble.ranked(Path(path), run.rank)) if path else None)
    _write_all([diagnosis], own)
    if run.rank == 0 and options.json:
        paths = [assemble.ranked(Path(options.json), rank) for rank in range(run.ranks)]
        everybody = assemble.gather(paths)
        alone = argparse.Namespace(**{**vars(options), "ranked": False})
        _write_all(everybody or [diagnosis], alone)


def _write_all(diagnoses: Sequence[Diagnosis], options: argparse.Namespace) -> None:
    """Each format that is asked for: of all processes together, and of each beside it."""
    from gradaccum.doctor import assemble  # noqa: PLC0415 - `--help` needs none of it
    from gradaccum.report import page, perfetto, stored  # noqa: PLC0415 - the same

    writers: dict[str, Callable[[Diagnosis], str]] = {
        "json": stored.dump, "html": page.html, "perfetto": perfetto.chrome_trace,
    }  # fmt: skip
    failed: list[InputError] = []
    for form, writer in writers.items():
        path = getattr(options, form)
        if not path:
            continue
        try:
            assemble.write(Path(path), writer(assemble.together(diagnoses)))
            own_too = len(diagnoses) > 1 and getattr(options, "ranked", True)
            for diagnosis in diagnoses if own_too else ():
                own = assemble.ranked(Path(path), diagnosis.run.rank)
                assemble.write(own, writer(diagnosis))
        except InputError as error:
            failed.append(error)
    for error in failed[:-1]:
        _say(f"gradaccum: {error}")
    if failed:
        raise failed[-1]
