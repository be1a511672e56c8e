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
        usual=False,
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
tail = data[2:]
for x, y in tail:
    (nn.functional.mse_loss(model(x), y) / every).backward()
optimizer.step()
figure = model.weight.item()
""",
        good="""\
tail = data[2:]
for x, y in tail:
    (nn.functional.mse_loss(model(x), y) / len(tail)).backward()
optimizer.step()
figure = model.weight.item()
""",
        figures=(3.5, 7.0),
        static=False,
    ),
    Fault(
        code="GA205",
        title="the logged loss is not the optimised one",
        severity="note",
        what="The log shows a loss that differs from the objective by a factor, usually the last "
        "micro-batch's, or one already divided by N.",
        why="The log says {bad} where the objective is {good}: runs with different N cannot be "
        "compared.",
        mend="Log the sum of the divided losses over the window.",
        bad="""\
for x, y in data:
    loss = nn.functional.mse_loss(model(x), y) / every
    loss.backward()
figure = loss.item()
""",
        good="""\
logged = 0.0
for x, y in data:
    loss = nn.functional.mse_loss(model(x), y) / every
    loss.backward()
    logged += loss.item()
figure = logged
""",
        figures=(4.0, 7.5),
        static=False,
        runtime=False,
    ),
)
