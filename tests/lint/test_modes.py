"""Models that are left in eval mode, and those that are put there on purpose."""

from .pairing import MODEL, Pairs, pair, twins
from .planting import codes

PAIRS: Pairs = {}


pair(
    PAIRS,
    "a part that is put back by itself",
    "GA703",
    """
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
""",
    "pass",
    "net.head.train()",
)

pair(
    PAIRS,
    "a model of another package, checked by a method",
    "GA703",
    """
from nets import Reader

class Teacher:
    def __init__(self, args):
        self.args = args
        self.net = Reader(args)
        self.opt = torch.optim.AdamW(self.net.parameters())

    def check(self, loader):
        self.net.eval()
        with torch.no_grad():
            for x, y in loader:
                print(self.net(x))

    def teach(self, loader):
        self.net.train()
        for epoch in range(self.args.epochs):
            @
            for x, y in loader:
                loss = F.cross_entropy(self.net(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            if self.args.check:
                self.check(loader)
""",
    "pass",
    "self.net.train()",
)

pair(
    PAIRS,
    "one method for training and for checking",
    "GA503",
    """
from nets import Reader

class Teacher:
    def __init__(self):
        self.net = Reader()
        self.opt = torch.optim.AdamW(self.net.parameters())

    def turn(self, x, y):
        loss = F.cross_entropy(self.net(x), y)
        if @:
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    def teach(self):
        for x, y in loader:
            self.net.train()
            self.turn(x, y)
            self.net.eval()
            with torch.no_grad():
                self.turn(x, y)

Teacher().teach()
""",
    "args.teach",
    "self.net.training",
)

pair(
    PAIRS,
    "a mode that is kept and given back",
    "GA703",
    MODEL
    + """
def check():
    with torch.no_grad():
        before = net.training
        net.eval()
        for x, y in loader:
            net(x)
        net.train(@)
net.train()
for x, y in loader:
    F.cross_entropy(net(x), y).backward()
    opt.step()
    opt.zero_grad()
    check()
""",
    "False",
    "before",
)

test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)


EVAL = """
def train(model, loader):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        FIRST
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        LAST
"""


def test_eval_right_before_the_forward_is_meant_and_eval_left_over_is_not():
    assert "GA703" in codes(EVAL.replace("FIRST", "pass").replace("LAST", "model.eval()"))
    assert "GA703" not in codes(EVAL.replace("FIRST", "model.eval()").replace("LAST", "pass"))
