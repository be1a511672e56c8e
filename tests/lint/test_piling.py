"""Gradients that pile up between two steps: GA101, and closures."""

from .pairing import MODEL, Pairs, pair, twins

PAIRS: Pairs = {}

pair(
    PAIRS,
    "cleared once an epoch",
    "GA101",
    MODEL
    + """
for epoch in range(args.epochs):
    @
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
""",
    "opt.zero_grad()\n    for x, y in loader:",
    "for x, y in loader:\n        opt.zero_grad()",
)

pair(
    PAIRS,
    "cleared before the loop of a method",
    "GA101",
    """
class Trainer:
    def __init__(self, net):
        self.net, self.opt = net, torch.optim.SGD(net.parameters(), lr=0.1)
    def epoch(self):
        self.net.zero_grad()
        for x, y in loader:
            F.cross_entropy(self.net(x), y).backward()
            self.opt.step()
            @
trainer = Trainer(nn.Linear(8, 2))
for epoch in range(3):
    trainer.epoch()
""",
    "print(x)",
    "self.net.zero_grad()",
)

CLOSURE = """
net = nn.Linear(8, 2)
opt = torch.optim.LBFGS(net.parameters(), max_iter=@)
x, y = files()
def closure():
    loss = F.mse_loss(net(x), y)
    loss.backward()
    return loss
for _ in range(20):
    opt.zero_grad()
    opt.step(closure)
"""
pair(PAIRS, "a closure that does not clear", "GA101", CLOSURE, "20", "1")
pair(
    PAIRS,
    "a closure that clears",
    "GA101",
    CLOSURE.replace("@", "20").replace("    loss = F", "    @\n    loss = F"),
    "net.train()",
    "opt.zero_grad()",
)
pair(
    PAIRS,
    "a closure without a backward",
    "GA301",
    """
net = nn.Linear(8, 2)
opt = torch.optim.LBFGS(net.parameters())
x, y = files()
def closure():
    opt.zero_grad()
    loss = F.mse_loss(net(x), y)
    @
    return loss
for _ in range(20):
    opt.step(closure)
""",
    "print(loss)",
    "loss.backward()",
)

test_told_apart = twins(PAIRS)
