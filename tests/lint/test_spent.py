"""Parameters that one iterator walks over twice, and weights that are cut inside a window."""

from .pairing import MODEL, Pairs, pair, twins

PAIRS: Pairs = {}

CLIPPED = """
net = nn.Linear(8, 2)
params = @
opt = torch.optim.AdamW(params, lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    opt.step()
"""

pair(
    PAIRS,
    "parameters that the optimizer has walked over",
    "GA407",
    CLIPPED,
    "net.parameters()",
    "list(net.parameters())",
)

pair(
    PAIRS,
    "an expression that the optimizer has walked over",
    "GA407",
    CLIPPED,
    "(p for p in net.parameters() if p.requires_grad)",
    "[p for p in net.parameters() if p.requires_grad]",
)

pair(
    PAIRS,
    "a chain on self",
    "GA407",
    """
class Fit:
    def __init__(self):
        self.net, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.params = @itertools.chain(self.net.parameters(), self.head.parameters()))
        self.opt = torch.optim.AdamW(self.params)
    def run(self):
        for x, y in loader:
            self.opt.zero_grad()
            F.cross_entropy(self.head(self.net(x)), y).backward()
            nn.utils.clip_grad_norm_(self.params, 1.0)
            self.opt.step()
""",
    "(",
    "list(",
)

pair(
    PAIRS,
    "weights that are cut in each micro-batch",
    "GA307",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        opt.step()
        opt.zero_grad()
@for p in net.parameters():
@    p.data.clamp_(-1, 1)
""",
    "    ",
    "        ",
)

pair(
    PAIRS,
    "steps on all remainders but one",
    "GA303",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if (i + 1) % args.every @ 0:
        opt.step()
        opt.zero_grad()
""",
    "!=",
    "==",
)

test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)
