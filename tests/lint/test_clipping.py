"""Clips and loss scales that hit each micro-batch, where the window is meant."""

from .pairing import MODEL, Pairs, pair, twins

PAIRS: Pairs = {}


pair(
    PAIRS,
    "a branch that is not the usual one",
    "GA401",
    MODEL
    + """
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        if args.apex:
            with amp.scale_loss(loss, opt) as scaled:
                scaled.backward()
        else:
            loss.backward()
            @
        if (i + 1) % args.every == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
if args.evaluate:
    evaluate(net)
if args.predict and args.files:
    predict(net)
if args.export:
    export(net)
if args.publish:
    publish(net)
if args.report:
    report(net)
""",
    "nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    "pass",
)

pair(
    PAIRS,
    "micro-batches of several passes",
    "GA401",
    MODEL
    + """
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        for width in (0.5, 0.75, 1.0):
            net.apply(lambda layer: setattr(layer, "width", width))
            loss = F.cross_entropy(net(x), y) / args.every
            loss.backward()
        @
        if (i + 1) % args.every == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
""",
    "nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    "pass",
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
    "a clip before there is anything to clip",
    "GA405",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    @
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""".replace("@", "if i % args.every == 0:\n        @"),
    "nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    "pass",
)

pair(
    PAIRS,
    "a clip of what the step before left",
    "GA405",
    MODEL
    + """
for x, y in loader:
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    @
    opt.step()
    opt.zero_grad()
""",
    "pass",
    "nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
)

pair(
    PAIRS,
    "two optimizers, of which one is unscaled",
    "GA402",
    """
one, two = nn.Linear(8, 8), nn.Linear(8, 2)
first, second = torch.optim.SGD(one.parameters()), torch.optim.SGD(two.parameters())
both = list(one.parameters()) + list(two.parameters())
scaler = torch.amp.GradScaler()
for x, y in loader:
    scaler.scale(F.cross_entropy(two(one(x)), y)).backward()
    scaler.unscale_(first)
    @
    nn.utils.clip_grad_norm_(both, 1.0)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    first.zero_grad()
    second.zero_grad()
""",
    "pass",
    "scaler.unscale_(second)",
)


pair(
    PAIRS,
    "an endless bound only measures",
    "GA401",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    (F.cross_entropy(net(x), y) / args.every).backward()
    shown = nn.utils.clip_grad_norm_(net.parameters(), float(@))
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "1",
    '"inf"',
)

test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)
