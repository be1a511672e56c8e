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
    loss = F.cross_entropy(net(x), y) + F.mse_loss(@, y)
    opt.zero_grad()
    loss.backward(retain_graph=True)
    opt.step()
""",
    "net(x + 1)",
    "state",
)

test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)
