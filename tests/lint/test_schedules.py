"""Schedules planned in one unit and stepped in another; right twins are planned as they step."""

import pytest

from .pairing import MODEL, Pairs, codes, pair, twins

PAIRS: Pairs = {}
SCHED = "from torch.optim import lr_scheduler as sched_lib\nimport transformers\n"

pair(
    PAIRS,
    "a plain script, linear with warm-up",
    "GA312",
    SCHED
    + MODEL
    + """
total = args.epochs * len(loader)@
sched = transformers.get_linear_schedule_with_warmup(opt, 0, total)
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(tqdm(loader)):
        (F.cross_entropy(net(x), y) / args.every).backward()
        if (i + 1) % args.every == 0 or i + 1 == len(loader):
            opt.step()
            sched.step()
            opt.zero_grad()
""",
    "",
    " // args.every",
)

pair(
    PAIRS,
    "a class that keeps its loader, rounded up",
    "GA312",
    SCHED
    + """
class Trainer:
    def __init__(self, net, train_loader, cfg):
        self.net, self.train_loader, self.cfg = net, train_loader, cfg
        self.opt = torch.optim.AdamW(net.parameters())
        self.sched = self.make()
    def make(self):
        steps = @ * self.cfg.epochs
        return sched_lib.OneCycleLR(self.opt, max_lr=0.1, total_steps=steps)
    def fit(self):
        for epoch in range(self.cfg.epochs):
            for i, batch in enumerate(self.train_loader):
                loss = self.net(batch).mean() / self.cfg.every
                loss.backward()
                if (i + 1) % self.cfg.every == 0 or i + 1 == len(self.train_loader):
                    self.opt.step()
                    self.opt.zero_grad()
                    self.sched.step()
""",
    "len(self.train_loader)",
    "math.ceil(len(self.train_loader) / self.cfg.every)",
)

pair(
    PAIRS,
    "helpers that make and train",
    "GA312",
    SCHED
    + """
def make(net, total):
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    return opt, sched_lib.CosineAnnealingLR(opt, T_max=total)
def train_epoch(net, data, opt, sched, every):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(net(x), y) / every).backward()
        if (i + 1) % every == 0 or i + 1 == len(data):
            opt.step()
            opt.zero_grad()
            sched.step()
def main():
    net = nn.Linear(4, 2)
    data = torch.utils.data.DataLoader(files, batch_size=args.size)
    opt, sched = make(net, @)
    for epoch in range(args.epochs):
        train_epoch(net, data, opt, sched, args.every)
main()
""",
    "args.epochs * len(data)",
    "int(args.epochs * len(data) / args.every)",
)

pair(
    PAIRS,
    "a closure that divides by its total",
    "GA312",
    SCHED
    + MODEL
    + """
total = @
sched = sched_lib.LambdaLR(opt, lambda step: max(0.0, 1.0 - step / float(max(1, total))))
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(net(x), y) / 4).backward()
        if (i + 1) % 4 == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
            sched.step()
""",
    "len(loader) * 3",
    "len(loader) * 3 // 4",
)

pair(
    PAIRS,
    "a prepared scheduler moves once an update",
    "GA312",
    SCHED
    + MODEL
    + """
acc = Accelerator(gradient_accumulation_steps=args.every)
sched = transformers.get_scheduler("linear", opt, num_warmup_steps=0, num_training_steps=@)
net, opt, data, sched = acc.prepare(net, opt, loader, sched)
for epoch in range(args.epochs):
    for x, y in data:
        with acc.accumulate(net):
            acc.backward(F.cross_entropy(net(x), y))
            opt.step()
            sched.step()
            opt.zero_grad()
""",
    "args.epochs * len(loader)",
    "args.epochs * math.ceil(len(loader) / args.every)",
)

pair(
    PAIRS,
    "a prepared scheduler that is planned N times too long",
    "GA312",
    SCHED
    + MODEL
    + """
acc = Accelerator(gradient_accumulation_steps=args.every)
sched = transformers.get_scheduler(
    "linear", optimizer=opt, num_warmup_steps=args.warmup,
    num_training_steps=args.max_train_steps * @,
)
net, opt, data, sched = acc.prepare(net, opt, loader, sched)
for epoch in range(args.epochs):
    for x, y in data:
        with acc.accumulate(net):
            acc.backward(F.cross_entropy(net(x), y))
            opt.step()
            sched.step()
            opt.zero_grad()
""",
    "args.every",
    "acc.num_processes",
)

pair(
    PAIRS,
    "steps counted by the loop itself",
    "GA312",
    SCHED
    + MODEL
    + """
sched = sched_lib.CosineAnnealingLR(opt, args.steps@)
for step in range(args.steps):
    x, y = next(loader)
    (F.cross_entropy(net(x), y) / 4).backward()
    if (step + 1) % 4 == 0:
        opt.step()
        sched.step()
        opt.zero_grad()
""",
    "",
    " // 4",
)

pair(
    PAIRS,
    "one cycle, stepped once an epoch",
    "GA312",
    SCHED
    + MODEL
    + """
sched = sched_lib.OneCycleLR(opt, 0.1, epochs=args.epochs, steps_per_epoch=len(loader))
for epoch in range(args.epochs):
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
@sched.step()
""",
    "    ",
    "        ",
)

pair(
    PAIRS,
    "a cosine over the batches of an epoch",
    "GA312",
    SCHED
    + """
class Learner:
    def __init__(self, net, loader, opt):
        self.net, self.loader, self.opt = net, loader, opt
        self.sched = sched_lib.CosineAnnealingLR(opt, T_max=@)
    def epoch(self):
        for x, y in self.loader:
            self.opt.zero_grad()
            F.cross_entropy(self.net(x), y).backward()
            self.opt.step()
    def run(self, epochs):
        for epoch in range(epochs):
            self.epoch()
            self.sched.step()
""",
    "len(self.loader)",
    "args.epochs",
)

pair(
    PAIRS,
    "half of the epochs, stepped in every batch",
    "GA312",
    SCHED
    + MODEL
    + """
epochs, batches = 8, 5
sched = sched_lib.StepLR(opt, step_size=epochs // 2, gamma=0.1)
for epoch in range(epochs):
    for batch in range(batches):
        opt.zero_grad()
        net(torch.randn(6, 8)).sum().backward()
        opt.step()
@sched.step()
""",
    "        ",
    "    ",
)

pair(
    PAIRS,
    "epochs of a setting, through a helper",
    "GA312",
    SCHED
    + """
def train(net, data, cfg):
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sched = sched_lib.CosineAnnealingLR(opt, T_max=cfg.train.epochs)
    for epoch in range(1, cfg.train.epochs + 1):
        net.train()
        for x, y in tqdm(data):
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
@sched.step()
""",
    "            ",
    "        ",
)

pair(
    PAIRS,
    "milestones in epochs",
    "GA312",
    SCHED
    + MODEL
    + """
sched = sched_lib.MultiStepLR(opt, milestones=[int(args.epochs * 0.5), int(args.epochs * 0.75)])
for epoch in range(args.epochs):
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
@sched.step()
""",
    "        ",
    "    ",
)

pair(
    PAIRS,
    "planned in updates, stepped in every micro-batch",
    "GA305",
    SCHED
    + MODEL
    + """
total = args.epochs * len(loader)@
sched = transformers.get_cosine_schedule_with_warmup(opt, 0, total)
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(net(x), y) / args.every).backward()
        sched.step()
        if (i + 1) % args.every == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
""",
    " // args.every",
    "",
)

pair(
    PAIRS,
    "a plateau that sees single micro-batches",
    "GA305",
    SCHED
    + MODEL
    + """
plateau = sched_lib.ReduceLROnPlateau(opt, patience=2)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    (loss / 4).backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
@plateau.step(loss.item())
""",
    "    ",
    "        ",
)

pair(
    PAIRS,
    "a scheduler that was not prepared",
    "GA305",
    SCHED
    + MODEL
    + """
acc = Accelerator(gradient_accumulation_steps=4)
sched = sched_lib.ExponentialLR(opt, 0.9)
net, opt, data = acc.prepare(net, opt, loader)
@
for x, y in data:
    with acc.accumulate(net):
        acc.backward(F.cross_entropy(net(x), y))
        opt.step()
        sched.step()
        opt.zero_grad()
""",
    "",
    "sched = acc.prepare(sched)",
)

test_a_schedule_in_another_unit_is_blamed_and_its_right_twin_is_not = twins(PAIRS)

RIGHT = {
    "chunks of a batch": """
sched = sched_lib.OneCycleLR(opt, 0.1, total_steps=args.epochs * len(loader))
for epoch in range(args.epochs):
    for x, y in loader:
        opt.zero_grad()
        for a, b in zip(x.chunk(4), y.chunk(4)):
            (F.cross_entropy(net(a), b) / 4).backward()
        opt.step()
        sched.step()
""",
    "phases of an epoch": """
sched = sched_lib.CosineAnnealingLR(opt, T_max=args.epochs)
for epoch in range(args.epochs):
    for phase in ["train", "val"]:
        for x, y in loader[phase]:
            if phase == "train":
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
                opt.step()
        if phase == "train":
            sched.step()
""",
    "told where it stands": """
sched = sched_lib.CosineAnnealingWarmRestarts(opt, T_0=args.epochs)
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        sched.step(epoch + i / len(loader))
""",
    "the last batch of an epoch": """
sched = sched_lib.CosineAnnealingLR(opt, T_max=args.epochs)
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        if i + 1 == len(loader):
            sched.step()
""",
    "planned in batches of an epoch": """
sched = sched_lib.CosineAnnealingLR(opt, T_max=args.epochs * args.steps_per_epoch)
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        sched.step()
""",
    "the length of another loader": """
sched = sched_lib.CosineAnnealingLR(opt, T_max=len(lengths))
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    sched.step()
""",
    "a length that is counted later": """
class Feed:
    def __init__(self):
        self.length = 0
feed = Feed()
total = feed.length // args.every * args.epochs
sched = sched_lib.LambdaLR(opt, lambda n: (total - n) / max(1, total - args.warmup))
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(net(x), y) / args.every).backward()
        if (i + 1) % args.every == 0 or i + 1 == len(loader):
            opt.step()
            sched.step()
            opt.zero_grad()
""",
    "a period of as many batches as there are epochs written": """
sched = sched_lib.StepLR(opt, step_size=8)
for epoch in range(8):
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        sched.step()
""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_schedule_planned_as_it_steps_is_silent(name):
    assert not codes(SCHED + MODEL + RIGHT[name]) & {"GA305", "GA312"}


LIGHTNING = """
import lightning
epochs, every = args.epochs, @every
data = torch.utils.data.DataLoader(files, batch_size=4)
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
    def training_step(self, batch, i):
        return self.fc(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.1)
        @body
lightning.Trainer(max_epochs=epochs, accumulate_grad_batches=every).fit(Net(), data)
"""
ONCE = "sched = sched_lib.OneCycleLR(opt, 0.1, total_steps=steps)\n        "
STEP = 'return [opt], [{"scheduler": sched, "interval": "step"}]'
CASES = (
    ("steps = epochs * len(data)\n        " + ONCE + STEP, 4, True),
    ("steps = epochs * len(data)\n        " + ONCE + STEP, 1, False),
    ("steps = epochs * len(data) // every\n        " + ONCE + STEP, 4, False),
    ("steps = epochs * len(data)\n        " + ONCE + "return [opt], [sched]", 1, True),
    ("steps = self.trainer.estimated_stepping_batches\n        " + ONCE + STEP, 4, False),
    ("steps = self.trainer.estimated_stepping_batches\n        " + ONCE
     + 'return {"optimizer": opt, "lr_scheduler": sched}', 1, True),
    ("sched = sched_lib.CosineAnnealingLR(opt, self.trainer.max_epochs)\n        "
     + 'return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}',
     1, True),
    ("sched = sched_lib.CosineAnnealingLR(opt, self.trainer.max_epochs)\n        "
     + "return [opt], [sched]", 1, False),
)  # fmt: skip


@pytest.mark.parametrize(("body", "every", "wrong"), CASES)
def test_lightning_steps_once_an_epoch_or_once_an_update(body, every, wrong):
    text = LIGHTNING.replace("@every", str(every)).replace("@body", body)
    assert ("GA312" in codes(SCHED + text)) is wrong
    by_hand = text.replace("        return self", "        self.lr_schedulers().step()\n"
                           "        return self")  # fmt: skip
    assert "GA312" not in codes(SCHED + by_hand)
