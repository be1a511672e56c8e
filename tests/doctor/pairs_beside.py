"""Pairs of loops: what stands beside the loop: hooks, checks, other optimizers."""

PAIRS = {
    "cleared right before the last of a window": (
        "GA102",
        """
for i, (x, y) in enumerate(data):
    if (i + 1) % K == 0:  #bad
        optimizer.zero_grad()  #bad!
    loss = F.cross_entropy(model(x), y) / K
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()  #good
""",
    ),
    "a step between clearing and backward": (
        "GA103",
        """
for x, y in data:
    optimizer.zero_grad()  #bad!
    loss = F.cross_entropy(model(x), y)
    optimizer.step()  #bad
    loss.backward()
    optimizer.step()  #good
    optimizer.zero_grad()  #good
""",
    ),
    "a penalty that is not divided with the loss": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    ce = F.cross_entropy(model(x), y)
    reg = 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
    loss = ce / K + reg  #bad!
    loss = (ce + reg) / K  #good
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a hook set again in each pass": (
        "GA202",
        """
for x, y in data:
    optimizer.zero_grad()
    for p in model.parameters():  #bad
        p.register_hook(lambda g: g * 0.5)  #bad!
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    ),
    "weights frozen with momentum and a gradient": (
        "GA104",
        """
head = nn.Linear(2, 2)
net = nn.Sequential(model, head)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for i, (x, y) in enumerate(data):
    if i == 6:
        for p in model.parameters():
            p.requires_grad_(False)  #bad!
            p.requires_grad_(False).grad = None  #good
    opt.zero_grad(set_to_none=False)
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
    ),
    "a scheduler of the optimizer before": (
        "GA304",
        """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.StepLR(opt, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  #bad!
for epoch in range(4):
    for x, y in data:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    sched.step()
""",
    ),
    "a layer that gets its own copy after the optimizer": (
        "GA306",
        """
emb, out = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
opt = torch.optim.SGD([*emb.parameters(), *out.parameters()], lr=0.1)
out.weight = nn.Parameter(emb.weight.detach().clone())  #bad!
with torch.no_grad():  #good
    out.weight.copy_(emb.weight)  #good
for x, y in data:
    opt.zero_grad()
    F.cross_entropy(out(emb(y)), y).backward()
    opt.step()
""",
    ),
    "a validation that runs backwards": (
        "GA104",
        """
def validate():
    for x, y in data[:2]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()  #bad!
for epoch in range(4):
    for x, y in data[:4]:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    validate()
""",
    ),
    "training mode set only once": (
        "GA703",
        """
net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
net.train()
for epoch in range(3):
    net.train()  #good
    for x, y in data:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    net.eval()  #!
    with torch.no_grad():
        print(sum(F.cross_entropy(net(x), y).item() for x, y in data) > 0)
""",
    ),
    "parameters in a plain list": (
        "GA309",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.ws = [nn.Parameter(torch.randn(2, 2)) for _ in range(2)]  #bad!
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(2, 2)) for _ in range(2)])  #good
    def forward(self, x):
        x = self.lin(x)
        for w in self.ws:
            x = torch.tanh(x @ w)
        return x
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in data:
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
    ),
    "a shadow that follows by lerp": (
        "GA317",
        """
shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
        for n, p in model.named_parameters():  #good
            shadow[n].lerp_(p.detach(), 0.01)  #good
    for n, p in model.named_parameters():  #bad
        shadow[n].lerp_(p.detach(), 0.01)  #bad!
""",
    ),
    "a second loss past the scaler": (
        "GA202",
        """
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for x, y in data:
    sgd.zero_grad()
    out = model(x)
    scaler.scale(F.cross_entropy(out, y)).backward(retain_graph=True)
    out.pow(2).mean().backward()  #bad!
    scaler.scale(out.pow(2).mean()).backward()  #good
    scaler.step(sgd)
    scaler.update()
""",
    ),
    "a clip of what was just cleared": (
        "GA405",
        """
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #good
    optimizer.step()
    optimizer.zero_grad()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #bad!
""",
    ),
}
