"""Pairs of loops: graphs that outlive the pass that made them."""

PAIRS = {
    "a running mean that is made of its last one": (
        "GA501",
        """
class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.register_buffer("running", torch.zeros(n))
    def forward(self, x):
        mean = x.mean(0)
        self.running = 0.9 * self.running + 0.1 * mean  #bad!
        self.running = 0.9 * self.running + 0.1 * mean.detach()  #good
        return (x - mean) * self.weight
net = nn.Sequential(nn.Linear(3, 8), Norm(8), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in data:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
""",
    ),
    "outputs kept for the epoch": (
        "GA501",
        """
preds, labels = [], []
for epoch in range(2):
    for x, y in data:
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        preds.append(out)  #bad!
        preds.append(out.detach())  #good
        labels.append(y)
print(torch.cat(preds).argmax(1).eq(torch.cat(labels)).float().mean().item() > 0)
""",
    ),
    "outputs joined to those before": (
        "GA501",
        """
allout = torch.empty(0, 2)
for epoch in range(2):
    for x, y in data:
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        allout = torch.cat([allout, out])  #bad!
        allout = torch.cat([allout, out.detach()])  #good
""",
    ),
    "features queued in the forward": (
        "GA501",
        """
class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.queue = []
    def forward(self, x):
        z = self.enc(x)
        self.queue.append(z)  #bad!
        self.queue.append(z.detach())  #good
        return self.head(z.tanh())
net = Bank()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in data:
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
    ),
    "a weighted meter that is given tensors": (
        "GA501",
        """
class AverageMeter:
    def __init__(self):
        self.sum, self.count, self.avg = 0.0, 0, 0.0
    def update(self, val, n=1):
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count
losses = AverageMeter()
def train():
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss, x.size(0))  #bad!
        losses.update(loss.item(), x.size(0))  #good
train()
""",
    ),
    "a step that returns its loss, which is kept": (
        "GA501",
        """
history = {"loss": [], "acc": []}
def step(x, y):
    out = model(x)
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss, "acc": (out.argmax(1) == y).float().mean()}
for epoch in range(2):
    for x, y in data:
        r = step(x, y)
        history["loss"].append(r["loss"])  #bad!
        history["loss"].append(r["loss"].item())  #good
        history["acc"].append(r["acc"])
""",
    ),
    "a validation that records graphs and adds up": (
        "GA501",
        """
def evaluate():
    total = 0.0
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        total += loss  #bad!
        total += loss.item()  #good
    return total / len(data)
log = []
for epoch in range(4):
    for x, y in data[:4]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    log.append(evaluate())
""",
    ),
    "a state that a module hands on with its graph": (
        "GA502",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)
        self.h = torch.zeros(1, 4, 4)
    def forward(self, x):
        y, self.h = self.rnn(x[:, None], self.h)  #bad!
        y, h = self.rnn(x[:, None], self.h)  #good
        self.h = h.detach()  #good
        return self.out(y[:, -1])
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in data:
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
    ),
    "a total that is not begun anew": (
        "GA502",
        """
total = 0
for i, (x, y) in enumerate(data):
    total = total + F.cross_entropy(model(x), y) / K  #!
    if (i + 1) % K == 0:
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        total = 0  #good
""",
    ),
    "a shift computed once for all passes": (
        "GA502",
        """
enc = nn.Linear(3, 3)
opt = torch.optim.SGD([*enc.parameters(), *model.parameters()], lr=0.1)
base = torch.randn(1, 3)
shift = enc(base)  #bad!
for x, y in data:
    shift = enc(base)  #good
    opt.zero_grad()
    F.cross_entropy(model(x + shift), y).backward()
    opt.step()
""",
    ),
    "a smoothed loss on self": (
        "GA501",
        """
class Trainer:
    def __init__(self):
        self.smooth = None
    def fit(self):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.smooth = loss if self.smooth is None else 0.9 * self.smooth + 0.1 * loss  #bad!
            self.smooth = loss.item() + (0.0 if self.smooth is None else 0.9 * self.smooth)  #good
Trainer().fit()
""",
    ),
    "maps kept by number in the forward": (
        "GA501",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.maps = {}
        self.calls = 0
    def forward(self, x):
        h = torch.softmax(self.lin(x), 1)
        self.maps[self.calls] = h  #bad!
        self.maps[self.calls] = h.detach()  #good
        self.calls += 1
        return self.out(h)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in data:
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
    ),
    "a forward hook that keeps what it sees": (
        "GA501",
        """
features = []
model[1].register_forward_hook(lambda m, i, o: features.append(o))  #bad!
model[1].register_forward_hook(lambda m, i, o: features.append(o.detach()))  #good
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    ),
    "a metric of tensors that a class adds up": (
        "GA501",
        """
class Metric:
    def __init__(self):
        self.reset()
    def reset(self):
        self.values = torch.tensor(0.0)
        self.n = 0
    def update(self, v):
        self.values = self.values + v
        self.n += 1
metric = Metric()
for epoch in range(2):
    for x, y in data:
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric.update(F.l1_loss(out[:, 0], y.float()))  #bad!
        metric.update(F.l1_loss(out[:, 0], y.float()).detach())  #good
""",
    ),
    "a memory of what was thought of states": (
        "GA501",
        """
memory = []
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in data:
    q = net(x)
    target = torch.randn(4)
    memory.append((x, q, y))  #bad!
    memory.append((x, q.detach(), y))  #good
    loss = F.mse_loss(q.gather(1, y[:, None])[:, 0], target)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
}
