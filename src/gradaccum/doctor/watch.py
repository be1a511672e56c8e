"""`ga.watch()`: the doctor without the command line."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from gradaccum.doctor.arrive import head, ledger
from gradaccum.doctor.diagnose import diagnose
from gradaccum.doctor.hooks.install import install
from gradaccum.doctor.trace.model import Trace
from gradaccum.doctor.trace.recorder import Recorder
from gradaccum.doctor.trace.sink import ListSink
from gradaccum.errors import LoopError
from gradaccum.records import Finding
from gradaccum.records.diagnosis import Diagnosis

__all__ = ["Watch", "watch"]


class Watch:
    """What `watch()` returns: a context manager that records the training inside it.

    ```python
    with ga.watch() as trace:
        train(model, optimizer)
    print(trace.report())
    ```
    """

    _running: Watch | None = None

    def __init__(self) -> None:
        self._sink = ListSink()
        self._recorder: Recorder | None = None
        self._remove: Any = None
        self._diagnosis: Diagnosis | None = None

    def __enter__(self) -> Watch:
        if Watch._running is not None or self._remove is not None:
            raise LoopError(
                "watch-nested",
                "A `watch()` is running already.",
                got="`with ga.watch()` inside another",
                expected="one at a time",
                do="watch the whole loop once, or leave the first before the second begins",
            )
        self._recorder = Recorder(torch, self._sink, head(torch), ledger())
        self._remove = install(self._recorder)
        Watch._running = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Stop watching, as leaving the block does; a second time it does nothing."""
        if Watch._running is not self:
            return
        Watch._running = None
        if self._recorder is not None:
            self._recorder.finish(error)
        self._remove()

    @property
    def diagnosis(self) -> Diagnosis:
        """The judgement of what was seen; once the block is left."""
        if self._diagnosis is None:
            if self._remove is None or Watch._running is self:
                raise LoopError(
                    "watch-running",
                    "There is no diagnosis before the block is left.",
                    got="`trace.diagnosis` inside `with ga.watch() as trace:`",
                    expected="the loop inside the block, the question after it",
                    do="move the line below the block, or call `close()` first, as in a test "
                    "with the fixture",
                )
            if not self._sink.lines:
                self._sink.write({"t": "head", "version": 1, **head(torch)})
            trace = Trace.parse(self._sink.lines, "what was watched")
            self._diagnosis = diagnose(trace, "watch", 0)
        return self._diagnosis

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The faults that were found, as the linter reports them."""
        return self.diagnosis.findings

    def report(self, html: str | None = None, json: str | None = None) -> str:
        """The report as text.

        Args:
            html: also write the page there.
            json: also write the report there as JSON.
        """
        from gradaccum.doctor.assemble import write  # noqa: PLC0415 - with the reports, on demand
        from gradaccum.report import page, stored, terminal  # noqa: PLC0415 - the same

        if html is not None:
            write(Path(html), page.html(self.diagnosis))
        if json is not None:
            write(Path(json), stored.dump(self.diagnosis))
        return terminal.text(self.diagnosis, colour=False)


def watch() -> Watch:
    """Record the training inside a `with` block; unmodified code, hooks removed at its end.

    The hooks are the process's: all training in it is seen, whoever runs it.

    Example:
        ```python
        with ga.watch() as trace:
            train(model, optimizer)
        assert not trace.findings, trace.report()
        ```
    """
    return Watch()
