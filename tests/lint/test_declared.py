"""Windows that a script declares and does not keep to: GA316, GA317, GA202, GA203, GA102."""

from .pairing import MODEL, Pairs, pair, twins

PAIRS: Pairs = {}

STEPS = (
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        {inside}
    @
"""
)
pair(
    PAIRS,
    "only the clip under the condition",
    "GA316",
    STEPS.format(inside="nn.utils.clip_grad_norm_(net.parameters(), 1.0)"),
    "opt.step(); opt.zero_grad()",
    "    opt.step(); opt.zero_grad()",
)
pair(
    PAIRS,
    "only the zeroing under the condition",
    "GA316",
    STEPS.format(inside="opt.zero_grad()")
    .replace("    @\n", "")
    .replace("    if (i", "    @\n    if (i"),
    "opt.step()",
    "if (i + 1) % args.every == 0: opt.step()",
)

AVERAGE = (
    """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
"""
    + MODEL
    + """
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
for i, (x, y) in enumerate(loader):
    (F.cross_entropy(net(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        opt.step()
        opt.zero_grad()
    @
"""
)
pair(
    PAIRS,
    "an average that moves with every micro-batch",
    "GA317",
    AVERAGE,
    "ema.update_parameters(net)",
    "    ema.update_parameters(net)",
)

GRADS = (
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    F.cross_entropy(net(x), y).backward()
    @:
        for p in net.parameters():
            p.grad.div_(args.every)
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
"""
)
pair(
    PAIRS,
    "gradients divided after every micro-batch",
    "GA202",
    GRADS,
    "if True",
    "if (i + 1) % args.every == 0",
)
pair(
    PAIRS,
    "gradients divided with `/=`",
    "GA202",
    GRADS.replace("p.grad.div_(args.every)", "p.grad /= args.every"),
    "with nullcontext()",
    "if (i + 1) % args.every == 0",
)

TOKENS = (
    MODEL
    + """
every = 4
for window in loader:
    masks = [lengths(part) for part in window]
    count = torch.cat(masks).sum()
    for k in range(every):
        x, y = files(window, k)
        loss = F.cross_entropy(net(x), y, reduction="sum") / count
        @
    opt.step()
    opt.zero_grad()
"""
)
pair(
    PAIRS,
    "the count of the window, and its length",
    "GA202",
    TOKENS,
    "(loss / every).backward()",
    "loss.backward()",
)

WEIGHTS = (
    MODEL
    + """
criterion = nn.CrossEntropyLoss(@)
for i, (x, y) in enumerate(loader):
    loss = criterion(net(x), y) / args.every
    loss.backward()
    if (i + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
"""
)
pair(
    PAIRS,
    "class weights of each micro-batch",
    "GA203",
    WEIGHTS,
    "weight=torch.tensor([1.0, 9.0])",
    'weight=torch.tensor([1.0, 9.0]), reduction="sum"',
)

ENGINE = """
accelerator = Accelerator(gradient_accumulation_steps=4)
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, opt, loader = accelerator.prepare(net, opt, loader)
for x, y in loader:
    with accelerator.accumulate(net):
        loss = F.cross_entropy(net(x), y)
        accelerator.backward({loss})
        opt.step()
        {zero}
"""
pair(
    PAIRS,
    "a model's own zero_grad knows no window",
    "GA102",
    ENGINE.format(loss="loss", zero="@"),
    "net.zero_grad()",
    "opt.zero_grad()",
)
pair(
    PAIRS,
    "an engine's own attribute",
    "GA202",
    ENGINE.format(loss="loss@", zero="opt.zero_grad()"),
    " / accelerator.gradient_accumulation_steps",
    "",
)

test_told_apart = twins(PAIRS)
