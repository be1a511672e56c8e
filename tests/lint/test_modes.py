"""Models that are left in eval mode, and those that are put there on purpose."""

from .pairing import Pairs, pair, twins
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
