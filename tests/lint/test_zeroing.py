"""Loops that clear gradients too early, or where an engine was never told of its window."""

from .pairing import MODEL, Pairs, pair, twins

PAIRS: Pairs = {}


pair(
    PAIRS,
    "places in the window counted round",
    "GA102",
    MODEL
    + """
for (x, y), place in zip(loader, itertools.cycle(range(1, args.every + 1))):
    if place == @:
        opt.zero_grad()
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if place % args.every == 0:
        opt.step()
""",
    "args.every",
    "1",
)

pair(
    PAIRS,
    "an engine that nothing tells when",
    "GA102",
    """
accelerator = Accelerator(gradient_accumulation_steps=args.every)
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, opt, loader = accelerator.prepare(net, opt, loader)
for x, y in loader:
    with @:
        loss = F.cross_entropy(net(x), y)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
""",
    "torch.enable_grad()",
    "accelerator.accumulate(net)",
)

pair(
    PAIRS,
    "a detour that is wiped",
    "GA102",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    @
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
        if probing(i):
            F.cross_entropy(net(x), y).backward()
            opt.zero_grad()
""",
    "opt.zero_grad()",
    "pass",
)

pair(
    PAIRS,
    "cleared where somebody looks, which may be between windows",
    "GA102",
    MODEL
    + """
looks = set(args.parts * args.every)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
    if @:
        F.cross_entropy(net(longest), y).backward()
        opt.zero_grad()
""",
    "i + 1 < len(loader)",
    "i in looks",
)

pair(
    PAIRS,
    "a function whose window is one unless its caller says otherwise",
    "GA102",
    """
def train(net, opt, batches, every=1):
    for i, (x, y) in enumerate(batches):
        @
        loss = F.cross_entropy(net(x), y) / every
        loss.backward()
        if (i + 1) % every == 0:
            opt.step()
            opt.zero_grad()

def main():
    net = nn.Linear(8, 2)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        train(net, opt, loader)

main()
""",
    "opt.zero_grad()",
    "pass",
)

pair(
    PAIRS,
    "wiped before either of two passes",
    "GA102",
    MODEL
    + """
net = DDP(net)
for i, (x, y) in enumerate(loader):
    @
    loss = F.cross_entropy(net(x), y)
    if args.every > 1:
        loss = loss / args.every
        if (i + 1) % args.every == 0:
            loss.backward()
            opt.step()
            opt.zero_grad()
        else:
            with net.no_sync():
                loss.backward()
    else:
        loss.backward()
        opt.step()
        opt.zero_grad()
""",
    "opt.zero_grad()",
    "pass",
)


pair(
    PAIRS,
    "a critic that keeps what the maker's loss left in it",
    "GA104",
    """
from nets import Maker, Critic
maker, critic = Maker(), Critic()
first = torch.optim.Adam(maker.parameters())
second = torch.optim.Adam(critic.parameters())
for real in loader:
    fake = maker(torch.randn(4, 8))
    loss = critic(fake.detach()).mean() - critic(real).mean()
    @
    loss.backward()
    second.step()
    second.zero_grad()
    loss = -critic(fake).mean()
    loss.backward()
    first.step()
    first.zero_grad()
""",
    "pass",
    "second.zero_grad()",
)

pair(
    PAIRS,
    "zeroed before the first micro-batch of an epoch",
    "GA102",
    """
def train(net, opt, loader):
    for i, (x, y) in enumerate(loader):
        if @:
            opt.zero_grad()
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0:
            opt.step()
            opt.zero_grad()
""",
    "i >= 0",
    "i == 0",
)


test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)
