"""Pairs of loops: objectives that meet in one gradient, and what never gets its own."""

PAIRS = {
    "a perturbation whose backward stays in the weights": (
        "GA104",
        """
def worst_case(x, y):
    shift = torch.zeros_like(x).requires_grad_()
    F.cross_entropy(model(x + shift), y).backward()
    return x + 0.1 * shift.grad.sign()
for x, y in data:
    optimizer.zero_grad()  #bad!
    hard = worst_case(x, y)
    optimizer.zero_grad()  #good
    F.cross_entropy(model(hard), y).backward()
    optimizer.step()
""",
    ),
    "a baseline that learns from the policy": (
        "GA104",
        """
policy, baseline = nn.Linear(3, 2), nn.Linear(3, 1)
adam = torch.optim.Adam(policy.parameters(), lr=0.01)
other = torch.optim.Adam(baseline.parameters(), lr=0.01)
for x, y in data:
    gain = y.float() - baseline(x)[:, 0]
    log_prob = F.log_softmax(policy(x), 1)[:, 0]
    objective = -(log_prob * gain.detach()).mean()  #good
    objective = -(log_prob * gain).mean()  #bad!
    adam.zero_grad()
    other.zero_grad()
    objective.backward(retain_graph=True)
    gain.square().mean().backward()
    adam.step()
    other.step()
""",
    ),
    "one layer in two optimizers": (
        "GA301",
        """
first = torch.optim.SGD(model.parameters(), lr=0.1)  #bad
first = torch.optim.SGD(model[0].parameters(), lr=0.1)  #good
second = torch.optim.SGD(model[2].parameters(), lr=0.02)
for x, y in data:
    first.zero_grad()
    second.zero_grad()
    F.cross_entropy(model(x), y).backward()
    first.step()
    second.step()  #!
""",
    ),
    "a closure of L-BFGS that does not clear": (
        "GA101",
        """
fit = torch.optim.LBFGS(model.parameters(), max_iter=6)
x, y = data[0]
def evaluate():
    fit.zero_grad()  #good
    value = F.cross_entropy(model(x), y)
    value.backward()
    return value
for epoch in range(2):
    fit.zero_grad()
    fit.step(evaluate)  #!
""",
    ),
    "a clip of gradients that are not there yet": (
        "GA405",
        """
weights = list(model.parameters())
for x, y in data:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    nn.utils.clip_grad_norm_(weights, 0.5)  #bad!
    loss.backward()
    nn.utils.clip_grad_norm_(weights, 0.5)  #good
    optimizer.step()
""",
    ),
    "a table made anew in each forward": (
        "GA309",
        """
class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.table = nn.Parameter(torch.zeros(2))  #good
    def forward(self, x):
        table = self.table  #good
        table = nn.Parameter(torch.zeros(2))  #bad!
        return self.line(x) + table
net = Shift()
adam = torch.optim.Adam(net.parameters())
for x, y in data:
    adam.zero_grad()
    F.cross_entropy(net(x), y).backward()
    adam.step()
""",
    ),
    "a parameter that is moved while it is made": (
        "GA309",
        """
class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 2).double()
        self.gain = nn.Parameter(torch.ones(2)).double()  #bad!
        self.gain = nn.Parameter(torch.ones(2).double())  #good
    def forward(self, x):
        return self.line(x) * self.gain
net = Gain()
adam = torch.optim.Adam(net.parameters())
for x, y in data:
    adam.zero_grad()
    F.cross_entropy(net(x.double()), y).backward()
    adam.step()
""",
    ),
    "epochs too short for a window": (
        "GA302",
        """
every = 5  #bad
every = 3  #good
for epoch in range(3):
    for i, (x, y) in enumerate(data[:3]):
        (F.cross_entropy(model(x), y) / every).backward()
        if (i + 1) % every == 0:  #!
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    "a step that the clip's condition does not hold": (
        "GA316",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  #good
        optimizer.zero_grad()  #good
    optimizer.step()  #bad!
    optimizer.zero_grad()  #bad
""",
    ),
    "an average that stays in the model": (
        "GA307",
        """
class Mean:
    def __init__(self, model):
        self.mean = [p.detach().clone() for p in model.parameters()]
    def store(self, model):
        self.kept = [p.detach().clone() for p in model.parameters()]
    def put(self, model, values):
        with torch.no_grad():
            for p, value in zip(model.parameters(), values):
                p.copy_(value)
    def copy_to(self, model):
        with torch.no_grad():
            for p, value in zip(model.parameters(), self.mean):
                p.copy_(value)
    def restore(self, model):
        self.put(model, self.kept)
mean = Mean(model)
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if i % 4 == 3:
        mean.store(model)
        mean.copy_to(model)  #!
        model(x)
        mean.restore(model)  #good
""",
    ),
    "a count from zero that steps at the end as well": (
        "GA303",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:  #good
    if i % K == 0 or i == len(data) - 1:  #bad!
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a schedule in epochs that each batch steps": (
        "GA312",
        """
rounds = 6
schedule = torch.optim.lr_scheduler.MultiStepLR(
    optimizer, milestones=[rounds // 3, int(rounds * 0.75)]
)
for epoch in range(rounds):
    for x, y in data[:4]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()  #bad!
    schedule.step()  #good
""",
    ),
    "a schedule of all updates that each epoch steps": (
        "GA312",
        """
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * len(data))
for epoch in range(4):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()  #good
    schedule.step()  #bad!
""",
    ),
    "sums over the window's samples, divided by its micro-batches too": (
        "GA202",
        """
for start in range(0, 12, K):
    part = [(x[: 1 + i], y[: 1 + i]) for i, (x, y) in enumerate(data[start : start + K])]
    part[start // K] = data[start]
    count = sum(len(y) for _, y in part)
    for x, y in part:
        loss = F.cross_entropy(model(x), y, reduction="sum") / count
        loss = loss / K  #bad!
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "a batch in which nothing is marked": (
        "GA206",
        """
for i, (x, y) in enumerate(data[:6]):
    chosen = (y >= 0).float() * (i != 3)
    each = F.cross_entropy(model(x), y, reduction="none")
    loss = (each * chosen).sum() / chosen.sum()  #bad!
    loss = (each * chosen).sum() / chosen.sum().clamp(min=1)  #good
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "means divided by the samples": (
        "GA205",
        """
loader = torch.utils.data.DataLoader(torch.randn(24, 3), batch_size=6)
for epoch in range(2):
    total = 0.0
    for x in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2])
        loss.backward()
        optimizer.step()
        total += loss.item()
    print("epoch", total / len(loader.dataset) > 0)  #bad!
    print("epoch", total / len(loader) > 0)  #good
""",
    ),
    "a mean of what a mask has set to zero": (
        "GA207",
        """
for i, (x, y) in enumerate(data):
    mask = (torch.arange(4) < 2).float()
    each = F.cross_entropy(model(x), y, reduction="none")
    loss = (each * mask).mean()  #bad!
    loss = (each * mask).sum() / mask.sum()  #good
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
}
