"""The last, short window of an epoch: stepped, left behind, or carried on."""

from .pairing import MODEL, Pairs, pair, twins
from .planting import codes

PAIRS: Pairs = {}


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
    "a function that its only caller here lets evaluate",
    "GA302",
    """
def run(net, opt, batches, evaluate=False):
    if not evaluate:
        opt.zero_grad()
    for i, (x, y) in enumerate(batches):
        loss = F.cross_entropy(net(x), y) / args.every
        if not evaluate:
            loss.backward()
            if (i + 1) % args.every == 0@:
                opt.step()
                opt.zero_grad()

def check(net, batches):
    with torch.no_grad():
        return run(net, None, batches, evaluate=True)
""",
    "",
    " or i + 1 == len(batches)",
)

pair(
    PAIRS,
    "a window that is opened and closed by its own branches",
    "GA302",
    MODEL
    + """
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        if i % args.every == 0:
            opt.zero_grad()
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if i % args.every == args.every - 1@:
            opt.step()
""",
    "",
    " or i + 1 == len(loader)",
)

pair(
    PAIRS,
    "a left-over before an update that comes early",
    "GA302",
    MODEL
    + """
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        if i % args.every == 0:
            loss.backward()
            opt.step()
            opt.zero_grad()
        else:
            loss.backward()
    @
""",
    "print(epoch)",
    "opt.step(); opt.zero_grad()",
)

pair(
    PAIRS,
    "optimizers in a dict",
    "GA302",
    MODEL
    + """
optimizers = {"net": opt}
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        if (i + 1) % args.every == 0@:
            for one in optimizers.values():
                one.step()
                one.zero_grad()
""",
    "",
    " or i + 1 == len(loader)",
)

pair(
    PAIRS,
    "a loop that is left after whole windows only",
    "GA302",
    MODEL
    + """
def train():
    seen = 0
    for x, y in batches(loader):
        loss = F.cross_entropy(net(x), y) / args.every
        loss.backward()
        seen += 1
        if seen % args.every == 0:
            opt.step()
            opt.zero_grad()
        if seen >= @ * args.updates:
            return

for epoch in range(args.epochs):
    train()
""",
    "args.most",
    "args.every",
)


test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)


PLANNED = """
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(args.epochs):
    for i, start in enumerate(RANGE):
        loss = model(data[start : start + args.size]).mean() / args.every
        loss.backward()
        if (i + 1) % args.every == 0:
            opt.step()
            opt.zero_grad()
"""


def test_a_tail_is_reported_whether_data_or_settings_leave_one():
    head = "args = settings()\ndata = load()\n"
    assert "GA302" in codes(head + PLANNED.replace("RANGE", "range(0, len(data), args.size)"))
    assert "GA302" in codes(head + PLANNED.replace("RANGE", "range(0, args.total, args.size)"))
