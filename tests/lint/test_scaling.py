"""Losses that are divided for their window, otherwise, twice, or not at all."""

import pytest

from gradaccum.lint.files.program import Program
from gradaccum.lint.judge import judge

from .pairing import MODEL, Pairs, pair, twins
from .planting import codes

PAIRS: Pairs = {}


pair(
    PAIRS,
    "windows picked out of a list",
    "GA201",
    MODEL
    + """
batches = list(loader)
for i in range(len(batches) // args.every):
    for j in range(args.every):
        place = args.every * i + j
        x, y = batches[place]
        loss = F.cross_entropy(net(x), y)@
        loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "",
    " / args.every",
)

pair(
    PAIRS,
    "a small weight of one term",
    "GA201",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    out = net(x)
    loss = F.cross_entropy(out, y) + 0.05 * F.mse_loss(out, y)
    (loss@).backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "",
    " / args.every",
)

pair(
    PAIRS,
    "a rate that is divided by the batch",
    "GA201",
    """
net = nn.Linear(8, 2)
opt = torch.optim.SGD(net.parameters(), lr=@)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "args.rate",
    "args.rate / args.batch",
)

pair(
    PAIRS,
    "a helper that scales gradients",
    "GA201",
    """
net = nn.Linear(8, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if (i + 1) % args.every == 0:
        @
        opt.step()
        opt.zero_grad()
""",
    "pass",
    "opt.multiply_grads(1 / args.every)",
)

pair(
    PAIRS,
    "a rate that is divided, whichever optimizer is chosen",
    "GA201",
    """
net = nn.Linear(8, 2)
if args.kind == "adam":
    opt = torch.optim.Adam(net.parameters(), lr=@)
elif args.kind == "sgd":
    opt = torch.optim.SGD(net.parameters(), lr=@)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "args.rate",
    "args.rate / args.batch",
)

pair(
    PAIRS,
    "gradients that are scaled, or are by the scaler's own step",
    "GA201",
    MODEL
    + """
from own import multiply_grads
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    if (i + 1) % args.every == 0:
        if args.kind == "adam" and not args.half:
            pass
        elif args.half:
            opt.multiply_grads(1 / args.every)
        else:
            @
        if args.kind == "adam" and not args.half:
            scaler.step(opt, scale=args.every)
        else:
            scaler.step(opt)
        scaler.update()
        opt.zero_grad()
""",
    "pass",
    "multiply_grads(opt, 1 / args.every)",
)


pair(
    PAIRS,
    "one backward pass in each branch",
    "GA201",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)@
    if i % args.every == 0:
        opt.zero_grad()
        loss.backward()
    elif i % args.every == args.every - 1:
        loss.backward()
        opt.step()
    else:
        loss.backward()
""",
    "",
    " / args.every",
)

pair(
    PAIRS,
    "a list that is filled on the way, and asked whether it is empty",
    "GA201",
    MODEL
    + """
for i, (rows, y) in enumerate(loader):
    kept = []
    for row in rows:
        kept.extend([row, row.flip(0)])
    if len(kept) == 0:
        continue
    loss = F.cross_entropy(net(torch.stack(kept)), y)@
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "",
    " / args.every",
)

pair(
    PAIRS,
    "a mean over a micro-batch's own tokens",
    "GA201",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    out = net(x)
    loss = F.cross_entropy(out["logits"], y, reduction="sum") / out["tokens"]
    (loss@).backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "",
    " / args.every",
)

pair(
    PAIRS,
    "a factor that is the width of the output",
    "GA201",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    loss = F.binary_cross_entropy(net(x), y) * y.size(1)
    (loss@).backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "",
    " * args.share",
)

pair(
    PAIRS,
    "a division that only the last micro-batch of a window gets",
    "GA201",
    MODEL
    + """
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y)
        if (i + 1) % args.every == 0:
            loss = loss / args.every
            loss.backward()
            opt.step()
            opt.zero_grad()
        else:
            @
            loss.backward()
""",
    "pass",
    "loss = loss / args.every",
)

ENGINE = """
import deepspeed
from model import Reader
net = Reader()
engine, opt, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters())
every = engine.gradient_accumulation_steps()
"""

pair(
    PAIRS,
    "a length that the engine divides by itself",
    "GA202",
    ENGINE
    + """
for x, y in loader:
    loss = F.cross_entropy(engine(x), y)@
    engine.backward(loss)
    engine.step()
""",
    " / every",
    "",
)

pair(
    PAIRS,
    "a length from the plugin's settings",
    "GA202",
    """
from model import Reader
accelerator = Accelerator()
net = Reader()
opt = torch.optim.AdamW(net.parameters())
settings = accelerator.state.deepspeed_plugin.deepspeed_config
every = settings["gradient_accumulation_steps"]
net, opt = accelerator.prepare(net, opt)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)@
    accelerator.backward(loss)
    if (i + 1) % every == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
""",
    " / every",
    "",
)

pair(
    PAIRS,
    "a rate that was divided before",
    "GA201",
    """
net = nn.Linear(8, 2)
rate = args.rate / args.batch / @
opt = torch.optim.SGD(net.parameters(), lr=rate)
batches = iter(loader)
for turn in range(args.turns):
    opt.zero_grad()
    for part in range(args.every):
        x, y = next(batches)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
    opt.step()
""",
    "2",
    "args.every",
)


test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)


TRAINER = """
class Trainer:
    def __init__(self, model, loader, *, every=1, total=1000):
        self.model = model
        self.loader = loader
        self.every = every
        self.total = total
        self.opt = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.done = 0

    def train(self):
        while self.done < self.total:
            for _ in range(self.every):
                loss = self.model(next(self.loader)).mean()
                LOSS.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.done += 1
"""


def test_a_default_of_one_is_a_window_that_may_be_set():
    assert "GA201" in codes(TRAINER.replace("LOSS", "loss"))


@pytest.mark.parametrize("divided", ["(loss / self.every)", "(loss * (1 / self.every))"])
def test_what_was_divided_is_not_called_undivided(divided):
    assert not codes(TRAINER.replace("LOSS", divided))


def test_a_script_that_steps_every_time_stays_silent():
    assert not codes(TRAINER.replace("range(self.every)", "range(1)").replace("LOSS", "loss"))


IGNORED = """
def train(model, loader, every):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        PREPARE
        loss = torch.nn.functional.cross_entropy(model(x), y, ignore_index=0)
        (loss / every).backward()
        if (i + 1) % every == 0:
            opt.step()
            opt.zero_grad()
"""


def test_a_mean_over_tokens_is_noted_only_where_the_script_makes_some_to_ignore():
    assert "GA203" in codes(IGNORED.replace("PREPARE", "y = y.masked_fill(y < 0, 0)"))
    assert "GA203" not in codes(IGNORED.replace("PREPARE", "y = y.long()"))


@pytest.mark.parametrize("made", ["Speller(8)", "Speller.from_pretrained(args.start)"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sum_that_the_model_returns_is_rightly_not_divided(made, reduction):
    speller = f"""
from torch import nn
from torch.nn import functional as F

class Speller(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x, y):
        return F.cross_entropy(self.layer(x), y, reduction="{reduction}")
"""
    loop = f"""
import torch
from speller import Speller
from data import args, loader
net = {made}
opt = torch.optim.AdamW(net.parameters())
for i, (x, y) in enumerate(loader):
    loss = net(x, y)
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
"""
    program = Program({"speller.py": speller, "train.py": loop})
    module = program.load("train.py")
    assert module is not None
    found = {one.code for one in judge(program, module)}
    assert ("GA201" in found) == (reduction == "mean")
