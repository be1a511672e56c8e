"""GA4xx: clipping and the gradient scaler."""

from __future__ import annotations

from gradaccum.faults.entry import Fault

__all__ = ["FAULTS"]

_EACH = """\
for i, (x, y) in enumerate(data):
    loss = -(weight * x).sum()
    loss.backward()
    nn.utils.clip_grad_norm_([weight], 1.0)
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
figure = round(weight[0].item(), 3)
"""
_TWO = """\
import torch
from torch import nn

weight = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.5)
data = [(torch.tensor([3.0, 0.0]), 0), (torch.tensor([0.0, 3.0]), 0)]
every = 2
"""
_SCALED = """\
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for x, y in data:
    loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
figure = round(model.weight.item(), 3)
"""
_GROW = """\
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
figure = 0
try:
    for i, (x, y) in enumerate(2 * data):
        loss = nn.functional.mse_loss(model(x), y) / every
        scaler.scale(loss).backward()
        if (i + 1) % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            figure += 1
except RuntimeError:
    pass
"""

_TIED = """\
words = nn.Embedding(3, 2)
head = nn.Linear(2, 3, bias=False)
head.weight = words.weight
nn.init.ones_(head.weight)
head(words(torch.arange(3))).sum().backward()
shared = [*words.parameters(), *head.parameters()]
nn.utils.clip_grad_norm_({clipped}, 1.0)
figure = round(head.weight.grad.norm().item(), 3)
"""

FAULTS = (
    Fault(
        code="GA401",
        title="clipped per micro-batch",
        severity="error",
        what="The clip runs after every backward, on the partial sum of the window.",
        why="Early micro-batches are cut again and again, the last weigh most. Two orthogonal "
        "gradients of equal size below: the first one's share is {bad} instead of {good}.",
        mend="Clip once, right before the step, under the same condition.",
        bad=_EACH,
        good=_EACH.replace("    nn.utils.clip_grad_norm_([weight], 1.0)\n", "").replace(
            "        optimizer.step()",
            "        nn.utils.clip_grad_norm_([weight], 1.0)\n        optimizer.step()",
        ),
        figures=(0.158, 0.354),
        prelude=_TWO,
    ),
    Fault(
        code="GA402",
        title="clipped before unscale",
        severity="error",
        what="The gradients are clipped while they are still multiplied by the loss scale.",
        why="The clip sees a norm that is as many times too large (65536 at first, 1024 below), "
        "so what is left after unscaling is next to nothing: {bad} instead of {good}.",
        mend="Call `scaler.unscale_(optimizer)` right before the clip.",
        bad=_SCALED.replace("    scaler.unscale_(optimizer)\n", ""),
        good=_SCALED,
        figures=(0.004, 4.0),
    ),
    Fault(
        code="GA403",
        title="unscaled twice",
        severity="error",
        what="`scaler.unscale_()` runs again before `scaler.update()`, usually because it stands "
        "outside the condition that steps.",
        why="torch raises RuntimeError at the second micro-batch: the loop below stops after "
        "{bad} micro-batches instead of {good}.",
        mend="Unscale only where you step.",
        bad="""\
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
figure = 0
try:
    for i, (x, y) in enumerate(data):
        loss = nn.functional.mse_loss(model(x), y) / every
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if (i + 1) % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        figure += 1
except RuntimeError:
    pass
""",
        good="""\
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
figure = 0
for i, (x, y) in enumerate(data):
    loss = nn.functional.mse_loss(model(x), y) / every
    scaler.scale(loss).backward()
    if (i + 1) % every == 0:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    figure += 1
""",
        figures=(1.0, 4.0),
    ),
    Fault(
        code="GA404",
        title="the scaler is updated per micro-batch, or never",
        severity="warning",
        what="`scaler.update()` belongs to each `scaler.step()`: not to each micro-batch, and "
        "not left out.",
        why="Without it torch raises RuntimeError at the next step: {bad} update instead of {good} "
        "below. Called inside the window it raises as well, or changes the scale between "
        "micro-batches that are summed.",
        mend="Call `scaler.update()` right after `scaler.step(optimizer)`, in any case.",
        bad=_GROW.replace("            scaler.update()\n", ""),
        good=_GROW,
        figures=(1.0, 2.0),
    ),
    Fault(
        code="GA405",
        title="clipped after the step",
        severity="error",
        what="The clip stands behind `optimizer.step()`.",
        why="The step has already consumed the gradients; nothing is ever clipped: the weight "
        "moves to {bad} instead of {good}.",
        mend="Clip between `backward()` and `step()`.",
        bad="""\
for x, y in data[3:]:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
figure = round(model.weight.item(), 3)
""",
        good="""\
for x, y in data[3:]:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
figure = round(model.weight.item(), 3)
""",
        figures=(8.0, 1.0),
    ),
    Fault(
        code="GA406",
        title="a step past the scaler",
        severity="error",
        what="The loss went through `scaler.scale()`, but `optimizer.step()` is called directly.",
        why="The gradients are still multiplied by the scale (1024 below): the weight moves to "
        "{bad} instead of {good}.",
        mend="Call `scaler.step(optimizer)` instead.",
        bad="""\
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for x, y in data[:1]:
    optimizer.zero_grad()
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    optimizer.step()
figure = model.weight.item()
""",
        good="""\
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for x, y in data[:1]:
    optimizer.zero_grad()
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
figure = model.weight.item()
""",
        figures=(2048.0, 2.0),
    ),
    Fault(
        code="GA407",
        title="the clip is given an iterator that is used up",
        severity="error",
        what="`filter(...)` or `map(...)` over the parameters is walked once: by the optimizer's "
        "constructor, or by the first clip. Every later clip sees no parameter at all.",
        why="Clipping is silently off: the gradient norm in the last step is {bad} instead of "
        "{good}.",
        mend="Make it a list: `list(filter(...))`.",
        bad="""\
trained = filter(lambda p: p.requires_grad, model.parameters())
tuner = torch.optim.SGD(trained, lr=0.0)
for x, y in data[:2]:
    tuner.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(trained, 1.0)
    tuner.step()
figure = round(model.weight.grad.norm().item(), 3)
""",
        good="""\
trained = list(filter(lambda p: p.requires_grad, model.parameters()))
tuner = torch.optim.SGD(trained, lr=0.0)
for x, y in data[:2]:
    tuner.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(trained, 1.0)
    tuner.step()
figure = round(model.weight.grad.norm().item(), 3)
""",
        figures=(4.0, 1.0),
    ),
    Fault(
        code="GA408",
        title="a norm of complex gradients without `abs`",
        severity="error",
        what="A gradient norm is computed by hand as the root of the sum of squares, and the "
        "gradients are complex.",
        why="The square of a complex number is complex, and squares may cancel: the norm is {bad} "
        "instead of {good}.",
        mend="Use `grad.abs() ** 2`, or `torch.nn.utils.clip_grad_norm_`, which is right.",
        bad="""\
weight = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
loss = (weight * torch.tensor([1.0 + 0j, -1.0j])).real.sum()
loss.backward()
norm = (weight.grad**2).sum().sqrt()
figure = round(abs(norm.item()), 3)
""",
        good="""\
weight = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
loss = (weight * torch.tensor([1.0 + 0j, -1.0j])).real.sum()
loss.backward()
norm = (weight.grad.abs() ** 2).sum().sqrt()
figure = round(norm.item(), 3)
""",
        figures=(0.0, 1.414),
    ),
    Fault(
        code="GA409",
        title="the gradient of a frozen parameter is read",
        severity="error",
        what="A norm is computed by hand over `model.parameters()`, and some of them are frozen.",
        why="A frozen parameter's gradient is None, so the loop raises: it measures {bad} "
        "parameters instead of {good}.",
        mend="Leave out what has none: `for p in model.parameters() if p.grad is not None`.",
        bad="""\
whole = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
whole[0].requires_grad_(False)
whole(data[0][0]).mean().backward()
figure = 0
try:
    norms = [p.grad.norm() for p in whole.parameters()]
    figure = len(norms)
except AttributeError:
    pass
""",
        good="""\
whole = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
whole[0].requires_grad_(False)
whole(data[0][0]).mean().backward()
norms = [p.grad.norm() for p in whole.parameters() if p.grad is not None]
figure = len(norms)
""",
        figures=(0.0, 1.0),
    ),
    Fault(
        code="GA410",
        title="the norm of a sparse gradient",
        severity="error",
        what="`clip_grad_norm_` is given an embedding with `sparse=True`.",
        why="torch cannot take the norm of a sparse gradient, so the call raises: {bad} of {good} "
        "clips run.",
        mend="Take the norm of `grad.coalesce().values()` for those, or leave `sparse=True` out.",
        bad="""\
embedding = nn.Embedding(4, 1, sparse=True)
embedding(torch.tensor([1, 1])).sum().backward()
figure = 0
try:
    nn.utils.clip_grad_norm_(embedding.parameters(), 1.0)
    figure = 1
except (NotImplementedError, RuntimeError):
    pass
""",
        good="""\
embedding = nn.Embedding(4, 1)
embedding(torch.tensor([1, 1])).sum().backward()
nn.utils.clip_grad_norm_(embedding.parameters(), 1.0)
figure = 1
""",
        figures=(0.0, 1.0),
    ),
    Fault(
        code="GA411",
        title="a parameter is clipped twice",
        severity="error",
        what="Two modules share a weight, and the clip is given the parameters of both, one list "
        "after the other.",
        why="The weight counts twice in the norm and is scaled twice: its norm after the clip is "
        "{bad} instead of {good}.",
        mend="Give `model.parameters()` of the module that holds both: it lists each once.",
        bad="""\
embedding, head = nn.Embedding(4, 1), nn.Linear(1, 4, bias=False)
head.weight = embedding.weight
nn.init.ones_(head.weight)
head(embedding(torch.arange(4))).sum().backward()
nn.utils.clip_grad_norm_([*embedding.parameters(), *head.parameters()], 1.0)
figure = round(head.weight.grad.norm().item(), 3)
""",
        good="""\
embedding, head = nn.Embedding(4, 1), nn.Linear(1, 4, bias=False)
head.weight = embedding.weight
nn.init.ones_(head.weight)
head(embedding(torch.arange(4))).sum().backward()
nn.utils.clip_grad_norm_(nn.ModuleList([embedding, head]).parameters(), 1.0)
figure = round(head.weight.grad.norm().item(), 3)
""",
        figures=(0.031, 1.0),
    ),
)
