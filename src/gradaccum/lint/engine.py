"""From sources to findings, on as many processors as help."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradaccum.faults import CATALOGUE
from gradaccum.lint.collector import paused
from gradaccum.lint.files.program import Module, Program, parse, parse_older
from gradaccum.lint.files.slicing import slice_module
from gradaccum.lint.files.sources import Source
from gradaccum.lint.rules.hits import Hit
from gradaccum.lint.settings import INTERNAL, SYNTAX, Settings, silenced
from gradaccum.records import Evidence, Finding

__all__ = ["Result", "lint", "lint_source"]

_MAYBE = re.compile(rb"backward|configure_optimizers|\.\s*step\b|zero_grad|\.grad\b")
"""A file without any of these cannot hold a training loop."""
_HELPS = re.compile(rb"DataParallel|\bDDP\b|no_sync|[Oo]ptim|\.\s*eval\b")
"""What a file without a loop may make of a model that is trained elsewhere: it is walked as well,
if it calls the loop in another given file."""
_PARALLEL = 12
"""Training files from which on more processes pay for their start."""


@dataclass(slots=True)
class Result:
    """The findings of one run."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    texts: dict[str, Source] = field(default_factory=dict)


def lint(sources: Sequence[Source], settings: Settings, jobs: int | None = None) -> Result:
    """Lint all sources; functions are followed from file to file among them."""
    result = Result(files=len(sources), texts={source.path: source for source in sources})
    texts: dict[str, str | bytes] = {
        source.path: source.data for source in sources if _leads_on(source)
    }
    training = sum(1 for source in sources if _MAYBE.search(source.data))
    workers = min(jobs if jobs else (os.cpu_count() or 1), 1 + training // _PARALLEL)
    if workers > 1 and sys.platform != "emscripten":
        result.findings = _parallel(sources, texts, settings, workers)
    else:
        program = Program(texts)
        for source in sources:
            result.findings.extend(lint_source(source, program, settings, result.texts))
    result.findings = _once(result.findings, sources)
    return result


def _leads_on(source: Source) -> bool:
    """Whether a loop may be followed into a file; through a package's own, to others of it."""
    name = source.path.replace("\\", "/").rsplit("/", 1)[-1]
    return bool(name == "__init__.py" or _MAYBE.search(source.data) or _HELPS.search(source.data))


def _once(findings: list[Finding], sources: Sequence[Source]) -> list[Finding]:
    """Each finding once, in the order of the files: two roots may lead to one helper."""
    rank = {source.path: index for index, source in enumerate(sources)}
    unique = {(item.path, item.line, item.column, item.code): item for item in findings}
    return sorted(
        unique.values(),
        key=lambda item: (
            rank.get(item.path.split(":cell ")[0], 0),
            item.path,
            item.line,
            item.code,
        ),
    )


_shared: tuple[Program, Settings, dict[str, Source]] | None = None


def _start(texts: dict[str, str | bytes], settings: Settings, known: dict[str, Source]) -> None:
    global _shared
    _shared = Program(texts), settings, known


def _one(source: Source) -> list[Finding]:
    assert _shared is not None
    return lint_source(source, *_shared)


def _parallel(
    sources: Sequence[Source], texts: dict[str, str | bytes], settings: Settings, workers: int
) -> list[Finding]:
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415 - 30 ms for many files only

    from gradaccum.lint import judge  # noqa: F401, PLC0415 - so that each process has it by forking

    known = {source.path: source for source in sources if source.path in texts}
    shared = (texts, settings, known)
    with ProcessPoolExecutor(workers, initializer=_start, initargs=shared) as pool:
        return [finding for found in pool.map(_one, sources, chunksize=4) for finding in found]


def lint_source(
    source: Source, program: Program, settings: Settings, known: dict[str, Source] | None = None
) -> list[Finding]:
    """The findings of one source that the settings want and no `# noqa` covers."""
    with paused():
        return _lint_source(source, program, settings, known)


def _lint_source(
    source: Source, program: Program, settings: Settings, known: dict[str, Source] | None
) -> list[Finding]:
    places = {**(known or {}), source.path: source}
    hits: list[Hit] = []
    cells = [
        Hit(SYNTAX, source.path, line, column, _unparsed("cell", reason))
        for line, column, reason in source.broken
    ]
    try:
        if _MAYBE.search(source.data) or _HELPS.search(source.data):
            module, hits = _parsed(program, source)
            program.add(module)
            if _MAYBE.search(source.data) or slice_module(module, program).foreign:
                hits = [*hits, *_deep(program, module)]
        elif source.data.strip():
            parse(source.data, source.path)
    except (SyntaxError, ValueError) as error:
        hits = [_broken(source.path, error)]
    except (RecursionError, MemoryError):
        hits = []  # too deep to follow, so nothing can be proved
    except Exception as error:  # noqa: BLE001 - one file must not stop the others
        reason = f"the linter failed here ({type(error).__name__}: {error}); please report it"
        hits = [Hit(INTERNAL, source.path, 1, 0, reason)]
    return [
        _finding(one, places)
        for one in (*cells, *hits)
        if one.code in settings.codes
        and one.path in places
        and not silenced(places[one.path].text(one.line), one.code)
    ]


def _parsed(program: Program, source: Source) -> tuple[Module, list[Hit]]:
    """A file, also of an older Python; with the finding that it does not parse as this one."""
    module = program.modules.get(source.path)
    if module is None:
        try:
            module = parse(source.data, source.path)
        except SyntaxError as error:
            module = parse_older(source.data, source.path, error)
            if module is None:
                raise
    refused = module.refused
    return module, [_broken(source.path, refused)] if refused is not None else []


def _deep(program: Program, module: Module) -> list[Hit]:
    """Judge; where the usual stack is too short, with a long one: a thread's is ours to choose."""
    from gradaccum.lint.judge import judge  # noqa: PLC0415 - a third of the start, often unneeded

    try:
        return judge(program, module)
    except RecursionError:
        program.slices.clear()  # what was half done
    found: list[list[Hit]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(judge(program, module))
        except Exception as error:  # noqa: BLE001 - raised again below, where it can be seen
            failed.append(error)

    limit = sys.getrecursionlimit()
    size = threading.stack_size(256 * 1024 * 1024)
    try:
        sys.setrecursionlimit(max(limit, 20_000))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    if failed:
        raise failed[0]
    return found[0]


def _broken(path: str, error: SyntaxError | ValueError) -> Hit:
    line = getattr(error, "lineno", None) or 1
    column = max(getattr(error, "offset", None) or 1, 1) - 1
    reason = getattr(error, "msg", None) or str(error)
    return Hit(SYNTAX, path, line, column, _unparsed("file", reason))


def _unparsed(what: str, reason: str) -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    return f"this {what} does not parse as Python {version}: {reason}"


def _finding(one: Hit, places: dict[str, Source]) -> Finding:
    fault = CATALOGUE.get(one.code)
    path, line = places[one.path].place(one.line)
    before = places[one.path].text(one.line).encode()[: one.column]
    # `ast` counts bytes, people do not
    column = one.column + 1 - (len(before) - len(before.decode("utf-8", "ignore")))
    evidence = []
    for other, at, what in one.evidence:
        where, row = places[other].place(at) if other in places else (other, at)
        evidence.append(Evidence(where, row, what))
    return Finding(
        one.code,
        fault.severity if fault else ("note" if one.code == INTERNAL else "error"),
        path,
        line,
        column,
        fault.title if fault else ("not linted" if one.code == INTERNAL else "does not parse"),
        one.message,
        tuple(evidence),
        fault.mend if fault else "The other files were linted.",
    )
