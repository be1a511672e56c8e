"""Parameters that an optimizer has not, has twice, or has no longer: GA301, GA306, GA309."""

from .pairing import MODEL, Pairs, pair, twins

PAIRS: Pairs = {}

LOOP = """
for x, y in loader:
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
"""

pair(PAIRS, "a head after the optimizer", "GA309", MODEL + "@\n" + LOOP,
     "net.head = nn.Linear(8, 9)", "net.head = nn.ReLU()")  # fmt: skip
pair(
    PAIRS,
    "a head, and an optimizer after it",
    "GA309",
    MODEL + "net.head = nn.Linear(8, 9)\n@\n" + LOOP,
    "print(net)",
    "opt = torch.optim.AdamW(net.parameters(), lr=1e-3)",
)
pair(PAIRS, "a table that grows", "GA309", MODEL + "@\n" + LOOP,
     "net.resize_token_embeddings(9)", "net.eval(); net.train()")  # fmt: skip
pair(PAIRS, "weights that are assigned", "GA306", MODEL + "net.load_state_dict(files()@)\n" + LOOP,
     ", assign=True", "")  # fmt: skip

MARGIN = """
class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 8))
    def forward(self, f, y):
        return F.cross_entropy(f.mm(self.centres.t()), y)
net = nn.Linear(8, 8)
head = Margin()
opt = torch.optim.SGD(@, lr=0.1)
for x, y in loader:
    opt.zero_grad()
    loss = head(net(x), y)
    loss.backward()
    opt.step()
"""
pair(PAIRS, "a criterion that nobody steps", "GA309", MARGIN,
     "net.parameters()", "[*net.parameters(), *head.parameters()]")  # fmt: skip
pair(PAIRS, "a criterion in a group of its own", "GA309", MARGIN, "net.parameters()",
     '[{"params": net.parameters()}, {"params": head.parameters(), "lr": 1.0}]')  # fmt: skip
pair(PAIRS, "a criterion that is fixed", "GA309", MARGIN.replace("@", "net.parameters()")
     .replace("opt =", "@\nopt ="), "print(head)", "head.requires_grad_(False)")  # fmt: skip

LIST = (
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = @
        self.out = nn.Linear(8, 2)
    def forward(self, x):
        for layer in self.hidden:
            x = layer(x).relu()
        return self.out(x)
net = Net()
opt = torch.optim.Adam(net.parameters())
"""
    + LOOP
)
pair(PAIRS, "layers in a plain list", "GA309", LIST, "[nn.Linear(8, 8) for _ in range(2)]",
     "nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])")  # fmt: skip
pair(PAIRS, "activations in a plain list", "GA309", LIST, "[nn.Linear(8, 8), nn.Linear(8, 8)]",
     "[nn.ReLU(), nn.Tanh()]")  # fmt: skip
pair(PAIRS, "a list that is registered elsewhere", "GA309",
     LIST.replace("@", "[nn.Linear(8, 8), nn.Linear(8, 8)]\n        @"), "print(1)",
     "self.all = nn.ModuleList(self.hidden)")  # fmt: skip

MADE = (
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 2)
        {init}
    def forward(self, x):
        {forward}
        return self.out(x) * scale
net = Net()
opt = torch.optim.Adam(net.parameters())
"""
    + LOOP
)
pair(PAIRS, "a parameter made in forward", "GA309",
     MADE.format(init="self.one = 1", forward="scale = @"),
     "nn.Parameter(torch.ones(2))", "torch.ones(2)")  # fmt: skip
pair(PAIRS, "a parameter moved as it is made", "GA309",
     MADE.format(init="self.scale = @", forward="scale = self.scale"),
     "nn.Parameter(torch.ones(2)).cuda()", "nn.Parameter(torch.ones(2).cuda())")  # fmt: skip

TWO = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.body(x))
net = Net()
first = torch.optim.SGD(@.parameters(), lr=0.1)
second = torch.optim.SGD(net.head.parameters(), lr=0.1)
for x, y in loader:
    first.zero_grad()
    second.zero_grad()
    F.cross_entropy(net(x), y).backward()
    first.step()
    second.step()
"""
pair(PAIRS, "a head in two optimizers", "GA301", TWO, "net", "net.body")

test_told_apart = twins(PAIRS)
