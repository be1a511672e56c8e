"""What the demo is asked to do, checked before anything heavy is loaded."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gradaccum.errors import InputError, MissingExtraError

__all__ = ["DemoOptions"]

_DEFAULT_UPDATES = 8
_PATIENCE = 120.0


@dataclass(frozen=True)
class DemoOptions:
    """Settings of one demo.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        updates: updates that each run makes; by default 8, or as many as 2 minutes allow.
        batch: functions in a batch.
        out: folder for the plot and the numbers; made where it is missing.
        seed: of the initial weights and of the order of the data.
        max_length: tokens at which a function is cut.
    """

    device: str = "cpu"
    updates: int | None = None
    batch: int = 64
    out: Path = Path("demo-out")
    seed: int = 0
    max_length: int = 1024

    @property
    def most_updates(self) -> int:
        """Updates to prepare for."""
        return _DEFAULT_UPDATES if self.updates is None else self.updates

    def enough(self, updates: int, seconds: float) -> bool:
        """Whether to stop after `updates` in `seconds` rather than begin another."""
        if self.updates is not None:
            return updates >= self.updates
        return updates >= _DEFAULT_UPDATES or seconds > _PATIENCE

    @property
    def budget(self) -> int:
        """Padded tokens that one of our micro-batches may hold: two of the longest samples."""
        return 2 * self.max_length

    def check(self) -> None:
        """Refuse what cannot be done, without torch.

        Raises:
            InputError: for a value that is out of range, or a folder that cannot be written.
            MissingExtraError: where torch or matplotlib is not installed.
        """
        for name, value, least, most in (
            ("--updates", self.most_updates, 1, 10**6),
            ("--batch", self.batch, 1, 10**6),
            ("--seed", self.seed, 0, 2**63 - 1),
            ("--max-length", self.max_length, 2, 10**6),
        ):
            if not least <= value <= most:
                raise InputError(
                    "demo-options",
                    f"{name} is out of range.",
                    got=f"{name} {value}",
                    expected=f"from {least:,} to {most:,}",
                    do="gradaccum demo --help lists the options and what they are if left out",
                )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise InputError(
                "demo-device",
                "the demo does not know this device.",
                got=f"--device {self.device}",
                expected="cpu, cuda or cuda:N",
                do="gradaccum demo --device cpu",
            )
        self._check_installed()
        self._check_out()

    def _check_installed(self) -> None:
        for module in ("torch", "matplotlib"):
            if find_spec(module) is None:
                raise MissingExtraError(
                    "demo-missing",
                    f"The demo needs {module}, which is not installed: "
                    "pip install 'gradaccum[demo]'",
                )

    def _check_out(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.out):
                pass
        except OSError as error:
            raise InputError(
                "demo-out",
                "the folder for the results cannot be written.",
                got=f"--out {self.out}: {error.strerror or error}",
                expected="a folder, existing or to be made, that you may write to",
                do="gradaccum demo --out FOLDER",
            ) from None
