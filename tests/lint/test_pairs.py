"""Loops whose windows are counted wrongly, each beside its right twin."""

import pytest

from .pairing import MODEL, Pairs, codes, pair

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
    "training behind an option for evaluation",
    "GA302",
    MODEL
    + """
def main():
    if not args.evaluate:
        classes = 2
    if args.evaluate:
        evaluate(net)
    else:
        for epoch in range(args.epochs):
            for i, (x, y) in enumerate(loader):
                loss = F.cross_entropy(net(x), y) / args.every
                loss.backward()
                if (i + 1) % args.every == 0@:
                    opt.step()
                    opt.zero_grad()
main()
""",
    "",
    " or i + 1 == len(loader)",
)

pair(
    PAIRS,
    "a window beside other intervals",
    "GA302",
    MODEL
    + """
done = 0
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if done % args.show == 0:
            print(loss.item())
        if (i + 1) % args.every == 0@:
            opt.step()
            opt.zero_grad()
            done += 1
""",
    "",
    " or i + 1 == len(loader)",
)

pair(
    PAIRS,
    "an optimizer of our own",
    "GA302",
    """
class Slow(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])

net = nn.Linear(8, 2)
opt = Slow(net.parameters(), 0.1)
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
    "a leak where a micro-batch has several passes",
    "GA302",
    MODEL
    + """
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(net(x), y).div(args.every).backward()
        perturb(net)
        F.cross_entropy(net(x), y).div(args.every).backward()
        restore(net)
        if (i + 1) % args.every == 0@:
            opt.step()
            opt.zero_grad()
""",
    "",
    " or i + 1 == len(loader)",
)

pair(
    PAIRS,
    "a counter that begins at one",
    "GA303",
    MODEL
    + """
for i, (x, y) in enumerate(loader, start=@):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if i % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "0",
    "args.begun + 1",
)

pair(
    PAIRS,
    "a counter that counts itself twice",
    "GA303",
    MODEL
    + """
seen = 0
while True:
    x, y = next(loader)
    seen += 1
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if @ % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "(seen + 1)",
    "seen",
)

pair(
    PAIRS,
    "a loop that ends with the last full window",
    "GA302",
    MODEL
    + """
updates = len(loader) // args.every
for epoch in range(args.epochs):
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        @
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0:
            opt.step()
            opt.zero_grad()
""",
    "pass",
    "if i // args.every >= updates: break",
)

pair(
    PAIRS,
    "a loader cut to full windows",
    "GA302",
    MODEL
    + """
updates = len(loader) // args.every
while True:
    opt.zero_grad()
    for i, (x, y) in enumerate(@):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0:
            opt.step()
            opt.zero_grad()
""",
    "loader",
    "itertools.islice(loader, updates * args.every)",
)

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
    "windows picked out of a list",
    "GA201",
    MODEL
    + """
batches = list(loader)
for i in range(len(batches) // args.every):
    for j in range(args.every):
        place = args.every * i + j
        x, y = batches[place]
        loss = F.cross_entropy(net(x), y)@
        loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "",
    " / args.every",
)

pair(
    PAIRS,
    "a small weight of one term",
    "GA201",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    out = net(x)
    loss = F.cross_entropy(out, y) + 0.05 * F.mse_loss(out, y)
    (loss@).backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "",
    " / args.every",
)


@pytest.mark.parametrize("name", PAIRS)
def test_one_is_blamed_and_its_twin_is_not(name):
    code, text, (bad, good) = PAIRS[name]
    assert code in codes(text.replace("@", bad))
    assert code not in codes(text.replace("@", good))


def test_names_of_values_do_not_grow_without_bound():
    lines = "\n".join(f"            mean = mean * {i} + mean / (mean + i)" for i in range(9))
    text = (
        MODEL
        + f"""
mean = args.mean
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        for j in range(9):
{lines}
        loss = F.cross_entropy(net(x), y) * mean
        loss.backward()
        opt.step()
        opt.zero_grad()
"""
    )
    assert codes(text) == set()
