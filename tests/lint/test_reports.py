"""Faults as bug reports tell them, from all over the catalogue, each beside its mended twin."""

import pytest

from .pairing import MODEL, codes

LOOP = (
    MODEL
    + """
history = []
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
"""
)
AMP = (
    MODEL
    + """
scaler = torch.cuda.amp.GradScaler()
for i, (x, y) in enumerate(loader):
    with torch.cuda.amp.autocast():
        loss = F.cross_entropy(net(x), y) / args.every
    scaler.scale(loss).backward()
    if (i + 1) % args.every == 0:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
"""
)
CLASS = """
class Learner:
    def __init__(self, net, every=1):
        self.net = net
        self.every = every
        self.optim = torch.optim.AdamW(net.parameters(), lr=3e-4)
        self.plan = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, 100)
        self.count = 0

    def one(self, x, y):
        loss = self.cost(x, y)
        (loss / self.every).backward()
        self.count += 1
        if self.count % self.every == 0:
            self.apply()
        return loss.item()

    def cost(self, x, y):
        return F.cross_entropy(self.net(x), y)

    def apply(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optim.step()
        self.plan.step()
        self.optim.zero_grad(set_to_none=True)

    def run(self, batches):
        for x, y in batches:
            self.one(x, y)
"""
GAN = """
G, D = nn.Linear(4, 8), nn.Linear(8, 1)
g_opt = torch.optim.Adam(G.parameters())
d_opt = torch.optim.Adam(D.parameters())
for x, _ in loader:
    d_opt.zero_grad()
    fake = G(torch.randn(4, 4))
    d_loss = D(fake.detach()).mean() - D(x).mean()
    d_loss.backward()
    d_opt.step()
    g_opt.zero_grad()
    g_loss = -D(fake).mean()
    g_loss.backward()
    g_opt.step()
"""
REPORTS: dict[str, tuple[str, str, str, str]] = {
    "zeroed as the tutorial does": (
        "GA102", LOOP, "        loss = F", "        opt.zero_grad()\n        loss = F"),
    "never divided": ("GA201", LOOP, " / args.every\n", "\n"),
    "divided before and in the call": (
        "GA202", LOOP, "loss.backward()", "(loss / args.every).backward()"),
    "the tail is forgotten": ("GA302", LOOP, " or i + 1 == len(loader)", ""),
    "total of losses with their graphs": (
        "GA501", LOOP, "        loss.backward()",
        "        loss.backward()\n        history.append(loss)"),
    "optimizer inside the epoch": (
        "GA304", LOOP, "    for i,", "    opt = torch.optim.AdamW(net.parameters())\n    for i,"),
    "detached to save memory": ("GA503", LOOP, "loss.backward()", "loss.detach().backward()"),
    "clipped while still scaled": ("GA402", AMP, "        scaler.unscale_(opt)\n", ""),
    "unscaled for every micro-batch": (
        "GA403", AMP, "    if (i + 1)", "    scaler.unscale_(opt)\n    if (i + 1)"),
    "past the scaler": (
        "GA406", AMP.replace("        scaler.unscale_(opt)\n", ""), "scaler.step(opt)",
        "opt.step()"),
    "scale that never adapts": ("GA404", AMP, "        scaler.update()\n", ""),
    "clipped too late": (
        "GA405", AMP,
        "        nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n        scaler.step(opt)\n",
        "        scaler.step(opt)\n        nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"),
    "a schedule on every call of a method": (
        "GA305", CLASS, "        self.count += 1\n",
        "        self.count += 1\n        self.plan.step()\n"),
    "a method that forgets to divide": ("GA201", CLASS, "(loss / self.every)", "loss"),
    "a method that never clears": (
        "GA101", CLASS, "        self.optim.zero_grad(set_to_none=True)\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_found_and_its_mend_is_not(name):
    code, right, old, new = REPORTS[name]
    assert old in right
    assert code not in codes(right)
    assert code in codes(right.replace(old, new, 1))


@pytest.mark.parametrize("text", [LOOP, AMP, CLASS, GAN])
def test_what_is_right_stays_silent(text):
    assert codes(text) <= {"GA204"}
