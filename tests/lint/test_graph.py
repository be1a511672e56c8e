"""Graphs that are kept alive, and lists of losses that are not."""

from .pairing import MODEL, Pairs, pair, twins

PAIRS: Pairs = {}


pair(
    PAIRS,
    "losses of one window",
    "GA501",
    MODEL
    + """
losses = []
for batches in loader:
    @
    for x, y in batches:
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        losses.append(loss)
    opt.step()
    opt.zero_grad()
    show(sum(losses))
""",
    "pass",
    "losses = []",
)

pair(
    PAIRS,
    "a mean that is asked whether it is one",
    "GA206",
    MODEL
    + """
for x, y, mask in loader:
    loss = F.cross_entropy(net(x), y, reduction="none")
    loss = (loss * mask).sum() / mask.sum()
    @
    opt.step()
    opt.zero_grad()
""",
    "loss.backward()",
    "if not torch.isnan(loss): loss.backward()",
)

pair(
    PAIRS,
    "weights that are no mask",
    "GA206",
    MODEL
    + """
for x, y, @ in loader:
    loss = F.cross_entropy(net(x), y, reduction="none")
    loss = (loss * @).sum() / @.sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "mask",
    "weight",
)

pair(
    PAIRS,
    "a graph of several passes that is made anew each time",
    "GA502",
    """
body, head = nn.Linear(8, 8), nn.Linear(8, 2)
opt = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-3)
net = nn.Sequential(body, head)
fixed = torch.ones(1, 8)
state = net(fixed)
for x, y in loader:
    loss = F.cross_entropy(net(x), y) + F.mse_loss(net(x + 1), y)
    opt.zero_grad()
    loss.backward(@)
    opt.step()
""",
    "retain_graph=True",
    "",
)

SMOOTH = (
    MODEL
    + """
shown = {start}
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    shown = {smooth}
"""
)
pair(PAIRS, "a smoothed loss", "GA501",
     SMOOTH.format(start="0.0", smooth="0.9 * shown + 0.1 * loss@"), "", ".item()")  # fmt: skip
pair(PAIRS, "a smoothed loss that begins with the first", "GA501",
     SMOOTH.format(start="None", smooth="loss if shown is None else shown * 0.9 + loss@ * 0.1")
     .replace("= loss if", "= loss@ if"), "", ".detach()")  # fmt: skip
pair(PAIRS, "terms of one iteration are no moving average", "GA501",
     SMOOTH.format(start="0.0", smooth="@").replace("shown = @", "@"),
     "shown = 0.9 * shown + loss * 0.1", "loss = 0.9 * loss + 0.1 * net(x).mean()")  # fmt: skip

PENALTY = (
    MODEL
    + """
def penalty(real, fake):
    mixed = (real + fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(net(mixed).sum(), mixed@)
    return (slope.norm(2, dim=1) - 1).pow(2).mean()
for x, y in loader:
    loss = net(x).mean() + 10 * penalty(x, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
)
pair(PAIRS, "a penalty without a graph", "GA503", PENALTY, "", ", create_graph=True")

NORM = """
class RunningNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.running_mean = torch.zeros(8)
    def forward(self, x):
        mean = x.mean(0)
        self.running_mean = 0.9 * self.running_mean + 0.1 * mean@
        return (x - mean) * self.weight
net = nn.Sequential(nn.Linear(8, 8), RunningNorm())
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for x, y in loader:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
pair(PAIRS, "running statistics with their graphs", "GA501", NORM, "", ".detach()")

MODES = """
class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)
    def {name}(self, mode=True):
        super().train(mode)
        self.body.eval()
        return self
    def forward(self, x):
        return self.head(self.body(x))
net = Probe()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
net.train()
for epoch in range(3):
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
"""
pair(PAIRS, "a class that says what train() does", "GA703", MODES.replace("{name}", "@"),
     "keep", "train")  # fmt: skip

test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)
