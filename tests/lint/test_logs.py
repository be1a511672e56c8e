"""Losses that a log shows too small or too large; the right twins show the objective."""

import pytest

from .pairing import MODEL, Pairs, codes, pair, twins

PAIRS: Pairs = {}
DATA = """
from torch.utils.data import DataLoader
data = DataLoader(files, batch_size=args.size, shuffle=True)
criterion = nn.CrossEntropyLoss()
"""
WINDOWS = """
for epoch in range(args.epochs):
    total = 0.0
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        total += loss.item()
        if (i + 1) % args.every == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
"""

pair(PAIRS, "an epoch's mean", "GA205", MODEL + WINDOWS + "    print(total / len(loader)@)\n",
     "", " * args.every")  # fmt: skip

pair(
    PAIRS,
    "a mean over several windows",
    "GA205",
    MODEL
    + """
running, shown = 0.0, []
for i in range(16):
    loss = F.cross_entropy(net(torch.randn(4, 8)), args.y) / 4
    loss.backward()
    running += loss.item()@
    if (i + 1) % 4 == 0:
        opt.step()
        opt.zero_grad()
    if (i + 1) % 8 == 0:
        shown.append(running / 8)
        running = 0.0
""",
    "",
    " * 4",
)

pair(
    PAIRS,
    "a class that keeps the sum",
    "GA205",
    """
class Trainer:
    def __init__(self, net, loader, every):
        self.net, self.loader, self.every = net, loader, every
        self.opt = torch.optim.AdamW(net.parameters())
    def epoch(self):
        total, seen = 0, 0
        for i, batch in enumerate(self.loader):
            loss = self.net(batch).mean()
            @
            loss.backward()
            total += float(loss)
            seen += 1
            if (i + 1) % self.every == 0 or i + 1 == len(self.loader):
                self.opt.step()
                self.opt.zero_grad()
        return total / seen
    def run(self):
        for epoch in range(9):
            self.epoch()
""",
    "loss = loss / self.every",
    "loss = loss",
)

pair(
    PAIRS,
    "shown as it is",
    "GA205",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    if args.every > 1:
        loss = loss / args.every
    loss.backward()
    if (i + 1) % args.every == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
    if i % 100 == 0:
        print(f"{i}: {loss.item()@:.4f}")
""",
    "",
    " * args.every",
)

pair(
    PAIRS,
    "shown with a scaler, under another name",
    "GA205",
    MODEL
    + """
scaler = torch.amp.GradScaler()
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    @ = loss / 4
    scaler.scale(@).backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    args.wandb.log({"loss": loss.item(), "step": i})
""",
    "loss",
    "share",
)

pair(
    PAIRS,
    "means over the samples",
    "GA205",
    MODEL
    + DATA
    + """
for epoch in range(3):
    total = 0.0
    for x, y in data:
        opt.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        opt.step()
        total += loss.item()@
    print(total / len(data.dataset))
""",
    "",
    " * x.size(0)",
)

pair(
    PAIRS,
    "means over the samples, by the data set's name",
    "GA205",
    MODEL
    + DATA
    + """
def train_epoch(data, criterion):
    total = 0.0
    for x, y in data:
        opt.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        opt.step()
        total += loss.item()
    return total / len(@)
for epoch in range(3):
    train_epoch(data, criterion)
""",
    "files",
    "data",
)

pair(
    PAIRS,
    "sums over the batches",
    "GA205",
    MODEL
    + DATA
    + """
for epoch in range(3):
    total = 0.0
    for x, y in data:
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        total += loss.item() * x.shape[0]
    print(total / len(@))
""",
    "data",
    "data.dataset",
)

test_a_log_of_another_loss_is_told_and_its_right_twin_is_not = twins(PAIRS)

RIGHT = {
    "shares, summed over a window": WINDOWS.replace(
        "        if (i + 1)", "        if (i + 1) % args.every == 0:\n            print(total)\n"
        "            total = 0.0\n        if (i + 1)"
    ),
    "shares over the updates": WINDOWS + "    print(total / (len(loader) / args.every))\n",
    "a criterion that sums": DATA.replace("Loss()", "Loss(reduction='sum')") + """
for epoch in range(3):
    total = 0.0
    for x, y in data:
        opt.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        opt.step()
        total += loss.item()
    print(total / len(data.dataset))
""",
    "single samples": DATA.replace("args.size", "1") + """
for epoch in range(3):
    total = 0.0
    for x, y in data:
        opt.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        opt.step()
        total += loss.item()
    print(total / len(data.dataset))
""",
    "computed anew before it is shown": """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
    loss = loss * 4
    print(loss.item())
""",
    "an alarm": """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / 4
    if not math.isfinite(loss.item()):
        print(loss.item())
        break
    loss.backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
""",
    "shown ahead of the division": """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    print(loss.item())
    loss = loss / 4
    loss.backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
""",
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_log_of_the_objective_is_silent(name):
    assert "GA205" not in codes(MODEL + RIGHT[name])
