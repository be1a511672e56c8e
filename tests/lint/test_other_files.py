"""Loops whose model, optimizer or wrapping is made in another file, each beside its right twin."""

import pytest

from gradaccum.lint.engine import lint
from gradaccum.lint.files.program import Program
from gradaccum.lint.files.sources import Source
from gradaccum.lint.judge import judge
from gradaccum.lint.settings import load

Files = dict[str, str]

LOOP = """
for i, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(net(x), y) / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
"""
HEAD = """
import argparse
import torch
from torch import nn
from data import loader
args = argparse.ArgumentParser().parse_args()
"""
WRAP = """
from torch.nn.parallel import DistributedDataParallel

def wrapped(args, net):
    if args.ranks > 1:
        net = DistributedDataParallel(net)
    return net
"""
MODEL = """
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
"""
MADE = f"{MODEL}net = wrapped(args, net)\n"
BASE = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Base:
    def __init__(self, args):
        self.args = args
        self.net = nn.Linear(8, 2)
        self.net = self.spread(self.net)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def spread(self, net):
        return DDP(net)
"""
TRAINER = """
from base import Base
from torch import nn

class Trainer(Base):
    def __init__(self, args, loader):
        super().__init__(args)
        self.loader = loader

    def fit(self):
        for i, (x, y) in enumerate(self.loader):
            loss = nn.functional.cross_entropy(self.net(x), y) / self.args.every
            loss.backward()
            if (i + 1) % self.args.every == 0:
                self.opt.step()
                self.opt.zero_grad()
"""

CASES: dict[str, tuple[str, Files, tuple[str, str, str]]] = {
    "wrapped by a helper": (
        "GA601",
        {"train.py": f"{HEAD}\nfrom tools import wrapped\n{MADE}{LOOP}", "tools.py": WRAP},
        ("tools.py", "net = DistributedDataParallel(net)", "net = nn.DataParallel(net)"),
    ),
    "wrapped by a helper of a package": (
        "GA601",
        {
            "train.py": f"{HEAD}\nfrom tools import wrapped\n{MADE}{LOOP}",
            "tools/__init__.py": "from .spread import wrapped\n",
            "tools/spread.py": WRAP,
        },
        ("tools/spread.py", "net = DistributedDataParallel(net)", "net = nn.DataParallel(net)"),
    ),
    "wrapped by a helper that was imported with all others": (
        "GA601",
        {"train.py": f"{HEAD}\nfrom tools import *\n{MADE}{LOOP}", "tools.py": WRAP},
        ("tools.py", "net = DistributedDataParallel(net)", "net = nn.DataParallel(net)"),
    ),
    "wrapped by the class that this one is made of": (
        "GA601",
        {"train.py": TRAINER, "base.py": BASE},
        ("base.py", "return DDP(net)", "return net"),
    ),
    "two models from one helper": (
        "GA601",
        {
            "train.py": HEAD
            + "from tools import make\n"
            + "from torch.nn.parallel import DistributedDataParallel as DDP\n"
            + "net, teacher = make(1), make(2)\nnet = DDP(net)\nteacher = DDP(teacher)\n"
            + "opt = torch.optim.AdamW(net.parameters(), lr=1e-3)\n"
            + LOOP.replace("net(x), y)", "net(x), teacher(x).argmax(1))"),
            "tools.py": "from zoo import load\n\n"
            "def make(kind):\n    net = load(kind)\n    return net\n",
        },
        ("train.py", "net = DDP(net)\n", "\n"),
    ),
    "an optimizer that a setting may wrap": (
        "GA302",
        {
            "train.py": HEAD
            + "from tools import made\nnet = nn.Linear(8, 2)\nopt = made(net, args.half)\n"
            + "for epoch in range(args.epochs):"
            + LOOP.replace("\n", "\n    "),
            "tools.py": "import torch\n\ndef made(net, half):\n"
            "    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)\n"
            "    if half:\n        opt = halved(opt)\n"
            "    return opt\n",
        },
        ("tools.py", "    if half:", "    if net:"),
    ),
    "a loop that a file without one calls": (
        "GA601",
        {
            "train.py": HEAD
            + "from tools import epoch\nimport torch.multiprocessing as mp\n"
            + "from torch.nn.parallel import DistributedDataParallel as DDP\n"
            + "def work(rank, args):\n    net = nn.Linear(8, 2)\n    net = DDP(net)\n"
            + "    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)\n"
            + "    for number in range(args.epochs):\n        epoch(net, opt, args)\n"
            + "mp.spawn(work, args=(args,), nprocs=2)\n",
            "tools.py": "from torch import nn\nfrom data import loader\n\n"
            "def epoch(net, opt, args):\n    pass\n" + LOOP.replace("\n", "\n    ") + "\n",
        },
        ("train.py", "    net = DDP(net)\n", "\n"),
    ),
    "an optimizer that the model's own method makes": (
        "GA302",
        {
            "train.py": HEAD
            + "from tools import Net\nnet = Net()\nopt = net.configure_optimizers(1e-3)\n"
            + "for epoch in range(args.epochs):"
            + LOOP.replace("\n", "\n    "),
            "tools.py": "import torch\nfrom torch import nn\n\nclass Net(nn.Module):\n"
            "    def forward(self, x):\n        return x\n\n"
            "    def configure_optimizers(self, rate):\n"
            "        decay = [p for p in self.parameters() if p.dim() > 1]\n"
            "        groups = [{'params': decay, 'weight_decay': rate}]\n"
            "        return torch.optim.AdamW(groups, lr=rate)\n",
        },
        ("train.py", "% args.every == 0:", "% args.every == 0 or i + 1 == len(loader):"),
    ),
    "evaluated by a helper": (
        "GA703",
        {
            "train.py": f"{HEAD}\nfrom tools import Judge\n{MODEL}net.train()\n"
            + LOOP
            + "        Judge(args).score(net)\n",
            "tools.py": "import torch\n\nclass Judge:\n"
            "    def __init__(self, args):\n        self.args = args\n\n"
            "    def score(self, net):\n        net.eval()\n        with torch.no_grad():\n"
            "            done = [net(x) for x in self.args.files]\n"
            "        return done\n",
        },
        ("tools.py", "        return done", "        net.train()\n        return done"),
    ),
}  # fmt: skip


def codes(files: Files) -> set[str]:
    program = Program(dict(files))
    module = program.load("train.py")
    assert module is not None
    return {one.code for one in judge(program, module)}


@pytest.mark.parametrize("name", CASES)
def test_one_is_blamed_and_its_twin_is_not(name):
    code, files, (path, bad, good) = CASES[name]
    assert files[path].count(bad) == 1
    assert code in codes(files)
    assert code not in codes({**files, path: files[path].replace(bad, good)})


@pytest.mark.parametrize("name", CASES)
def test_the_command_follows_into_files_without_a_loop(name):
    code, files, _ = CASES[name]
    sources = [Source(path, text.encode()) for path, text in files.items()]
    assert code in {item.code for item in lint(sources, load([], []), 1).findings}


DRIVER = "a loop that a file without one calls"


def test_the_command_walks_from_a_file_that_only_wraps_and_calls():
    _, files, (path, bad, good) = CASES[DRIVER]
    right = {**files, path: files[path].replace(bad, good)}
    for given, wanted in ((files, True), (right, False)):
        sources = [Source(path, text.encode()) for path, text in given.items()]
        found = {item.code for item in lint(sources, load([], []), 1).findings}
        assert ("GA601" in found) is wanted


def test_what_one_file_opened_changes_nothing_for_another():
    _, files, _ = CASES["wrapped by a helper"]
    alone = Program(dict(files))
    first = judge(alone, alone.load("tools.py"))  # type: ignore[arg-type]
    both = Program(dict(files))
    judge(both, both.load("train.py"))  # type: ignore[arg-type]
    assert judge(both, both.load("tools.py")) == first  # type: ignore[arg-type]
