"""GA2xx: what the loss is divided by."""

from __future__ import annotations

from gradaccum.faults.entry import Fault

__all__ = ["FAULTS"]

_GOOD = """\
for i, (x, y) in enumerate(data):
    loss = nn.functional.mse_loss(model(x), y) / every
    loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
figure = model.weight.item()
"""
_TOKENS = """\
import torch
from torch import nn

weight = torch.zeros(2, requires_grad=True)
labels = [torch.tensor([1, -100, -100, -100]), torch.tensor([0, 0, 0, 0])]
every = 2
"""

FAULTS = (
    Fault(
        code="GA201",
        title="the loss is not divided",
        severity="error",
        what="Each micro-batch adds the gradient of its mean loss, and nothing divides by the "
        "number of micro-batches.",
        why="The update is N times the mean: {bad} instead of {good} for N = 4. With Adam the "
        "size of the step hides it, but clipping, weight decay and epsilon see the sum.",
        mend="Divide the loss: `loss = loss / every`, or use "
        '`micro.backward(loss, count, reduction="mean")` of gradaccum.',
        bad=_GOOD.replace(" / every", ""),
        good=_GOOD,
        figures=(20.0, 5.0),
    ),
    Fault(
        code="GA202",
        title="the loss is divided twice",
        severity="error",
        what="The loss is divided by the window length, and divided by it again: by hand, or "
        "inside `accelerator.backward()`.",
        why="The update is 1/N of what it should be: {bad} instead of {good}.",
        mend="Divide once. Accelerate's `backward()` already divides by "
        "`gradient_accumulation_steps`.",
        bad=_GOOD.replace(
            "    loss.backward()\n", "    loss = loss / every\n    loss.backward()\n"
        ),
        good=_GOOD,
        figures=(1.25, 5.0),
    ),
    Fault(
        code="GA203",
        title="a mean of means over unequal counts",
        severity="note",
        what="Each micro-batch's mean over its own tokens is divided by the number of "
        "micro-batches, although the micro-batches hold different numbers of tokens.",
        why="One token against four: the gradient of the first class is {bad} instead of {good}, "
        "because the lone token of the first micro-batch weighs as much as the other four.",
        mend="Sum the losses and divide once by the tokens of the whole window: "
        "`micro.backward(loss_sum, tokens)` of gradaccum.",
        bad="""\
for y in labels:
    loss = nn.functional.cross_entropy(weight.expand(4, 2), y, ignore_index=-100) / every
    loss.backward()
figure = round(weight.grad[0].item(), 3)
""",
        good="""\
tokens = sum(int((y != -100).sum()) for y in labels)
for y in labels:
    terms = nn.functional.cross_entropy(
        weight.expand(4, 2), y, ignore_index=-100, reduction="sum"
    )
    (terms / tokens).backward()
figure = round(weight.grad[0].item(), 3)
""",
        figures=(0.0, -0.3),
        prelude=_TOKENS,
    ),
    Fault(
        code="GA204",
        title="the tail is divided by the full window",
        severity="note",
        what="The last, short window of an epoch is stepped, but its loss was divided by the "
        "full window length.",
        why="Two micro-batches divided by four: the tail's update is {bad} instead of {good}.",
        mend="Divide the tail by its own length; gradaccum does so by construction.",
        bad="""\
batches = [*data, *data[2:]]
for i, (x, y) in enumerate(batches):
    loss = nn.functional.mse_loss(model(x), y) / every
    loss.backward()
    if (i + 1) % every == 0 or i + 1 == len(batches):
        figure = -model.weight.grad.item()
        optimizer.step()
        optimizer.zero_grad()
        nn.init.zeros_(model.weight)
""",
        good="""\
batches = [*data, *data[2:]]
for i, (x, y) in enumerate(batches):
    loss = nn.functional.mse_loss(model(x), y) / (every if i < every else len(batches) % every)
    loss.backward()
    if (i + 1) % every == 0 or i + 1 == len(batches):
        figure = -model.weight.grad.item()
        optimizer.step()
        optimizer.zero_grad()
        nn.init.zeros_(model.weight)
""",
        figures=(3.5, 7.0),
        usual=False,
    ),
    Fault(
        code="GA205",
        title="the logged loss is not the optimised one",
        severity="note",
        what="The log shows a loss that differs from the objective by a factor: the micro-batches' "
        "losses summed, and divided by the number of updates.",
        why="The log says {bad} where the objective is {good}: runs with different N cannot be "
        "compared.",
        mend="Divide the sum by the number of micro-batches, or sum the divided losses.",
        bad="""\
total, updates = 0.0, 0
for i, (x, y) in enumerate(data):
    loss = nn.functional.mse_loss(model(x), y)
    (loss / every).backward()
    total += loss.item()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
figure = total / updates
""",
        good="""\
total, batches = 0.0, 0
for i, (x, y) in enumerate(data):
    loss = nn.functional.mse_loss(model(x), y)
    (loss / every).backward()
    total += loss.item()
    batches += 1
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
figure = total / batches
""",
        figures=(30.0, 7.5),
    ),
    Fault(
        code="GA206",
        title="divided by a count that may be zero",
        severity="note",
        what="A loss is divided by `mask.sum()`, which is zero in a micro-batch where everything "
        "is masked.",
        why="0 / 0 is NaN, and NaN added to the gradients stays: {bad} of two gradients are finite "
        "after the window instead of {good}.",
        mend="Divide once by the count of the whole window, or use `mask.sum().clamp(min=1)`.",
        bad="""\
for y in [*labels, torch.full((4,), -100)]:
    mask = (y != -100).float()
    terms = nn.functional.cross_entropy(weight.expand(4, 2), y.clamp(min=0), reduction="none")
    loss = (terms * mask).sum() / mask.sum()
    loss.backward()
figure = int(weight.grad.isfinite().sum())
""",
        good="""\
for y in [*labels, torch.full((4,), -100)]:
    mask = (y != -100).float()
    terms = nn.functional.cross_entropy(weight.expand(4, 2), y.clamp(min=0), reduction="none")
    loss = (terms * mask).sum() / mask.sum().clamp(min=1)
    loss.backward()
figure = int(weight.grad.isfinite().sum())
""",
        figures=(0.0, 2.0),
        prelude=_TOKENS,
    ),
    Fault(
        code="GA207",
        title="padding is counted in the denominator",
        severity="warning",
        what="The loss leaves padding out, but is divided by `numel()`, which counts it.",
        why="A token of a padded micro-batch weighs less: the gradient of the first class is "
        "{bad} instead of {good}.",
        mend="Divide by the tokens that are not padding, over the whole window.",
        bad="""\
for y in labels:
    valid = y[y != -100]
    loss = nn.functional.cross_entropy(weight.expand(len(valid), 2), valid, reduction="sum")
    (loss / y.numel()).backward()
figure = round(weight.grad[0].item(), 3)
""",
        good="""\
tokens = sum(int((y != -100).sum()) for y in labels)
for y in labels:
    valid = y[y != -100]
    loss = nn.functional.cross_entropy(weight.expand(len(valid), 2), valid, reduction="sum")
    (loss / tokens).backward()
figure = round(weight.grad[0].item(), 3)
""",
        figures=(-0.375, -0.3),
        prelude=_TOKENS,
    ),
)
