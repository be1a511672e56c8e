"""Right loops: windows of every kind, what they sum, how they end, who clears and clips."""

from loops import DATA

HEAD = DATA

LOOPS = {
    "plain": """
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
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
    "clipped by hand": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        factor = (0.1 / (norm + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
""",
    "clipped as the gradients are": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
past = []
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    past.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
    bound = sorted(past)[len(past) // 2]
    nn.utils.clip_grad_norm_(model.parameters(), bound)
    optimizer.step()
""",
    "longer windows as it goes": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter(data * 4)
for every in (1, 2, 4, 8):
    for _ in range(2):
        for _ in range(every):
            x, y = next(batches)
            (F.cross_entropy(model(x), y) / every).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "easy samples first": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    share = (epoch + 2) / 4
    for x, y in data:
        losses = F.cross_entropy(model(x), y, reduction="none")
        kept = losses.topk(max(1, int(share * len(losses))), largest=False).values
        optimizer.zero_grad()
        kept.mean().backward()
        optimizer.step()
""",
    "tasks in turn": """
heads = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
optimizer = torch.optim.Adam([*model.parameters(), *heads.parameters()])
for x, y in data:
    optimizer.zero_grad()
    for name, weight in (("a", 1.0), ("b", 0.3)):
        (weight * F.cross_entropy(heads[name](model(x)), y)).backward()
    optimizer.step()
""",
    "pairs, one batch an update": """
other = copy.deepcopy(model)
optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])
for x, _ in data:
    a, b = F.normalize(model(x), dim=-1), F.normalize(other(x + 0.1), dim=-1)
    sim = a @ b.T / 0.1
    loss = (F.cross_entropy(sim, torch.arange(4)) + F.cross_entropy(sim.T, torch.arange(4))) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a last short batch": """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(18, 3), torch.randint(0, 2, (18,))), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "a last short batch, weighed by its samples": """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(18, 3), torch.randint(0, 2, (18,))), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    batches = list(loader)
    for start in range(0, len(batches), 2):
        window = batches[start : start + 2]
        total = sum(len(y) for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x), y) * len(y) / total).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "sums over all that count": """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(18, 3), torch.randint(0, 2, (18,))), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = 0
for i, (x, y) in enumerate(loader):
    F.cross_entropy(model(x), y, reduction="sum").backward()
    count += len(y)
    if (i + 1) % 2 == 0 or i + 1 == len(loader):
        for p in model.parameters():
            p.grad /= count
        optimizer.step()
        optimizer.zero_grad()
        count = 0
""",
    "through time, cut": """
cell = nn.GRUCell(3, 4)
out = nn.Linear(4, 2)
optimizer = torch.optim.SGD([*cell.parameters(), *out.parameters()], lr=0.1)
state, loss = torch.zeros(4, 4), 0.0
for i, (x, y) in enumerate(data):
    state = cell(x, state)
    loss = loss + F.cross_entropy(out(state), y) / 4
    if (i + 1) % 4 == 0:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimizer.step()
        state, loss = state.detach(), 0.0
""",
    "a rate of its own, by hand, without an optimizer": """
for x, y in data:
    loss = F.cross_entropy(model(x), y)
    for p, slope in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        with torch.no_grad():
            p -= 0.1 * slope
""",
    "added up in tensors of the script's own": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parameters = list(model.parameters())
sums = [torch.zeros_like(p) for p in parameters]
for i, (x, y) in enumerate(data):
    for total, slope in zip(
        sums, torch.autograd.grad(F.cross_entropy(model(x), y) / 4, parameters)
    ):
        total += slope
    if (i + 1) % 4 == 0:
        for p, total in zip(parameters, sums):
            p.grad = total.clone()
            total.zero_()
        optimizer.step()
        optimizer.zero_grad()
""",
    "a step for what is left, with nothing left, that changes nothing": """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
""",
}
