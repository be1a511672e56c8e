"""Right loops: coefficients that are no divisions, counts, and values that are not plain."""

from loops import DATA

HEAD = DATA

LOOPS = {
    "two coefficients, divided once": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    out = model(x)
    loss = F.cross_entropy(out, y) + 0.01 * out.pow(2).mean()
    (loss / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "each term divided, one with a coefficient": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    out = model(x)
    (0.01 * out.pow(2).mean() / 4 + F.cross_entropy(out, y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "smoothed labels by hand": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    logs = model(x).log_softmax(-1)
    loss = 0.9 * F.nll_loss(logs, y) + 0.1 * -logs.mean(-1).mean()
    (loss / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "weights of tasks": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    out = model(x)
    parts = {"kind": F.cross_entropy(out, y), "size": out.abs().mean(), "flat": out.var()}
    weights = {"kind": 0.1, "size": 0.5, "flat": 2.0}
    loss = sum(weights[name] * part for name, part in parts.items())
    if torch.isfinite(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "a bonus for entropy": """
optimizer = torch.optim.Adam(model.parameters())
for x, y in data:
    chances = torch.distributions.Categorical(logits=model(x))
    loss = -(chances.log_prob(y) * torch.randn(4)).mean() - 0.01 * chances.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "an autoencoder with a weight for its prior": """
maker = nn.Linear(2, 3)
both = [*model.parameters(), *maker.parameters()]
optimizer = torch.optim.Adam(both)
for i, (x, _) in enumerate(data):
    mean, spread = model(x).chunk(2, -1)
    code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
    back = maker(torch.cat([code, code], -1))
    prior = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).mean()
    ((F.mse_loss(back, x) + 0.25 * prior) / 2).backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a factor that grows": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data * 3):
    factor = min(1.0, (i // 4 + 1) / 4)
    (factor * F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "half a square, and a condition": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, _ in data:
    loss = 0.5 * model(x).pow(2).mean()
    loss.backward()
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        optimizer.step()
    optimizer.zero_grad()
""",
    "one tenth of a loss, four passes": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    for noise in torch.randn(4, 4, 3):
        (0.1 * F.cross_entropy(model(x + noise), y)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a quarter of a loss, four passes": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    for noise in torch.randn(4, 4, 3):
        out = model(x + noise)
        (0.25 * F.cross_entropy(out, y) + 0.25 * out.pow(2).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "the mean of heads": """
heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))
optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
for x, y in data:
    loss = sum(F.cross_entropy(head(x), y) for head in heads) / len(heads)
    if loss.isfinite():
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "as many heads as micro-batches": """
heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))
optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    loss = (F.cross_entropy(heads[0](x), y) + F.cross_entropy(heads[1](x), y)) / 2
    (loss / 2).backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
""",
    "the mean of heads, and windows of another length": """
heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))
optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    loss = sum(F.cross_entropy(head(x), y) for head in heads) / 3 / 4
    loss.backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a temperature": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
teacher = copy.deepcopy(model).requires_grad_(False)
for x, y in data:
    mine, its = (model(x) / 2).log_softmax(-1), (teacher(x) / 2).softmax(-1)
    soft = F.kl_div(mine, its, reduction="batchmean")
    loss = 0.5 * F.cross_entropy(model(x), y) + 0.5 * 4 * soft
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a reward divided by ten": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 10).backward()
    if i % 2 == 1 or i == len(data) - 1:
        optimizer.step()
        optimizer.zero_grad()
    elif i > 100:
        break
""",
    "a sum of squares of complex gradients, by their size": """
weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
optimizer = torch.optim.SGD([weight], lr=0.1)
for x, _ in data:
    optimizer.zero_grad()
    (x.to(torch.complex64) @ weight).abs().mean().backward()
    norm = (weight.grad.abs() ** 2).sum().sqrt()
    if norm > 1:
        weight.grad /= norm
    optimizer.step()
""",
    "squares of real gradients beside complex ones": """
spectrum = nn.Parameter(torch.randn(2, dtype=torch.complex64))
optimizer = torch.optim.SGD([*model.parameters(), spectrum], lr=0.1)
for x, _ in data:
    optimizer.zero_grad()
    (model(x).to(torch.complex64) @ spectrum).abs().mean().backward()
    norm = sum((p.grad ** 2).sum() for p in model.parameters()) ** 0.5
    optimizer.step()
""",
    "sparse gradients, not clipped": """
table = nn.Embedding(8, 2, sparse=True)
sparse = torch.optim.SparseAdam(table.parameters())
dense = torch.optim.Adam(model.parameters())
for x, y in data:
    sparse.zero_grad()
    dense.zero_grad()
    F.cross_entropy(model(x) + table(y), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    sparse.step()
    dense.step()
""",
    "a dropout that is off in a checkpoint": """
from torch.utils.checkpoint import checkpoint
block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
drop = nn.Dropout(0.5)
optimizer = torch.optim.Adam([*block.parameters(), *model.parameters()])
for x, y in data:
    optimizer.zero_grad()
    out = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    F.cross_entropy(drop(model(out)), y).backward()
    optimizer.step()
""",
    "sums over all values, divided by their number": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    losses = F.cross_entropy(model(x), y, reduction="none")
    (losses.sum() / losses.numel() / 4).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    "sums over what counts, divided by all that count": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for start in (0, 4):
    part = [(x, y.masked_fill(x[:, 0] > 0, -1)) for x, y in data[start : start + 4]]
    total = sum(y[y >= 0].numel() for _, y in part)
    for x, y in part:
        loss = F.cross_entropy(model(x), y, ignore_index=-1, reduction="sum")
        (loss / total).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}
