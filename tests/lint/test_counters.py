"""Counters that open windows one too early or late, and windows that change."""

from .pairing import MODEL, Pairs, pair, twins

PAIRS: Pairs = {}


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

pair(
    PAIRS,
    "a window that is one unless the command line says otherwise",
    "GA303",
    """
parser.add_argument("--every", type=int, default=1)
args = parser.parse_args()
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if @ % args.every == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
""",
    "i",
    "(i + 1)",
)


test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)
