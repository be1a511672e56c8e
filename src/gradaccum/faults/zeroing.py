"""GA1xx: who clears the gradients, and when."""

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

FAULTS = (
    Fault(
        code="GA101",
        title="gradients are never zeroed",
        severity="error",
        what="`backward()` adds to the gradients that are there. Nothing in this loop clears "
        "them, so every step uses the sum of all batches since the start.",
        why="Two steps over the same batch: the second step uses twice the gradient. The loop "
        "below leaves the weight at {bad}; with zeroing it is {good}.",
        mend="Call `optimizer.zero_grad()` after each `optimizer.step()`.",
        bad="""\
for x, y in data[:2]:
    loss = nn.functional.mse_loss(model(x), torch.ones_like(y))
    loss.backward()
    optimizer.step()
figure = model.weight.item()
""",
        good="""\
for x, y in data[:2]:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), torch.ones_like(y))
    loss.backward()
    optimizer.step()
figure = model.weight.item()
""",
        figures=(2.0, 0.0),
    ),
    Fault(
        code="GA102",
        title="zeroed every micro-batch, so nothing accumulates",
        severity="error",
        what="The gradients are cleared, overwritten or stepped inside the window, before the "
        "step that should consume all of it.",
        why="Only the last micro-batch of each window survives, and it is still divided by the "
        "window length: the update below is {bad} instead of {good}.",
        mend="Clear the gradients only where you step: `optimizer.step(); optimizer.zero_grad()`.",
        bad="""\
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y) / every
    loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
figure = model.weight.item()
""",
        good=_GOOD,
        figures=(2.0, 5.0),
    ),
    Fault(
        code="GA103",
        title="zeroed between backward and step",
        severity="error",
        what="`zero_grad()` stands after `backward()` and before `step()`.",
        why="The step finds no gradient, so the model never learns: the weight stays at {bad}, "
        "where the right loop reaches {good}.",
        mend="Move `zero_grad()` before `backward()` or after `step()`.",
        bad="""\
for x, y in data[:2]:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()
figure = model.weight.item()
""",
        good="""\
for x, y in data[:2]:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
figure = model.weight.item()
""",
        figures=(0.0, 2.0),
    ),
    Fault(
        code="GA104",
        title="a stale gradient at the start of a window",
        severity="warning",
        what="A gradient from elsewhere (a probe before the loop, another optimizer's loss, a "
        "backward before `step(closure)`) is still there when a window opens.",
        why="It is added to the first update: {bad} instead of {good} below.",
        mend="Call `optimizer.zero_grad()` where the window opens.",
        bad="""\
probe = nn.functional.mse_loss(model(data[3][0]), data[3][1])
probe.backward()
for x, y in data[:2]:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
figure = model.weight.item()
""",
        good="""\
probe = nn.functional.mse_loss(model(data[3][0]), data[3][1])
probe.backward()
optimizer.zero_grad()
for x, y in data[:2]:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
figure = model.weight.item()
""",
        figures=(-6.0, 2.0),
    ),
    Fault(
        code="GA105",
        title="a gradient grows that no optimizer owns",
        severity="warning",
        what="Parameters outside the optimizer get gradients; `optimizer.zero_grad()` does not "
        "reach them, and the clip measures them.",
        why="After four steps the norm that the clip sees is {bad}, of which the trained part "
        "makes {good}: the trained part is clipped for what others accumulate.",
        mend="Freeze those parameters (`requires_grad_(False)`), or clip only what the optimizer "
        "owns, or call `model.zero_grad()`.",
        bad="""\
backbone, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
nn.init.ones_(backbone.weight), nn.init.ones_(head.weight)
whole = nn.Sequential(backbone, head)
tuner = torch.optim.SGD(head.parameters(), lr=0.0)
for x, _ in data:
    tuner.zero_grad()
    whole(x).mean().backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 100.0)
    tuner.step()
figure = round(norm.item(), 3)
""",
        good="""\
backbone, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
nn.init.ones_(backbone.weight), nn.init.ones_(head.weight)
whole = nn.Sequential(backbone, head)
backbone.requires_grad_(False)
tuner = torch.optim.SGD(head.parameters(), lr=0.0)
for x, _ in data:
    tuner.zero_grad()
    whole(x).mean().backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 100.0)
    tuner.step()
figure = round(norm.item(), 3)
""",
        figures=(4.123, 1.0),
    ),
    Fault(
        code="GA106",
        title="a gradient is added to after it was set to None",
        severity="error",
        what="`zero_grad()` sets gradients to None, and code written for gradients full of zeros "
        "adds to one before a backward has made it.",
        why="Of four gradients that arrive from elsewhere {bad} are summed instead of {good}: the "
        "first addition raises a TypeError.",
        mend="Assign the first one: `p.grad = g if p.grad is None else p.grad + g`.",
        bad="""\
optimizer.zero_grad()
figure = 0
try:
    for _, y in data:
        model.weight.grad += y[:1]
        figure += 1
except TypeError:
    pass
""",
        good="""\
optimizer.zero_grad()
figure = 0
for _, y in data:
    if model.weight.grad is None:
        model.weight.grad = torch.zeros_like(model.weight)
    model.weight.grad += y[:1]
    figure += 1
""",
        figures=(0.0, 4.0),
    ),
)
