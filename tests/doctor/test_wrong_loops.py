"""Wrong loops in shapes that the catalogue does not have; `#!` marks the line to be found."""

import pytest
from loops import STEPPED
from runs import diagnose

LOOPS = {
    "a wrapper that clears on the last one": (
        "GA102",
        """
class Gate:
    open = False

    def clear(self):
        if self.open:
            optimizer.zero_grad()  #!

    def step(self):
        if self.open:
            optimizer.step()

gate = Gate()
for i, (x, y) in enumerate(data):
    gate.open = i % 4 == 3
    gate.clear()
    (F.cross_entropy(model(x), y) / 4).backward()
    gate.step()
""",
    ),
    "a method that replaces gradients": (
        "GA102",
        """
parameters = list(model.parameters())
for start in (0, 4):
    for x, y in data[start : start + 4]:
        slopes = torch.autograd.grad(F.cross_entropy(model(x), y) / 4, parameters)
        for p, slope in zip(parameters, slopes):
            p.grad = slope  #!
    optimizer.step()
""",
    ),
    "a step in each backward": (
        "GA102",
        """
each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

def use(p):
    each[p].step()  #!
    each[p].zero_grad()

for p in model.parameters():
    p.register_post_accumulate_grad_hook(use)
for x, y in data[:4]:
    (F.cross_entropy(model(x), y) / 4).backward()
""",
    ),
    "the second of two optimizers": (
        "GA101",
        """
other = nn.Linear(3, 2)
second = torch.optim.Adam(other.parameters())
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    F.cross_entropy(other(x), y).backward()
    second.step()  #!
""",
    ),
    "a generator's loss in the critic": (
        "GA104",
        """
maker, critic = nn.Linear(2, 3), nn.Linear(3, 1)
makers = torch.optim.SGD(maker.parameters(), lr=0.1)
critics = torch.optim.SGD(critic.parameters(), lr=0.1)
for x, _ in data:
    z = torch.randn(4, 2)
    (-critic(maker(z)).mean()).backward()
    makers.step()
    makers.zero_grad()
    (critic(maker(z).detach()).mean() - critic(x).mean()).backward()
    critics.step()  #!
    critics.zero_grad()
""",
    ),
    "a backward before the closure": (
        "GA104",
        """
search = torch.optim.LBFGS(model.parameters(), max_iter=2)
x, y = data[0]

def closure():
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss

search.zero_grad()
first = F.cross_entropy(model(x), y)
first.backward()  #!
search.step(closure)
""",
    ),
    "gradients that stay NaN": (
        "GA104",
        """
for i, (x, y) in enumerate(data):
    F.cross_entropy(model(x * (math.nan if i == 2 else 1.0)), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
        optimizer.zero_grad()  #!
""",
    ),
    "divided in the caller": (
        "GA201",
        """
def run(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss

for start in (0, 4):
    for x, y in data[start : start + 4]:
        loss = run(x, y) / 4  #!
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "a second term left whole": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    out = model(x)
    loss = F.cross_entropy(out, y) / 4 + out.pow(2).mean()  #!
    loss.backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a method that steps now and then": (
        "GA201",
        """
class Loop:
    def __init__(self):
        self.seen = 0

    def take(self, x, y):
        F.cross_entropy(model(x), y).backward()  #!
        self.seen += 1
        if self.seen % 4 == 0:
            self.use()

    def use(self):
        optimizer.step()
        optimizer.zero_grad()

loop = Loop()
for x, y in data:
    loop.take(x, y)
""",
    ),
    "a long window, undivided": (
        "GA201",
        """
for i in range(300):
    x, y = data[i % 8]
    F.cross_entropy(model(x), y).backward()  #!
    if (i + 1) % 100 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "ignored targets": (
        "GA203",
        """
for i, (x, y) in enumerate(data):
    y = y.masked_fill(torch.arange(4) > i % 4, -100)
    (F.cross_entropy(model(x), y) / 4).backward()  #!
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "an epoch's rest in the next": (
        "GA302",
        """
for epoch in range(3):
    for i, (x, y) in enumerate(data[:7]):
        (F.cross_entropy(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0:  #!
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    "the gate turned round": (
        "GA303",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4:  #!
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "the gate turned round, its number called otherwise": (
        "GA303",
        """
class Options:
    every = 4

every = Options.every
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / every).backward()
    if (i + 1) % Options.every:  #!
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "the first window short, of two terms": (
        "GA303",
        """
for i, (x, y) in enumerate(data):
    out = model(x)
    ((F.cross_entropy(out, y) + 0.5 * out.pow(2).mean()) / 4).backward()
    if i % 4 == 0:  #!
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "an epoch's rest in the next, of two terms": (
        "GA302",
        """
for epoch in range(3):
    for i, (x, y) in enumerate(data[:7]):
        out = model(x)
        ((F.cross_entropy(out, y) + 0.5 * out.pow(2).mean()) / 4).backward()
        if (i + 1) % 4 == 0:  #!
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    "a tail times the full window's share": (
        "GA204",
        """
every = 4
for i, (x, y) in enumerate(data[:7]):
    loss = F.cross_entropy(model(x), y) * (1 / every)
    loss.backward()
    if (i + 1) % every == 0 or i == 6:
        optimizer.step()  #!
        optimizer.zero_grad()
""",
    ),
    "padding in the number that divides": (
        "GA207",
        """
for i, (x, y) in enumerate(data):
    y = y.masked_fill(torch.arange(4) > i % 4, -100)
    loss = F.cross_entropy(model(x), y, reduction="sum")
    loss = loss / y.numel()  #!
    loss.backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "padding in the number that divides, and micro-batches too": (
        "GA207",
        """
for i, (x, y) in enumerate(data):
    mask = (torch.arange(4) <= i % 4).float()
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = (losses * mask).sum() / mask.numel() / 2  #!
    loss.backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "masks drawn again, in the older checkpoint": (
        "GA505",
        """
from torch.utils.checkpoint import checkpoint

part = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2))
for x, y in data:
    out = checkpoint(part, x.requires_grad_(), use_reentrant=True, preserve_rng_state=False)  #!
    optimizer.zero_grad()
    F.cross_entropy(model(out), y).backward()
    optimizer.step()
""",
    ),
    "a divisor that moves": (
        "GA303",
        """
for i in range(16):
    x, y = data[i % 8]
    every = max(1, round(1 + 3 * min(i / 10, 1)))
    F.cross_entropy(model(x), y).backward()
    if i % every == 0:  #!
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "weights shrunk each time": (
        "GA307",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)  #!
""",
    ),
    "a hook that limits": (
        "GA401",
        """
for p in model.parameters():
    p.register_hook(lambda slope: slope.clamp(-0.1, 0.1))  #!
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "an update left out with the step": (
        "GA404",
        """
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y) * 1000).backward()
    scaler.unscale_(optimizer)
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 1.0:
        scaler.step(optimizer)
        scaler.update()  #!
""",
    ),
    "gradients with a graph": (
        "GA502",
        """
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward(create_graph=True)  #!
    optimizer.step()
""",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_wrong_loop_is_found_at_its_line(name, tmp_path):
    code, text = LOOPS[name]
    script = STEPPED + text
    [line] = [at for at, one in enumerate(script.splitlines(), 1) if one.endswith("#!")]
    found = {(one.code, one.line) for one in diagnose(script, tmp_path).findings}
    assert (code, line) in found
    assert {other for other, _ in found} <= {code, "GA302", "GA204"}
