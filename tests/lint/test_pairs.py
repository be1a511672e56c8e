"""Loops as people report them, each beside its right twin: what is said of one is not of the other."""

import pytest

from gradaccum.lint.judge import judge
from gradaccum.lint.program import Program

HEAD = """
import argparse, itertools, math
from contextlib import nullcontext
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from accelerate import Accelerator
from tqdm import tqdm
from data import loader, files, lengths
parser = argparse.ArgumentParser()
args = parser.parse_args()
"""

MODEL = """
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
"""

PAIRS: dict[str, tuple[str, str, tuple[str, str]]] = {}
"""Name to code, text with `@` where the two differ, and the wrong and the right text there."""


def pair(name: str, code: str, text: str, bad: str, good: str) -> None:
    PAIRS[name] = code, text, (bad, good)


pair("a branch that is not the usual one", "GA401", MODEL + """
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        if args.apex:
            with amp.scale_loss(loss, opt) as scaled:
                scaled.backward()
        else:
            loss.backward()
            @
        if (i + 1) % args.every == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
if args.evaluate:
    evaluate(net)
if args.predict and args.files:
    predict(net)
if args.export:
    export(net)
if args.publish:
    publish(net)
if args.report:
    report(net)
""", "nn.utils.clip_grad_norm_(net.parameters(), 1.0)", "pass")

pair("training behind an option for evaluation", "GA302", MODEL + """
def main():
    if not args.evaluate:
        classes = 2
    if args.evaluate:
        evaluate(net)
    else:
        for epoch in range(args.epochs):
            for i, (x, y) in enumerate(loader):
                loss = F.cross_entropy(net(x), y) / args.every
                loss.backward()
                if (i + 1) % args.every == 0@:
                    opt.step()
                    opt.zero_grad()
main()
""", "", " or i + 1 == len(loader)")

pair("a window beside other intervals", "GA302", MODEL + """
done = 0
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if done % args.show == 0:
            print(loss.item())
        if (i + 1) % args.every == 0@:
            opt.step()
            opt.zero_grad()
            done += 1
""", "", " or i + 1 == len(loader)")

pair("an optimizer of our own", "GA302", """
class Slow(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])

net = nn.Linear(8, 2)
opt = Slow(net.parameters(), 0.1)
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0@:
            opt.step()
            opt.zero_grad()
""", "", " or i + 1 == len(loader)")

pair("micro-batches of several passes", "GA401", MODEL + """
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        for width in (0.5, 0.75, 1.0):
            net.apply(lambda layer: setattr(layer, "width", width))
            loss = F.cross_entropy(net(x), y) / args.every
            loss.backward()
        @
        if (i + 1) % args.every == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
""", "nn.utils.clip_grad_norm_(net.parameters(), 1.0)", "pass")

pair("a leak where a micro-batch has several passes", "GA302", MODEL + """
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(net(x), y).div(args.every).backward()
        perturb(net)
        F.cross_entropy(net(x), y).div(args.every).backward()
        restore(net)
        if (i + 1) % args.every == 0@:
            opt.step()
            opt.zero_grad()
""", "", " or i + 1 == len(loader)")

pair("a counter that begins at one", "GA303", MODEL + """
for i, (x, y) in enumerate(loader, start=@):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if i % args.every == 0:
        opt.step()
        opt.zero_grad()
""", "0", "args.begun + 1")

pair("a counter that counts itself twice", "GA303", MODEL + """
seen = 0
while True:
    x, y = next(loader)
    seen += 1
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if @ % args.every == 0:
        opt.step()
        opt.zero_grad()
""", "(seen + 1)", "seen")

pair("a loop that ends with the last full window", "GA302", MODEL + """
updates = len(loader) // args.every
for epoch in range(args.epochs):
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        @
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0:
            opt.step()
            opt.zero_grad()
""", "pass", "if i // args.every >= updates: break")

pair("a loader cut to full windows", "GA302", MODEL + """
updates = len(loader) // args.every
while True:
    opt.zero_grad()
    for i, (x, y) in enumerate(@):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0:
            opt.step()
            opt.zero_grad()
""", "loader", "itertools.islice(loader, updates * args.every)")

pair("places in the window counted round", "GA102", MODEL + """
for (x, y), place in zip(loader, itertools.cycle(range(1, args.every + 1))):
    if place == @:
        opt.zero_grad()
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if place % args.every == 0:
        opt.step()
""", "args.every", "1")

pair("windows picked out of a list", "GA201", MODEL + """
batches = list(loader)
for i in range(len(batches) // args.every):
    for j in range(args.every):
        place = args.every * i + j
        x, y = batches[place]
        loss = F.cross_entropy(net(x), y)@
        loss.backward()
    opt.step()
    opt.zero_grad()
""", "", " / args.every")

pair("a small weight of one term", "GA201", MODEL + """
for i, (x, y) in enumerate(loader):
    out = net(x)
    loss = F.cross_entropy(out, y) + 0.05 * F.mse_loss(out, y)
    (loss@).backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""", "", " / args.every")

pair("a rate that is divided by the batch", "GA201", """
net = nn.Linear(8, 2)
opt = torch.optim.SGD(net.parameters(), lr=@)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""", "args.rate", "args.rate / args.batch")

pair("a clip by another name", "GA401", """
class GradientClipper:
    def __init__(self, limit):
        self.limit = limit

    def step(self, params):
        shrink([p.grad for p in params], self.limit)

clipper = GradientClipper(1.0)
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    @
    if (i + 1) % args.every == 0:
        clipper.step(net.parameters())
        opt.step()
        opt.zero_grad()
""", "clipper.step(net.parameters())", "pass")

pair("a helper that scales gradients", "GA201", """
net = nn.Linear(8, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if (i + 1) % args.every == 0:
        @
        opt.step()
        opt.zero_grad()
""", "pass", "opt.multiply_grads(1 / args.every)")

pair("an engine that nothing tells when", "GA102", """
accelerator = Accelerator(gradient_accumulation_steps=args.every)
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, opt, loader = accelerator.prepare(net, opt, loader)
for x, y in loader:
    with @:
        loss = F.cross_entropy(net(x), y)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
""", "torch.enable_grad()", "accelerator.accumulate(net)")

pair("a callback of an engine", "GA401", """
from ignite.engine import Engine

def train():
    net = nn.Linear(8, 2)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def update(engine, batch):
        x, y = batch
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        @
        if engine.state.iteration % args.every == 0:
            opt.step()
            opt.zero_grad()
        return loss.item()

    trainer = Engine(update)
    trainer.run(loader)
""", "nn.utils.clip_grad_norm_(net.parameters(), 1.0)", "pass")

pair("no_sync asked for", "GA601", MODEL + """
net = DDP(net)
for i, (x, y) in enumerate(loader):
    with @:
        (F.cross_entropy(net(x), y) / args.every).backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""", "torch.enable_grad()",
     "net.no_sync() if hasattr(net, 'no_sync') and (i + 1) % args.every else nullcontext()")

pair("a wrapped teacher", "GA601", MODEL + """
teacher = DDP(nn.Linear(8, 2))
@
for i, (x, y) in enumerate(loader):
    with torch.no_grad():
        wanted = teacher(x)
    loss = F.mse_loss(net(x), wanted) / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""", "net = DDP(net)", "pass")

pair("a scale that is set by hand", "GA404", MODEL + """
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    scaler.scale(loss).backward()
    if (i + 1) % args.every == 0:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    scaler.update(@)
""", "", "scaler.get_scale() * 2")

pair("a part that is put back by itself", "GA703", """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))

net = Two()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for epoch in range(args.epochs):
    @
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
    net.eval()
    check(net)
""", "pass", "net.head.train()")

pair("a detour that is wiped", "GA102", MODEL + """
for i, (x, y) in enumerate(loader):
    @
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
        if probing(i):
            F.cross_entropy(net(x), y).backward()
            opt.zero_grad()
""", "opt.zero_grad()", "pass")

pair("a setting that is refused", "GA302", MODEL + """
known, rest = parser.parse_known_args()
if len(rest) > 0:
    raise ValueError(rest)
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0@:
            opt.step()
            opt.zero_grad()
""", "", " or i + 1 == len(loader)")

pair("a window that grows on the way", "GA303", MODEL + """
every = 4
for i, (x, y) in enumerate(loader):
    if i < args.warmup:
        @
    loss = F.cross_entropy(net(x), y) / every
    loss.backward()
    if i % every == 0:
        opt.step()
        opt.zero_grad()
""", "pass", "every = max(1, round(math.exp(i)))")


def codes(text: str) -> set[str]:
    program = Program({"train.py": HEAD + text})
    module = program.load("train.py")
    assert module is not None, text
    return {one.code for one in judge(program, module)}


@pytest.mark.parametrize("name", PAIRS)
def test_one_is_blamed_and_its_twin_is_not(name):
    code, text, (bad, good) = PAIRS[name]
    assert code in codes(text.replace("@", bad))
    assert code not in codes(text.replace("@", good))


def test_names_of_values_do_not_grow_without_bound():
    lines = "\n".join(f"            mean = mean * {i} + mean / (mean + i)" for i in range(9))
    text = MODEL + f"""
mean = args.mean
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        for j in range(9):
{lines}
        loss = F.cross_entropy(net(x), y) * mean
        loss.backward()
        opt.step()
        opt.zero_grad()
"""
    assert codes(text) == set()
