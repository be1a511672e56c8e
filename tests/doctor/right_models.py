"""Right loops: models that are frozen, averaged, evaluated, recomputed, saved or scheduled."""

from loops import DATA

HEAD = DATA

LOOPS = {
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
    "layers recomputed, in windows": """
from torch.utils.checkpoint import checkpoint
deep = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Tanh()) for _ in range(3))
last = nn.Linear(3, 2)
optimizer = torch.optim.AdamW([*deep.parameters(), *last.parameters()])
for i, (x, y) in enumerate(data):
    for layer in deep:
        x = checkpoint(layer, x, use_reentrant=False)
    (F.cross_entropy(last(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "no dropout, so no state to keep": """
from torch.utils.checkpoint import checkpoint
optimizer = torch.optim.AdamW(model.parameters())
for x, y in data:
    optimizer.zero_grad()
    out = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
    F.cross_entropy(out, y).backward()
    optimizer.step()
""",
    "narrow forwards": """
optimizer = torch.optim.AdamW(model.parameters())
for i, (x, y) in enumerate(data):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
""",
    "a frozen body, then thawed": """
for p in model[0].parameters():
    p.requires_grad_(False)
optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()))
for epoch in range(2):
    if epoch == 1:
        for p in model[0].parameters():
            p.requires_grad_(True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "a low-rank side path": """
left, right = nn.Parameter(torch.randn(3, 2) * 0.1), nn.Parameter(torch.zeros(2, 2))
model.requires_grad_(False)
optimizer = torch.optim.AdamW([left, right])
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x) + x @ left @ right, y) / 2).backward()
    if i % 2:
        nn.utils.clip_grad_norm_([left, right], 1.0)
        optimizer.step()
        optimizer.zero_grad()
""",
}
