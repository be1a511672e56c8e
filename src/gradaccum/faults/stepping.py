"""GA3xx: when optimizers and schedulers step."""

from __future__ import annotations

from gradaccum.faults.entry import PRELUDE, Fault

__all__ = ["FAULTS"]

_WINDOW = """\
for i, (x, y) in enumerate(data):
    loss = nn.functional.mse_loss(model(x), y) / every
    loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
figure = model.weight.item()
"""
_PLAIN = """\
for x, y in data[:2]:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
figure = model.weight.item()
"""
_RESUME = """\
def train(model, optimizer, batches):
    for number, (x, y) in batches:
        (nn.functional.mse_loss(model(x), y) / every).backward()
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad()


stream = list(enumerate(data + data, start=1))
train(model, optimizer, stream[:{saved}])
state = model.state_dict(), optimizer.state_dict()
resumed = nn.Linear(1, 1, bias=False)
again = torch.optim.SGD(resumed.parameters(), lr=1.0)
resumed.load_state_dict(state[0])
again.load_state_dict(state[1])
train(resumed, again, stream[{saved}:])
figure = resumed.weight.item()
"""
_SIX = PRELUDE.replace("(1.0, 2.0, 3.0, 4.0)", "(1.0, 1.0, 1.0, 1.0, 9.0, 9.0)")

FAULTS = (
    Fault(
        code="GA301",
        title="a step with no backward since the last",
        severity="error",
        what="`step()` runs twice over the same gradients.",
        why="The same gradient is applied twice: {bad} instead of {good} below.",
        mend="Remove the second `step()`.",
        bad=_PLAIN.replace(
            "    optimizer.step()\n", "    optimizer.step()\n    optimizer.step()\n"
        ),
        good=_PLAIN,
        figures=(-4.0, 2.0),
    ),
    Fault(
        code="GA302",
        title="the tail is dropped, or leaks into the next epoch",
        severity="warning",
        what="The loader's length is no multiple of the window. The last micro-batches are "
        "computed, but no step follows: their gradients are lost, wiped, or added to the first "
        "window of the next epoch.",
        why="The last two of six micro-batches below hold the large targets: the weight ends at "
        "{bad} instead of {good}.",
        mend="Step once more after the loop if micro-batches are pending, or test for the last "
        "batch as well; `acc.microbatches(loader)` of gradaccum steps the tail, rightly scaled.",
        bad=_WINDOW,
        good="""\
pending = 0
for i, (x, y) in enumerate(data):
    loss = nn.functional.mse_loss(model(x), y) / every
    loss.backward()
    pending += 1
    if pending == every or i + 1 == len(data):
        for parameter in model.parameters():
            parameter.grad.mul_(every / pending)
        optimizer.step()
        optimizer.zero_grad()
        pending = 0
figure = model.weight.item()
""",
        figures=(2.0, 16.0),
        prelude=_SIX,
    ),
    Fault(
        code="GA303",
        title="off by one: windows of the wrong length",
        severity="error",
        what="The test that gates the step is off: `i % every == 0` with `i` from 0 steps after "
        "the first micro-batch; `!=` for `==` steps on all the wrong ones.",
        why="The first update holds one micro-batch divided by N: the weight ends at {bad} "
        "instead of {good}.",
        mend="Count from one: `(i + 1) % every == 0`.",
        bad="""\
for i in range(9):
    x, y = data[i % 4]
    loss = nn.functional.mse_loss(model(x), y) / 4
    loss.backward()
    if i % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
figure = model.weight.item()
""",
        good="""\
for i in range(8):
    x, y = data[i % 4]
    loss = nn.functional.mse_loss(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
figure = model.weight.item()
""",
        figures=(0.5, 0.0),
    ),
    Fault(
        code="GA304",
        title="the optimizer is rebuilt in the loop",
        severity="warning",
        what="A stateful optimizer is made anew in each epoch or iteration over the same "
        "parameters.",
        why="Adam's moments start from zero each time, so each first step is a full step of size "
        "`lr` whatever the history: the weight below moves to {bad} instead of {good}.",
        mend="Build the optimizer once, before the loop.",
        bad="""\
for target in (1.0, -0.01):
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(1):
        adam.zero_grad()
        (model.weight * -target).sum().backward()
        adam.step()
figure = round(model.weight.item(), 3)
""",
        good="""\
adam = torch.optim.Adam(model.parameters(), lr=0.1)
for target in (1.0, -0.01):
    for _ in range(1):
        adam.zero_grad()
        (model.weight * -target).sum().backward()
        adam.step()
figure = round(model.weight.item(), 3)
""",
        figures=(0.0, 0.166),
    ),
    Fault(
        code="GA306",
        title="a parameter is rebound, so the update is lost",
        severity="error",
        what="`p = p - lr * p.grad` makes a new tensor and binds the name to it.",
        why="The model keeps the old tensor: the weight stays at {bad} instead of {good}.",
        mend="Change it in place, under `torch.no_grad()`: `p -= lr * p.grad`.",
        bad="""\
x, y = data[0]
nn.functional.mse_loss(model(x), y).backward()
with torch.no_grad():
    for p in model.parameters():
        p = p - 1.0 * p.grad
figure = model.weight.item()
""",
        good="""\
x, y = data[0]
nn.functional.mse_loss(model(x), y).backward()
with torch.no_grad():
    for p in model.parameters():
        p -= 1.0 * p.grad
figure = model.weight.item()
""",
        figures=(0.0, 2.0),
    ),
    Fault(
        code="GA307",
        title="parameters change in mid-window",
        severity="warning",
        what="Weights are projected, decayed or stepped between the micro-batches of one window, "
        "or between a forward and its own backward.",
        why="The projection below runs four times instead of once: the weight is {bad} instead "
        "of {good}.",
        mend="Change parameters only after the step, under the same condition.",
        bad="""\
nn.init.constant_(model.weight, 10.0)
for i, (x, _) in enumerate(data):
    (model(x).mean() * 0.0 / every).backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.weight.mul_(0.5)
figure = model.weight.item()
""",
        good="""\
nn.init.constant_(model.weight, 10.0)
for i, (x, _) in enumerate(data):
    (model(x).mean() * 0.0 / every).backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.weight.mul_(0.5)
figure = model.weight.item()
""",
        figures=(0.625, 5.0),
    ),
    Fault(
        code="GA308",
        title="an update outside `no_grad`",
        severity="error",
        what="A parameter that requires grad is changed in place outside `torch.no_grad()`, or a "
        "post-accumulate hook, which is given the parameter, changes it for the gradient.",
        why="torch refuses the first with an error; the second silently changes the weight: "
        "{bad} instead of {good} below.",
        mend="Wrap the update in `with torch.no_grad():`; in the hook, change `parameter.grad`.",
        bad="""\
weight = torch.ones(1, requires_grad=True)

def average(grad):
    grad /= 2

weight.register_post_accumulate_grad_hook(average)
(3 * weight).sum().backward()
figure = weight.item()
""",
        good="""\
weight = torch.ones(1, requires_grad=True)

def average(parameter):
    parameter.grad /= 2

weight.register_post_accumulate_grad_hook(average)
(3 * weight).sum().backward()
figure = weight.item()
""",
        figures=(0.5, 1.0),
    ),
    Fault(
        code="GA309",
        title="parameters that no optimizer steps",
        severity="warning",
        what="The optimizer took only what required grad when it was built; layers unfrozen later "
        "get gradients but no update.",
        why="The unfrozen layer stays at {bad}; owned by the optimizer it moves to {good}.",
        mend="Unfreeze first, or add the layer with `optimizer.add_param_group(...)`.",
        bad="""\
model.requires_grad_(False)
late = nn.Sequential(model, nn.Linear(1, 1))
late[0].requires_grad_(False)
tuner = torch.optim.SGD([p for p in late.parameters() if p.requires_grad], lr=1.0)
late[0].requires_grad_(True)
for x, _ in data[:1]:
    tuner.zero_grad()
    (late[0](x) - 1).pow(2).mean().backward()
    tuner.step()
figure = model.weight.item()
""",
        good="""\
late = nn.Sequential(model, nn.Linear(1, 1))
tuner = torch.optim.SGD([p for p in late.parameters() if p.requires_grad], lr=1.0)
for x, _ in data[:1]:
    tuner.zero_grad()
    (late[0](x) - 1).pow(2).mean().backward()
    tuner.step()
figure = model.weight.item()
""",
        figures=(0.0, 2.0),
    ),
    Fault(
        code="GA310",
        title="the last batch is told by the length of a stream",
        severity="warning",
        what="The short window at the end is stepped where the count reaches `len(loader)`, but "
        "the loader reads an `IterableDataset`, whose length is only an estimate.",
        why="Here it says 6, and 7 batches arrive: {bad} is left unstepped at the end instead of "
        "{good}.",
        mend="Look one batch ahead instead of counting, as gradaccum does.",
        bad="""\
class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 6

    def __iter__(self):
        return iter(torch.ones(7, 1))


loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
pending = 0
for i, x in enumerate(loader):
    model(x).mean().backward()
    pending += 1
    if (i + 1) % every == 0 or i + 1 == len(loader):
        model.weight.grad /= pending
        optimizer.step()
        optimizer.zero_grad()
        pending = 0
figure = pending
""",
        good="""\
loader = torch.utils.data.DataLoader(list(torch.ones(6, 1)), batch_size=None)
pending = 0
for i, x in enumerate(loader):
    model(x).mean().backward()
    pending += 1
    if (i + 1) % every == 0 or i + 1 == len(loader):
        model.weight.grad /= pending
        optimizer.step()
        optimizer.zero_grad()
        pending = 0
figure = pending
""",
        figures=(1.0, 0.0),
        runtime=False,
    ),
    Fault(
        code="GA315",
        title="a state is saved inside a window",
        severity="warning",
        what="`state_dict()` is taken while micro-batches are pending. Gradients are part of "
        "neither the model's nor the optimizer's state.",
        why="The first update after the resume lacks the micro-batches that were computed before: "
        "the weight is {bad} instead of {good}.",
        mend="Save right after a step; or save the gradients too, as `acc.state_dict()` of "
        "gradaccum does.",
        bad=_RESUME.format(saved=6),
        good=_RESUME.format(saved=4),
        figures=(3.5, 0.0),
        static=False,
    ),
    Fault(
        code="GA316",
        title="a step in every micro-batch of a window",
        severity="error",
        what="Gradients are cleared once a window, but `optimizer.step()` runs after every "
        "micro-batch: each step uses the sum so far.",
        why="The first micro-batch of four is used four times, the last once: the weight is {bad} "
        "instead of {good}.",
        mend="Move `optimizer.step()` under the condition that clears the gradients.",
        bad="""\
for i, (x, y) in enumerate(data):
    loss = (model(x) * -y).mean() / every
    loss.backward()
    optimizer.step()
    if (i + 1) % every == 0:
        optimizer.zero_grad()
figure = model.weight.item()
""",
        good="""\
for i, (x, y) in enumerate(data):
    loss = (model(x) * -y).mean() / every
    loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
figure = model.weight.item()
""",
        figures=(5.0, 2.5),
    ),
)
