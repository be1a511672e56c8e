"""Diagnoses made by hand, as rich as a doctor's: what the reports are tested and looked at with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gradaccum.records import Evidence, Finding
from gradaccum.records.diagnosis import (
    Diagnosis,
    Event,
    MicrobatchSeen,
    OptimizerSeen,
    ParameterSeen,
    Run,
    TermSeen,
    WindowSeen,
)

MIB = 2**20

HOSTILE = (
    "</script><img src=x onerror=alert(1)>\"'`&{{7*7}}\u202egnp.exe\u2066\x1b[31m\x00😀\u2028<!--"
)
"""Ends scripts and attributes, opens comments and templates, turns text round, colours text."""

LOOP = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
criterion = nn.CrossEntropyLoss(ignore_index=-100)

for step, (x, y) in enumerate(loader):
    out = model(x)
    loss = criterion(out, y)  # the mean over this micro-batch
    loss.backward()
    if (step + 1) % 4 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
"""

TUTORIAL = """\
import torch

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.tensor([[1.0]], requires_grad=True)
y = torch.tensor([[2.0]])

for _ in range(3):
    pred = model(x)
    loss = ((pred - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param += -optimizer.param_groups[0]['lr'] * param.grad.data

print(model.weight)
"""


def lines(text: str) -> dict[int, str]:
    """Source lines by number, from 1."""
    return dict(enumerate(text.splitlines(), 1))


@dataclass
class Clock:
    """Deals out times that look like a run's."""

    now: float = 0.05
    events: list[Event] = field(default_factory=list)

    def event(self, kind: str, path: str, line: int, seconds: float, what: str = "") -> Event:
        """One event from now on."""
        made = Event(kind, path, line, self.now, self.now + seconds, what)
        self.now += seconds
        self.events.append(made)
        return made

    def taken(self) -> tuple[Event, ...]:
        """The events since the last call."""
        events, self.events = tuple(self.events), []
        return events


def wobble(index: int, spread: float = 0.2) -> float:
    """A number about 1 that looks random and is the same every time."""
    return 1 + spread * (((index * 7919 + 13) % 101) / 50 - 1)


def window(
    clock: Clock,
    index: int,
    weights: list[float | None],
    expected: float | None,
    *,
    path: str = "train.py",
    optimizer: int | None = 0,
    terms: tuple[str, ...] = ("loss",),
    stepped: bool = True,
) -> WindowSeen:
    """One window of the loop above."""  # fmt: skip
    start, seen, norm = clock.now, [], 0.0
    for number, weight in enumerate(weights):
        seed = index * 31 + number
        clock.event("forward", path, 9, 0.0042 * wobble(seed))
        backward = clock.event("backward", path, 11, 0.0078 * wobble(seed + 1), "loss")
        norm += (weight or expected or 0.25) * 1.4 * wobble(seed, 0.35) / (1 + index * 0.02)
        found = tuple(
            TermSeen(name, weight if place == 0 else expected, expected, 512 + seed % 64,
                     "" if weight is not None else "the loss went through a custom function")
            for place, name in enumerate(terms)
        )  # fmt: skip
        seen.append(
            MicrobatchSeen(number, path, 11, backward.start, backward.end,
                           2.3 / (1 + index * 0.05) * wobble(seed, 0.1), found, norm,
                           int(180 * MIB * wobble(seed, 0.1)), lost=not stepped)
        )  # fmt: skip
    if stepped:
        clock.event("clip", path, 13, 0.0009, "max_norm=1.0")
        clock.event("step", path, 14, 0.0021, "AdamW")
        clock.event("zero", path, 15, 0.0003, "optimizer.zero_grad")
        clock.event("schedule", path, 16, 0.0001, "CosineAnnealingLR")
    clock.now += 0.0004
    change = 2e-3 / (1 + index * 0.1) * wobble(index, 0.15)
    return WindowSeen(
        index, optimizer, start, clock.now, tuple(seen), clock.taken(), stepped,
        min(norm, 1.0), change, int(190 * MIB * wobble(index, 0.08)),
    )  # fmt: skip


def memory(seconds: float, points: int = 240) -> tuple[tuple[float, int], ...]:
    """A saw: forward fills, backward frees."""
    return tuple(
        (seconds * at / points, int((92 + 88 * ((at * 5) % 12) / 12 * wobble(at, 0.1)) * MIB))
        for at in range(points + 1)
    )


def parameters(layers: int, owner: int | None = 0) -> tuple[ParameterSeen, ...]:
    """Weights and biases of a deep network."""
    return tuple(
        ParameterSeen(f"blocks.{layer}.{part}", (64, 64) if part == "weight" else (64,),
                      "float32", owner, 96, 24, 24, 0.03 / (layer + 1) * wobble(layer))
        for layer in range(layers)
        for part in ("weight", "bias")
    )  # fmt: skip


RUN = Run(
    "train.py", ("--epochs", "2"), "2026-11-30T19:42:07+01:00", 1.74, "finished", 0,
    python="3.11.9", torch="2.13.0", device="cpu",
)  # fmt: skip
ADAMW = OptimizerSeen(0, "AdamW", "train.py", 5, 4, 4810, 24, 3e-4)
TOTALS = {"forward": 96, "backward": 96, "clip": 24, "step": 24, "zero": 24, "schedule": 24}


def clean() -> Diagnosis:
    """A loop that is right."""
    clock = Clock()
    windows = tuple(window(clock, index, [0.25] * 4, 0.25) for index in range(24))
    return Diagnosis(
        RUN, "24 updates of 4 micro-batches each, and every loss term weighed the same.", (),
        TOTALS, (ADAMW,), parameters(2), windows, {"train.py": lines(LOOP)}, memory(1.74),
    )  # fmt: skip


def tutorial() -> Diagnosis:
    """The loop of the tutorial: nothing accumulates, and the optimizer never steps."""
    clock, windows, path = Clock(), [], "tutorial.py"
    for index in range(3):
        start = clock.now
        clock.event("forward", path, 9, 0.0003)
        clock.event("zero", path, 11, 0.00005, "optimizer.zero_grad")
        back = clock.event("backward", path, 12, 0.0006, "loss")
        clock.event("write", path, 15, 0.0001, "weight, bias")
        norm, terms = 3.2 - index * 0.2, (TermSeen("loss", 1.0, 1.0, 1),)
        seen = MicrobatchSeen(
            0, path, 12, back.start, back.end, 2.1 - index * 0.4, terms, norm, 3 * MIB
        )
        windows.append(
            WindowSeen(
                index, None, start, clock.now, (seen,), clock.taken(), True, norm,
                0.04 - index * 0.004, 3 * MIB,
            )
        )  # fmt: skip
    findings = (
        Finding("GA102", "error", path, 11, 5, "zeroed every micro-batch",
                "gradients were cleared before each of 3 backward passes, so nothing accumulated: "
                "3 updates of one micro-batch each",
                (Evidence(path, 12, "the only backward between two clears, 3 times"),
                 Evidence(path, 15, "parameters changed here, 3 times")),
                "Clear the gradients only where you step: `optimizer.step()`, then `zero_grad()`."),
        Finding("GA105", "warning", path, 5, 5, "gradient that no optimizer owns",
                "3 gradients were added to `x`, none was cleared, and no optimizer owns it",
                (Evidence(path, 12, "grew to 9.31 in 3 backward passes"),),
                "Leave `requires_grad=True` out where you need no gradient of the input."),
        Finding("GA308", "note", path, 15, 13, "parameters changed outside any optimizer",
                "`weight` and `bias` were changed here, 3 times; `optimizer` never stepped",
                (Evidence(path, 4, "SGD, 0 steps"),), "Call `optimizer.step()`."),
    )  # fmt: skip
    return Diagnosis(
        replace(RUN, script=path, argv=(), seconds=0.021),
        "3 updates of one micro-batch each: nothing accumulated, because line 11 clears the "
        "gradients in every pass.",
        findings, {"forward": 3, "zero": 3, "backward": 3, "write": 3},
        (OptimizerSeen(0, "SGD", path, 4, 2, 2, 0, 0.01),),
        (ParameterSeen("weight", (1, 1), "float32", 0, 3, 3, 3, 0.11),
         ParameterSeen("bias", (1,), "float32", 0, 3, 3, 3, 0.27),
         ParameterSeen("x", (1, 1), "float32", None, 3, 0, 0, 0.0)),
        tuple(windows), {path: lines(TUTORIAL)}, memory(0.021, 40),
    )  # fmt: skip


def undivided() -> Diagnosis:
    """A mean that is not divided by the window's length, and a tail."""
    clock = Clock()
    windows = [window(clock, index, [1.0] * 4, 0.25) for index in range(6)]
    windows.append(window(clock, 6, [1.0, 1.0], 0.5, stepped=False))
    findings = (
        Finding("GA201", "error", "train.py", 10, 5, "loss not divided",
                "each micro-batch weighed 1 where 0.25 was right, in all 24 updates: the update is "
                "4 times the mean",
                (Evidence("train.py", 11, "96 backward passes, weight 1 each"),
                 Evidence("train.py", 14, "24 steps, each after 4 backward passes")),
                "Divide: `loss = criterion(out, y) / 4`, or by the targets of the window."),
        Finding("GA302", "warning", "train.py", 12, 5, "tail dropped",
                "the last 2 micro-batches made gradients that no step used",
                (Evidence("train.py", 11, "2 backward passes after the last step"),),
                "Step once more after the loop where micro-batches are left."),
    )  # fmt: skip
    return Diagnosis(
        RUN,
        "Every update was 4 times the mean: the loss is not divided by the 4 micro-batches of a "
        "window; the last 2 of 98 micro-batches were lost.",
        findings, {**TOTALS, "forward": 98, "backward": 98}, (ADAMW,), parameters(2),
        tuple(windows), {"train.py": lines(LOOP)}, memory(1.74),
    )  # fmt: skip


def killed() -> Diagnosis:
    """A run that was stopped in the middle, with several terms, some of them unknown."""
    clock = Clock()
    windows = [
        window(clock, index, [0.25, 0.25, None, 0.25] if index % 3 == 2 else [0.25] * 4, 0.25,
               terms=("cross entropy", "auxiliary"))
        for index in range(9)
    ]  # fmt: skip
    return Diagnosis(
        replace(RUN, ended="killed", exit_code=-9, error="Killed by signal 9", device="cuda:0"),
        "The run was killed in update 9; until then every weight that could be read was right.",
        (Finding("GA701", "note", "train.py", 4, 1, "BatchNorm in training mode",
                 "2 BatchNorm layers normalised by the micro-batch, 38 times", (),
                 "Freeze the statistics, or read docs on pooled statistics."),),
        {"forward": 38, "backward": 38, "step": 9, "zero": 9}, (ADAMW,), parameters(2),
        tuple(windows), {"train.py": lines(LOOP)}, memory(0.6),
    )  # fmt: skip


def hostile() -> Diagnosis:
    """Every text is an attack."""
    path = f"/tmp/{HOSTILE}/שלום.py"
    clock = Clock()
    seen = window(clock, 0, [1.0, 0.5], 0.5, path=path, terms=(HOSTILE, HOSTILE[::-1]))
    events = tuple(replace(event, what=HOSTILE) for event in seen.events)
    finding = Finding(
        "GA201", "error", path, 10, 5, HOSTILE, HOSTILE, (Evidence(path, 11, HOSTILE),), HOSTILE
    )
    source = {number: f"{text}  # {HOSTILE}" for number, text in lines(LOOP).items()}
    return Diagnosis(
        replace(RUN, script=path, argv=(HOSTILE,), ended="raised", exit_code=1, error=HOSTILE,
                device=HOSTILE, python=HOSTILE, torch=HOSTILE, started=HOSTILE),
        HOSTILE, (finding, replace(finding, severity="warning", code=HOSTILE[:9])),
        {HOSTILE: 3}, (replace(ADAMW, kind=HOSTILE, path=path),),
        (ParameterSeen(HOSTILE, (3,), HOSTILE, 0, 1, 1, 1, 0.1),
         ParameterSeen("\udcff surrogate", (3,), "float32", None, 1, 1, 1, float("inf"))),
        (replace(seen, events=events, norm=float("nan")),), {path: source}, memory(0.1, 10),
    )  # fmt: skip


def large() -> Diagnosis:
    """300 parameters, 200 windows, two optimizers."""
    clock = Clock()
    windows = tuple(
        window(clock, index if index < 60 else index * 47, [0.125] * 8, 0.125, optimizer=index % 2)
        for index in range(200)
    )
    return Diagnosis(
        replace(RUN, seconds=5431.7),
        "9,400 updates of 8 micro-batches each, and every loss term weighed the same.", (),
        {**TOTALS, "forward": 75200, "backward": 75200, "step": 9400},
        (ADAMW, replace(ADAMW, index=1, kind="SGD", line=6)),
        parameters(148) + parameters(2, owner=None), windows, {"train.py": lines(LOOP)},
        memory(5431.7, 600),
    )  # fmt: skip


def nothing() -> Diagnosis:
    """A script that never touched a gradient."""
    return Diagnosis(replace(RUN, script="-m hello", torch=""), "No backward pass was seen.")


ALL = {
    "clean": clean, "tutorial": tutorial, "undivided": undivided, "killed": killed,
    "hostile": hostile, "large": large, "nothing": nothing,
}  # fmt: skip
