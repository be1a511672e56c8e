"""Right loops of many kinds, which the doctor must leave alone."""

HEAD = """\
import copy
import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
data = [(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in range(8)]
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
"""

LOOPS = {
    "plain": """
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "gan, zeroed at the top": """
maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
makers = torch.optim.Adam(maker.parameters())
judges = torch.optim.Adam(judge.parameters())
bce = nn.BCEWithLogitsLoss()
for x, _ in data:
    fake = maker(torch.randn(4, 2))
    judges.zero_grad()
    bce(judge(x), torch.ones(4, 1)).backward()
    bce(judge(fake.detach()), torch.zeros(4, 1)).backward()
    judges.step()
    makers.zero_grad()
    bce(judge(fake), torch.ones(4, 1)).backward()
    makers.step()
""",
    "critic with a penalty": """
maker, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
makers = torch.optim.Adam(maker.parameters())
critics = torch.optim.Adam(critic.parameters())
for i, (x, _) in enumerate(data):
    critics.zero_grad()
    fake = maker(torch.randn(4, 2)).detach()
    mixed = (0.5 * x + 0.5 * fake).requires_grad_()
    [slope] = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).pow(2).mean()
    (critic(fake).mean() - critic(x).mean() + 10 * penalty).backward()
    critics.step()
    if i % 2 == 1:
        makers.zero_grad()
        (-critic(maker(torch.randn(4, 2))).mean()).backward()
        makers.step()
""",
    "clamped weights": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.5, 0.5)
""",
    "two losses, two backwards": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    (0.1 * model(x).pow(2).mean()).backward()
    optimizer.step()
""",
    "two losses on one graph": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    optimizer.zero_grad()
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    (0.1 * out.pow(2).mean()).backward()
    optimizer.step()
""",
    "two optimizers, one loss": """
body, head = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        body.step()
        head.step()
        body.zero_grad()
        head.zero_grad()
""",
    "sharpness aware": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    F.cross_entropy(model(x), y).backward()
    moved = []
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            by = 0.05 * p.grad / norm
            p.add_(by)
            moved.append(by)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, by in zip(model.parameters(), moved):
            p.sub_(by)
    optimizer.step()
    optimizer.zero_grad()
""",
    "lbfgs": """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
x, y = data[0]

def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss

for _ in range(3):
    optimizer.step(closure)
""",
    "a closure that accumulates": """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

def closure():
    optimizer.zero_grad()
    total = 0.0
    for x, y in data:
        loss = F.cross_entropy(model(x), y) / len(data)
        loss.backward()
        total += loss.item()
    return torch.tensor(total)

for _ in range(2):
    optimizer.step(closure)
""",
    "episodes": """
optimizer = torch.optim.Adam(model.parameters())
for update in range(4):
    optimizer.zero_grad()
    for episode in range(1 + update % 3):
        x, _ = data[episode]
        chosen = torch.distributions.Categorical(logits=model(x))
        action = chosen.sample()
        (-(chosen.log_prob(action) * torch.randn(4)).sum()).backward()
    optimizer.step()
""",
    "averaged weights": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
average = copy.deepcopy(model)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters()):
                old.lerp_(new, 0.1)
""",
    "folds": """
for fold in range(2):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in data[fold::2]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "rates tried out": """
start = copy.deepcopy(model.state_dict())
for rate in (0.1, 0.01):
    model.load_state_dict(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for x, y in data[:3]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "a schedule drawn": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
rates = []
for _ in range(10):
    optimizer.step()
    rates.append(schedule.get_last_lr()[0])
    schedule.step()
""",
    "tokens counted ahead": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for start in range(0, 8, 4):
    window = [(x, y.masked_fill(torch.arange(4) >= 1 + i, -100))
              for i, (x, y) in enumerate(data[start : start + 4])]
    tokens = sum((y != -100).sum() for _, y in window)
    for x, y in window:
        (F.cross_entropy(model(x), y, reduction="sum") / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "divided once at the end": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = 0
for i, (x, y) in enumerate(data):
    F.cross_entropy(model(x), y, reduction="sum").backward()
    tokens += len(y)
    if (i + 1) % 4 == 0:
        for p in model.parameters():
            p.grad /= tokens
        optimizer.step()
        optimizer.zero_grad()
        tokens = 0
""",
    "samples one by one, clipped": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data[:3]:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(x)):
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for sum_, p in zip(total, model.parameters()):
            sum_ += p.grad
            p.grad = None
    for sum_, p in zip(total, model.parameters()):
        p.grad = sum_ / len(x)
    optimizer.step()
    optimizer.zero_grad()
""",
    "bad batches left out": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x * (math.nan if i == 3 else 1.0)), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
""",
    "norm logged after the step": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
""",
    "frozen body in eval mode": """
body, head = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)), nn.Linear(8, 2)
body.requires_grad_(False)
body.eval()
optimizer = torch.optim.Adam(head.parameters())
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(head(body(x)), y).backward()
    optimizer.step()
""",
    "evaluated each epoch": """
model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    model.train()
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        scores = [F.cross_entropy(model(x), y).item() for x, y in data]
""",
    "learned step by step": """
cell, head = nn.RNNCell(3, 4), nn.Linear(4, 2)
optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
hidden = torch.zeros(4, 4)
for x, y in data:
    hidden = cell(x, hidden.detach())
    optimizer.zero_grad()
    F.cross_entropy(head(hidden), y).backward()
    optimizer.step()
""",
    "learned to learn": """
optimizer = torch.optim.Adam(model.parameters())
for start in range(0, 8, 2):
    optimizer.zero_grad()
    for x, y in data[start : start + 2]:
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes)}
        (F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y) / 2).backward()
    optimizer.step()
""",
    "encodings cached": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    parts = [x for x, _ in data[:4]]
    with torch.no_grad():
        cached = torch.cat([model(x) for x in parts]).requires_grad_()
    F.cross_entropy(cached @ cached.T, torch.arange(len(cached))).backward()
    optimizer.zero_grad()
    for x, slope in zip(parts, cached.grad.split(4)):
        (model(x) * slope).sum().backward()
    optimizer.step()
""",
    "saliency between updates": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    seen = x.clone().requires_grad_()
    model(seen)[:, 0].sum().backward(inputs=[seen])
""",
    "checkpointed": """
from torch.utils.checkpoint import checkpoint

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    out = checkpoint(model, x, use_reentrant=False)
    (F.cross_entropy(out, y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "steps inside backward": """
each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

def use(p):
    each[p].step()
    each[p].zero_grad()

for p in model.parameters():
    p.register_post_accumulate_grad_hook(use)
for x, y in data:
    F.cross_entropy(model(x), y).backward()
""",
    "half precision with a scaler": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i, (x, y) in enumerate(data):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y) / 4
    scaler.scale(loss).backward()
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "foreach, by hand": """
parameters = list(model.parameters())
for x, y in data:
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)
    for p in parameters:
        p.grad = None
""",
    "losses of a window kept": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for start in range(0, 8, 4):
    losses = [F.cross_entropy(model(x), y) for x, y in data[start : start + 4]]
    torch.stack(losses).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a probe, cleared": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
F.cross_entropy(model(data[0][0]), data[0][1]).backward()
optimizer.zero_grad()
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "gradients compared": """
whole = F.cross_entropy(model(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data]))
whole.backward()
wanted = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
for x, y in data:
    (F.cross_entropy(model(x), y) / len(data)).backward()
""",
    "the engine": """
import gradaccum as ga

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
acc = ga.Accumulator(model, optimizer, every=3, clip_norm=1.0)
for micro in acc.microbatches(data):
    x, y = micro.batch
    micro.backward(F.cross_entropy(model(x), y, reduction="sum"), len(y))
""",
    "regrouped by the engine": """
import gradaccum as ga

optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
acc = ga.Accumulator(model, optimizer, every=4)
for micro in acc.microbatches(data):
    x, y = micro.batch
    micro.backward(F.cross_entropy(model(x), y), len(y), reduction="mean")
""",
    "a long window": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(300):
    x, y = data[i % 8]
    (F.cross_entropy(model(x), y) / 100).backward()
    if (i + 1) % 100 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "gradients made beforehand": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for p in model.parameters():
    p.grad = torch.zeros_like(p)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
""",
    "cleared where the window opens": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    if i % 4 == 0:
        optimizer.zero_grad()
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 3:
        optimizer.step()
""",
    "cleared before and after": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.zero_grad()
for epoch in range(2):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
""",
    "one optimizer every other update": """
fast = torch.optim.SGD(model[0].parameters(), lr=0.1)
slow = torch.optim.SGD(model[2].parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    F.cross_entropy(model(x), y).backward()
    fast.step()
    fast.zero_grad()
    if i % 2 == 1:
        slow.step()
        slow.zero_grad()
""",
    "gradients projected by hand": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    slopes = []
    for loss in (lambda: F.cross_entropy(model(x), y), lambda: model(x).pow(2).mean()):
        optimizer.zero_grad()
        loss().backward()
        slopes.append([p.grad.clone() for p in model.parameters()])
    for p, first, second in zip(model.parameters(), *slopes):
        p.grad = first + second - (first * second).sum().clamp(max=0) * second
    optimizer.step()
""",
    "a policy improved in passes": """
optimizer = torch.optim.Adam(model.parameters())
for x, y in data[:4]:
    with torch.no_grad():
        old = model(x).log_softmax(1)[torch.arange(4), y]
    for _ in range(3):
        new = model(x).log_softmax(1)[torch.arange(4), y]
        ratio = (new - old).exp()
        loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
""",
    "an encoder of sums": """
optimizer = torch.optim.Adam(model.parameters())
for i, (x, _) in enumerate(data):
    mean, spread = model(x).chunk(2, dim=1)
    loss = (mean.pow(2).sum() + 0.5 * (spread.exp() - spread - 1).sum()) / len(x)
    (loss / 2).backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
""",
    "taught by another": """
teacher = copy.deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    with torch.no_grad():
        wanted = teacher(x).softmax(1)
    out = model(x)
    loss = 0.5 * F.cross_entropy(out, y)
    loss = loss + 0.5 * F.kl_div(out.log_softmax(1), wanted, reduction="batchmean")
    (loss / 4).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    "data taken by next": """
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
stream = itertools.cycle(data)
x, y = next(stream)
for update in range(4):
    for micro in range(3):
        loss = F.cross_entropy(model(x), y) / 3
        x, y = next(stream)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
""",
    "a tail by its own length": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for start in range(0, 7, 3):
        window = data[start : min(start + 3, 7)]
        for x, y in window:
            (F.cross_entropy(model(x), y) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "several passes over one batch": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    state = torch.zeros(4, 2)
    for _ in range(3):
        state = state.detach() + model(x)
        F.cross_entropy(state, y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "weights swapped for the evaluation": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = [p.detach().clone() for p in model.parameters()]
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 2).backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            now = [p.clone() for p in model.parameters()]
            for p, old in zip(model.parameters(), kept):
                p.copy_(old)
            score = F.cross_entropy(model(x), y).item()
            for p, new in zip(model.parameters(), now):
                p.copy_(new)
""",
    "noise added to gradients": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 2).backward()
    if i % 2 == 1:
        for p in model.parameters():
            p.grad.add_(0.01 * torch.randn_like(p))
        optimizer.step()
        optimizer.zero_grad()
""",
    "a rate that warms up": """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
for i in range(24):
    x, y = data[i % 8]
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
""",
    "saved after each update": """
optimizer = torch.optim.AdamW(model.parameters())
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
model.load_state_dict(saved[0])
optimizer.load_state_dict(saved[1])
""",
    "layers thawed and added": """
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    if i == 4:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "a penalty on every second batch": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if i % 2:
        loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
""",
}
