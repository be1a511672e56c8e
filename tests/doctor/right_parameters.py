"""Right loops: parameters that come, go, follow others or are written; and what is kept."""

from loops import TRAINED

HEAD = TRAINED

LOOPS = {
    "folds, one optimizer each": """
for fold in range(3):
    net = nn.Linear(3, 2)
    adam = torch.optim.Adam(net.parameters())
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(net(x), y) / K).backward()
        if (i + 1) % K == 0:
            adam.step()
            adam.zero_grad()
""",
    "snapshots": """
best, states = None, []
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
    best = copy.deepcopy(model)
    states.append(copy.deepcopy(model.state_dict()))
model.load_state_dict(states[0])
""",
    "reptile": """
outer = torch.optim.SGD(model.parameters(), lr=0.5)
for task in range(4):
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.1)
    for x, y in data[:3]:
        inner.zero_grad()
        F.cross_entropy(fast(x), y).backward()
        inner.step()
    for p, q in zip(model.parameters(), fast.parameters()):
        p.grad = (p - q).detach()
    outer.step()
    outer.zero_grad()
""",
    "first order maml by hand": """
outer = torch.optim.SGD(model.parameters(), lr=0.1)
for task in range(4):
    fast = copy.deepcopy(model)
    for x, y in data[:2]:
        grads = torch.autograd.grad(F.cross_entropy(fast(x), y), list(fast.parameters()))
        with torch.no_grad():
            for p, g in zip(fast.parameters(), grads):
                p -= 0.1 * g
    F.cross_entropy(fast(data[3][0]), data[3][1]).backward()
    for p, q in zip(model.parameters(), fast.parameters()):
        p.grad = q.grad.clone()
    outer.step()
""",
    "a pooler that the loss leaves out": """
class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pooler, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    def forward(self, x):
        h = self.body(x)
        return self.head(h), self.pooler(h)
net = Bert()
adam = torch.optim.AdamW(net.parameters())
for i, (x, y) in enumerate(data):
    out, pooled = net(x)
    (F.cross_entropy(out, y) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        adam.zero_grad()
""",
    "an averaged model": """
from torch.optim.swa_utils import AveragedModel
swa = AveragedModel(model)
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
    swa.update_parameters(model)
""",
    "warm-up, then a cosine, once an update": """
S = torch.optim.lr_scheduler
warm = S.LinearLR(optimizer, 0.1, 1.0, total_iters=2)
cosine = S.CosineAnnealingLR(optimizer, T_max=7)
scheduler = S.SequentialLR(optimizer, [warm, cosine], [2])
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
""",
    "a cosine over epochs": """
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
""",
    "a new head with a new optimizer": """
net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
adam = torch.optim.Adam(net.parameters())
for phase, classes in enumerate((4, 2)):
    if phase:
        net[2] = nn.Linear(8, classes)
        adam = torch.optim.Adam(net.parameters())
    for x, y in data[:6]:
        adam.zero_grad()
        F.cross_entropy(net(x), y).backward()
        adam.step()
""",
    "pruning": """
from torch.nn.utils import prune
for x, y in data[:6]:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
prune.l1_unstructured(model[0], "weight", amount=0.3)
for x, y in data[6:]:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "low rank beside frozen weights": """
class Low(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))
    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T
net = nn.Sequential(Low(nn.Linear(3, 8)), nn.Tanh(), Low(nn.Linear(8, 2)))
adam = torch.optim.AdamW(net.parameters(), lr=0.01)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(net(x), y) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        adam.zero_grad()
""",
    "master weights": """
net = nn.Linear(3, 2).bfloat16()
masters = [p.detach().float().clone().requires_grad_() for p in net.parameters()]
adam = torch.optim.Adam(masters, lr=0.01)
for x, y in data:
    F.cross_entropy(net(x.bfloat16()).float(), y).backward()
    for m, p in zip(masters, net.parameters()):
        m.grad = p.grad.float()
        p.grad = None
    adam.step()
    adam.zero_grad()
    with torch.no_grad():
        for m, p in zip(masters, net.parameters()):
            p.copy_(m)
""",
    "inputs normalised in place": """
for i, (x, y) in enumerate(data):
    x = x.clone()
    x.sub_(0.1).div_(2.0)
    loss = F.cross_entropy(model(x), y) / K
    figure = loss.detach().clone()
    figure.mul_(K)
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a buffer that is filled anew": """
buffer = torch.empty(4, 3)
for i, (x, y) in enumerate(data):
    buffer.copy_(x)
    (F.cross_entropy(model(buffer), y) / K).backward()
    buffer.zero_()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a state that is carried and detached": """
cell, out = nn.GRUCell(3, 8), nn.Linear(8, 2)
adam = torch.optim.Adam([*cell.parameters(), *out.parameters()])
h = torch.zeros(4, 8)
for i, (x, y) in enumerate(data):
    h = cell(x, h.detach())
    (F.cross_entropy(out(h), y) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        adam.zero_grad()
""",
    "pretraining, then a probe": """
body, pre, head = nn.Linear(3, 8), nn.Linear(8, 3), nn.Linear(8, 2)
adam = torch.optim.Adam([*body.parameters(), *pre.parameters()])
for x, _ in data:
    adam.zero_grad()
    F.mse_loss(pre(body(x)), x).backward()
    adam.step()
probe = torch.optim.Adam(head.parameters())
for x, y in data:
    with torch.no_grad():
        h = body(x)
    probe.zero_grad()
    F.cross_entropy(head(h), y).backward()
    probe.step()
""",
    "an actor and a critic": """
actor, critic = nn.Linear(3, 2), nn.Linear(3, 1)
goal = copy.deepcopy(critic)
for p in goal.parameters():
    p.requires_grad = False
a, c = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
for x, y in data:
    with torch.no_grad():
        aim = 1.0 + 0.9 * goal(x)
    c.zero_grad()
    F.mse_loss(critic(x), aim).backward()
    c.step()
    a.zero_grad()
    (-(actor(x).log_softmax(1).gather(1, y[:, None]) * critic(x)).mean()).backward()
    a.step()
    for t, s in zip(goal.parameters(), critic.parameters()):
        t.data.copy_(0.95 * t.data + 0.05 * s.data)
""",
    "a meter of divided losses": """
total, updates = 0.0, 0
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y) / K
    loss.backward()
    total += loss.item()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
print(total / updates > 0)
""",
    "an average in bfloat16": """
mean = torch.zeros((), dtype=torch.bfloat16)
for i in range(300):
    x, y = data[i % 12]
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean.mul_(0.9).add_(0.1 * loss.detach().bfloat16())
""",
    "a scaler that is off": """
scaler = torch.amp.GradScaler("cpu", enabled=False)
for i, (x, y) in enumerate(data):
    scaler.scale(F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "features under inference mode for a log": """
for i, (x, y) in enumerate(data):
    with torch.inference_mode():
        before = model(x)
    print(bool(before.mean() < 99))
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "one model of two is evaluated": """
other = nn.Linear(3, 2)
both = torch.optim.Adam([*model.parameters(), *other.parameters()])
for i, (x, y) in enumerate(data):
    out = model(x) if i % 2 else other(x)
    F.cross_entropy(out, y).backward()
    both.step()
    both.zero_grad()
""",
    "hooks that only look": """
norms = []
for p in model.parameters():
    p.register_hook(lambda g: norms.append(g.norm().item()))
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
}
