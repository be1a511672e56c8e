"""Ranks that synchronise in every micro-batch, and models that are not wrapped at all."""

from .pairing import MODEL, Pairs, codes, pair, twins

PAIRS: Pairs = {}


pair(
    PAIRS,
    "no_sync asked for",
    "GA601",
    MODEL
    + """
net = DDP(net)
for i, (x, y) in enumerate(loader):
    with @:
        (F.cross_entropy(net(x), y) / args.every).backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "torch.enable_grad()",
    "net.no_sync() if hasattr(net, 'no_sync') and (i + 1) % args.every else nullcontext()",
)

pair(
    PAIRS,
    "a wrapped teacher",
    "GA601",
    MODEL
    + """
teacher = DDP(nn.Linear(8, 2))
@
for i, (x, y) in enumerate(loader):
    with torch.no_grad():
        wanted = teacher(x)
    loss = F.mse_loss(net(x), wanted) / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "net = DDP(net)",
    "pass",
)

pair(
    PAIRS,
    "ranks that are asked to have a window of one",
    "GA601",
    MODEL
    + """
if args.ranks:
    @
    net = DDP(net)
for batches in loader:
    for x, y in batches:
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "pass",
    "assert args.every == 1",
)

pair(
    PAIRS,
    "a wrapped teacher of a student from elsewhere",
    "GA601",
    """
from students import Student
net = Student.named(args.name)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
teacher = nn.Linear(8, 2)
if args.ranks:
    teacher = DDP(teacher)
    @
for i, (x, y) in enumerate(loader):
    wanted = [part.detach() for part in teacher(x)]
    loss = 0.0
    for own, other in zip(net(x), wanted):
        loss += F.mse_loss(own, other)
    loss = loss / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "net = DDP(net)",
    "pass",
)


pair(
    PAIRS,
    "micro-batches counted from one",
    "GA602",
    MODEL
    + """
net = DDP(net)
every = args.batch // args.room
while True:
    for i in range(1, every + 1):
        x, y = next(loader)
        loss = F.cross_entropy(net(x), y)
        if i < every:
            with net.no_sync():
                @.backward()
        else:
            loss.backward()
    for p in net.parameters():
        p.grad /= every
    opt.step()
    opt.zero_grad()
""",
    "loss",
    "F.cross_entropy(net(x), y)",
)


pair(
    PAIRS,
    "two optimizers of one loss",
    "GA601",
    """
actor, critic = nn.Linear(8, 2), nn.Linear(8, 1)
first = torch.optim.AdamW(actor.parameters(), lr=1e-3)
second = torch.optim.AdamW(critic.parameters(), lr=1e-3)
actor, critic = DDP(actor), DDP(critic)
done = 0
for x, y in loader:
    for part in range(args.parts):
        loss = F.cross_entropy(actor(x), y) + F.mse_loss(critic(x), y)
        (loss / args.every).backward()
        done += 1
        if done % @ == 0:
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
""",
    "args.every",
    "1",
)

test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)


HELPER = """
def spread(loss):
    loss.backward()

makes, judges = DDP(Maker()), DDP(Critic())
first = torch.optim.AdamW(makes.parameters(), lr=1e-3)
second = torch.optim.AdamW(judges.parameters(), lr=1e-3)
for x, y in loader:
    spread(judges(makes(x)).mean())
    spread(judges(y).mean())
    first.step()
    second.step()
    first.zero_grad()
    second.zero_grad()
"""


def test_two_losses_of_one_helper_are_no_window():
    assert "GA601" not in codes(HELPER)
