"""GA3xx: what goes with the updates: schedules, and averages of the weights."""

from __future__ import annotations

from gradaccum.faults.entry import Fault

__all__ = ["FAULTS"]

_PLANNED = """\
import math

loader = data + data[:2]
epochs, figure = 2, 0
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, 0.1, total_steps=epochs * math.ceil(len(loader) / every)
)
try:
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            window = min(every, len(loader) - i // every * every)
            (nn.functional.mse_loss(model(x), y) / window).backward()
            if (i + 1) % every == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                figure += 1
except ValueError:
    pass
"""

_WINDOWS = """\
for i, (x, y) in enumerate({data}):
    loss = nn.functional.mse_loss(model(x), y) / every
    loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
_OFTEN = """\
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
{windows}{indent}scheduler.step()
figure = scheduler.get_last_lr()[0]
"""
_SKIPPED = """\
import warnings

warnings.simplefilter("ignore")
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
for x in (1.0, float("inf"), 1.0):
    optimizer.zero_grad()
    scaler.scale(model(torch.full((1, 1), x)).sum()).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
figure = scheduler.last_epoch
"""
_AVERAGE = """\
import copy

average = copy.deepcopy(model).requires_grad_(False)
{windows}{indent}with torch.no_grad():
{indent}    average.weight.lerp_(model.weight, 0.5)
    if i == 6:
        figure = average.weight.item() / model.weight.item()
"""
_EACH, _ONCE = " " * 4, " " * 8
"""With each micro-batch, and under the condition of the step."""

FAULTS = (
    Fault(
        code="GA305",
        title="the scheduler steps per micro-batch",
        severity="warning",
        what="`scheduler.step()` runs once a micro-batch while the optimizer steps once a window.",
        why="The schedule runs N times too fast: after one update the rate is {bad} instead of "
        "{good}.",
        mend="Move `scheduler.step()` under the condition that steps the optimizer.",
        bad=_OFTEN.format(windows=_WINDOWS.format(data="data"), indent=_EACH),
        good=_OFTEN.format(windows=_WINDOWS.format(data="data"), indent=_ONCE),
        figures=(0.0625, 0.5),
    ),
    Fault(
        code="GA311",
        title="the scheduler goes on where the step was skipped",
        severity="warning",
        what="A GradScaler skips the step when a gradient overflows; the scheduler steps all the "
        "same.",
        why="One of three steps overflows: the schedule stands at {bad} for {good} updates.",
        mend="Compare `scaler.get_scale()` before and after `update()`, and step the scheduler "
        "only if it did not fall.",
        bad=_SKIPPED.replace("    before = scaler.get_scale()\n", "").replace(
            "    if scaler.get_scale() >= before:\n        ", "    "
        ),
        good=_SKIPPED,
        figures=(3.0, 2.0),
        usual=False,
    ),
    Fault(
        code="GA312",
        title="the schedule is planned for another number of updates",
        severity="warning",
        what="The schedule's length, or its warm-up's, is counted in micro-batches, or rounded "
        "down, while the loop steps it once an update and also steps the tail.",
        why="A schedule that is too short refuses: the loop below stops after {bad} updates "
        "instead of {good}; a decay reaches its end too early. One that is too long never gets "
        "past its warm-up.",
        mend="Count updates: `epochs * math.ceil(len(loader) / every)`.",
        bad=_PLANNED.replace("math.ceil(len(loader) / every)", "(len(loader) // every)"),
        good=_PLANNED,
        figures=(2.0, 4.0),
    ),
    Fault(
        code="GA317",
        title="an average of the weights moves with every micro-batch",
        severity="warning",
        what="An exponential moving average (EMA) is updated after every micro-batch, though the "
        "weights change once a window.",
        why="It follows the weights N times as fast as its decay says: after one update of four "
        "micro-batches it has gone {bad} of the way instead of {good}.",
        mend="Update the average right after `optimizer.step()`, under the same condition.",
        bad=_AVERAGE.format(windows=_WINDOWS.format(data="data + data"), indent=_EACH),
        good=_AVERAGE.format(windows=_WINDOWS.format(data="data + data"), indent=_ONCE),
        figures=(0.9375, 0.5),
    ),
)
