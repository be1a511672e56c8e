"""Clips, scales, engines and ranks that go wrong, each beside its right twin."""

import pytest

from .pairing import MODEL, Pairs, codes, pair

PAIRS: Pairs = {}


pair(
    PAIRS,
    "a rate that is divided by the batch",
    "GA201",
    """
net = nn.Linear(8, 2)
opt = torch.optim.SGD(net.parameters(), lr=@)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "args.rate",
    "args.rate / args.batch",
)

pair(
    PAIRS,
    "a clip by another name",
    "GA401",
    """
class GradientClipper:
    def __init__(self, limit):
        self.limit = limit

    def step(self, params):
        shrink([p.grad for p in params], self.limit)

clipper = GradientClipper(1.0)
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    @
    if (i + 1) % args.every == 0:
        clipper.step(net.parameters())
        opt.step()
        opt.zero_grad()
""",
    "clipper.step(net.parameters())",
    "pass",
)

pair(
    PAIRS,
    "a helper that scales gradients",
    "GA201",
    """
net = nn.Linear(8, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if (i + 1) % args.every == 0:
        @
        opt.step()
        opt.zero_grad()
""",
    "pass",
    "opt.multiply_grads(1 / args.every)",
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
    "a callback of an engine",
    "GA401",
    """
from ignite.engine import Engine

def train():
    net = nn.Linear(8, 2)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def update(engine, batch):
        x, y = batch
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        @
        if engine.state.iteration % args.every == 0:
            opt.step()
            opt.zero_grad()
        return loss.item()

    trainer = Engine(update)
    trainer.run(loader)
""",
    "nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    "pass",
)

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
    "a scale that is set by hand",
    "GA404",
    MODEL
    + """
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    scaler.scale(loss).backward()
    if (i + 1) % args.every == 0:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    scaler.update(@)
""",
    "",
    "scaler.get_scale() * 2",
)

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
    "a setting that is refused",
    "GA302",
    MODEL
    + """
known, rest = parser.parse_known_args()
if len(rest) > 0:
    raise ValueError(rest)
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0@:
            opt.step()
            opt.zero_grad()
""",
    "",
    " or i + 1 == len(loader)",
)

pair(
    PAIRS,
    "a window that grows on the way",
    "GA303",
    MODEL
    + """
every = 4
for i, (x, y) in enumerate(loader):
    if i < args.warmup:
        @
    loss = F.cross_entropy(net(x), y) / every
    loss.backward()
    if i % every == 0:
        opt.step()
        opt.zero_grad()
""",
    "pass",
    "every = max(1, round(math.exp(i)))",
)


@pytest.mark.parametrize("name", PAIRS)
def test_one_is_blamed_and_its_twin_is_not(name):
    code, text, (bad, good) = PAIRS[name]
    assert code in codes(text.replace("@", bad))
    assert code not in codes(text.replace("@", good))
