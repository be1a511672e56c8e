"""Ranks that synchronise in every micro-batch, and models that are not wrapped at all."""

from .pairing import MODEL, Pairs, pair, twins

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

test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)
