"""Ranks that synchronise in every micro-batch, and models that are not wrapped at all."""

from gradaccum.lint.files.program import Program
from gradaccum.lint.judge import judge

from .pairing import HEAD, MODEL, Pairs, codes, pair, twins

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

pair(
    PAIRS,
    "two halves with an optimizer each",
    "GA601",
    """
front, back = nn.Linear(8, 8), nn.Linear(8, 2)
if args.ranks > 1:
    front, back = DDP(front), DDP(back)
first = torch.optim.AdamW(front.parameters(), lr=1e-3)
second = torch.optim.AdamW(back.parameters(), lr=1e-4)
for i, (x, y) in enumerate(loader):
    quiet = (i + 1) % args.every != 0
    with front.no_sync() if @ else nullcontext(), back.no_sync() if @ else nullcontext():
        loss = F.cross_entropy(back(front(x)), y) / args.every
        loss.backward()
    if (i + 1) % args.every == 0:
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
""",
    "False",
    "quiet",
)


pair(
    PAIRS,
    "the short window stays under no_sync",
    "GA603",
    MODEL
    + """
net = DDP(net)
batches = 6
for i in range(batches):
    x, y = files(i)
    with nullcontext() if (i + 1) % 4 == 0@ else net.no_sync():
        F.cross_entropy(net(x), y).backward()
    if (i + 1) % 4 == 0 or i + 1 == batches:
        opt.step()
        opt.zero_grad()
""",
    "",
    " or i + 1 == batches",
)

FLAG = (
    MODEL
    + """
net = DDP(net)
for window in loader:
    opt.zero_grad()
    for k in range(4):
        x, y = files(window, k)
        {before}
        loss = F.cross_entropy(net(x), y) / 4
        {after}
        loss.backward()
    opt.step()
"""
)
pair(
    PAIRS,
    "the flag is set after the forward",
    "GA603",
    FLAG.format(before="print(k)", after="@ = k == 3"),
    "net.require_backward_grad_sync",
    "last",
)
pair(
    PAIRS,
    "the flag is set before the forward",
    "GA603",
    FLAG.format(before="@", after="net.require_backward_grad_sync = k == 3"),
    "print(x)",
    "net.require_backward_grad_sync = k == 3",
)

pair(
    PAIRS,
    "a call past the wrapper",
    "GA604",
    MODEL
    + """
net = DDP(net)
for x, y in loader:
    opt.zero_grad()
    F.cross_entropy(net@(x), y).backward()
    opt.step()
""",
    ".module",
    "",
)
pair(
    PAIRS,
    "a call past the wrapper, exchanged by hand",
    "GA604",
    MODEL
    + """
net = DDP(net)
for x, y in loader:
    opt.zero_grad()
    F.cross_entropy(net.module(x), y).backward()
    @
    opt.step()
""",
    "print(x)",
    "for p in net.parameters(): torch.distributed.all_reduce(p.grad); p.grad /= 2",
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
    assert not codes(HELPER) & {"GA201", "GA601"}


def test_the_line_with_both_passes_is_named_where_a_helper_runs_the_backward():
    text = HEAD + MODEL.replace("nn.Linear(8, 2)", "DDP(nn.Linear(8, 2))")
    text += """
class Mixed:
    def backward(self, loss):
        loss.backward()

mixed = Mixed()
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    mixed.backward(loss)  # here
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
"""
    program = Program({"train.py": text})
    module = program.load("train.py")
    assert module is not None
    lines = [one.line for one in judge(program, module) if one.code == "GA601"]
    assert [text.splitlines()[line - 1].rpartition("# ")[2] for line in lines] == ["here"]
