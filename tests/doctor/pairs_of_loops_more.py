"""More pairs of loops, marked as in `pairs_of_loops`."""

MORE = {
    "a first window of one": (
        "GA303",
        """
for i, (x, y) in enumerate(data + data[:1]):  #bad
for i, (x, y) in enumerate(data):  #good
    (F.cross_entropy(model(x), y) / K).backward()
    if i % K == 0:  #bad!
    if i % K == K - 1:  #good
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "divided in the loss and in the loop": (
        "GA202",
        """
def criterion(out, y):
    return F.cross_entropy(out, y) / K
for i, (x, y) in enumerate(data):
    loss = criterion(model(x), y)
    loss = loss / K  #bad!
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "Adam made anew with each epoch": (
        "GA304",
        """
adam = torch.optim.Adam(model.parameters(), lr=0.01)  #good
for epoch in range(3):
    adam = torch.optim.Adam(model.parameters(), lr=0.01)  #bad!
    for x, y in data[:4]:
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
""",
    ),
    "a weight that is bound anew in the loop": (
        "GA306",
        """
line = nn.Linear(3, 2)
sgd = torch.optim.SGD(line.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(line(x), y) / K).backward()
    if (i + 1) % K == 0:
        sgd.step()
        sgd.zero_grad()
        line.weight = nn.Parameter(line.weight.data / line.weight.data.norm())  #bad!
        line.weight.data.div_(line.weight.data.norm())  #good
""",
    ),
    "plain tensors that are bound anew": (
        "GA306",
        """
w = torch.randn(3, requires_grad=True)
for x, _ in data[:4]:
    loss = (x @ w).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        w = w - 0.1 * w.grad  #bad!
        w -= 0.1 * w.grad  #good
        w.grad = None  #good
""",
    ),
    "evaluation that leaves dropout off": (
        "GA703",
        """
net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2))
adam = torch.optim.Adam(net.parameters())
def validate():
    net.eval()  #!
    with torch.no_grad():
        value = F.cross_entropy(net(data[0][0]), data[0][1]).item()
    net.train()  #good
    return value
net.train()
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(net(x), y) / K).backward()
        if (i + 1) % K == 0:
            adam.step()
            adam.zero_grad()
    validate()
""",
    ),
    "a backbone that is unfrozen after some epochs": (
        "GA309",
        """
backbone, head = nn.Linear(3, 8), nn.Linear(8, 2)
backbone.requires_grad_(False)
adam = torch.optim.Adam(head.parameters(), lr=0.01)
for epoch in range(3):
    if epoch == 1:
        backbone.requires_grad_(True)  #!
        adam.add_param_group({"params": backbone.parameters()})  #good
    for x, y in data[:4]:
        F.cross_entropy(head(backbone(x)), y).backward()
        adam.step()
        adam.zero_grad()
""",
    ),
    "an encoder that never gets a gradient": (
        "GA309",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
    def forward(self, x):
        hidden = self.encoder(x)
        return self.head(hidden.detach())  #bad!
        return self.head(hidden)  #good
net = Net()
adam = torch.optim.Adam(net.parameters())
for i, (x, y) in enumerate(data):
    (F.cross_entropy(net(x), y) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        adam.zero_grad()
""",
    ),
    "an encoder that no optimizer owns": (
        "GA309",
        """
encoder, decoder = nn.Linear(3, 8), nn.Linear(8, 2)
adam = torch.optim.Adam(decoder.parameters())  #bad!
adam = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])  #good
for i, (x, y) in enumerate(data):
    (F.cross_entropy(decoder(encoder(x)), y) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        adam.zero_grad()
""",
    ),
    "a network built again from the best state": (
        "GA306",
        """
def build():
    return nn.Linear(3, 2)
net = build()
adam = torch.optim.Adam(net.parameters(), lr=0.01)
for epoch in range(3):
    for x, y in data[:6]:
        adam.zero_grad()
        F.cross_entropy(net(x), y).backward()
        adam.step()
    best = copy.deepcopy(net.state_dict())
    if epoch == 0:
        net = build()  #bad!
        net.load_state_dict(best)
""",
    ),
    "a model that is copied before it is trained": (
        "GA306",
        """
net = nn.Linear(3, 2)
adam = torch.optim.Adam(net.parameters(), lr=0.01)
net = copy.deepcopy(net)  #bad!
start = copy.deepcopy(net)  #good
for i, (x, y) in enumerate(data):
    (F.cross_entropy(net(x), y) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        adam.zero_grad()
""",
    ),
    "a clip after the step": (
        "GA405",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #good
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #bad!
        optimizer.zero_grad()
""",
    ),
    "a clip of each partial sum": (
        "GA401",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)  #bad!
    if (i + 1) % K == 0:
        nn.utils.clip_grad_value_(model.parameters(), 0.1)  #good
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a clip over an iterator that is used up": (
        "GA407",
        """
params = model.parameters()  #bad
params = list(model.parameters())  #good
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        nn.utils.clip_grad_norm_(params, 1.0)  #!
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a second loss that is not divided": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    out = model(x)
    loss = F.cross_entropy(out, y)
    extra = out.pow(2).mean()
    loss = loss / K + 0.1 * extra  #bad!
    loss = (loss + 0.1 * extra) / K  #good
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "weights that are clamped within a window": (
        "GA307",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  #good
            for p in model.parameters():  #good
                p.clamp_(-0.5, 0.5)  #good
    with torch.no_grad():  #bad
        for p in model.parameters():  #bad
            p.clamp_(-0.5, 0.5)  #bad!
""",
    ),
    "one loss differentiated twice": (
        "GA502",
        """
for x, y in data[:6]:
    optimizer.zero_grad()
    out = model(x)
    loss = F.cross_entropy(out, y)
    other = out.pow(2).mean()  #good
    loss.backward(retain_graph=True)
    loss.backward()  #bad!
    other.backward()  #good
    optimizer.step()
""",
    ),
    "graphs of gradients that nobody uses": (
        "GA502",
        """
for x, y in data[:6]:
    optimizer.zero_grad()
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    loss.backward(create_graph=True)  #bad!
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)  #good
    (loss + slope.pow(2).sum()).backward()  #good
    optimizer.step()
""",
    ),
    "a scheduler that goes on past a skipped step": (
        "GA311",
        """
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for i, (x, y) in enumerate(data):
    if i == 5:
        x = x * float("inf")
    scaler.scale(F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()  #bad!
        if scale <= scaler.get_scale():  #good
            scheduler.step()  #good
""",
    ),
    "a state that is saved inside a window": (
        "GA315",
        """
def run(model, optimizer, batches, first):
    for i, (x, y) in enumerate(batches, first):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
cut = 6  #bad
cut = 8  #good
run(model, optimizer, data[:cut], 0)
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  #!
fresh = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
again = torch.optim.AdamW(fresh.parameters(), lr=0.01)
fresh.load_state_dict(saved["model"])
again.load_state_dict(saved["optimizer"])
run(fresh, again, data[cut:], cut)
""",
    ),
    "ranks that send with each micro-batch": (
        "GA602",
        """
import contextlib
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    last = (i + 1) % K == 0
    loss = F.cross_entropy(ddp(x), y) / K  #bad
    with contextlib.nullcontext() if last else ddp.no_sync():
        loss = F.cross_entropy(ddp(x), y) / K  #good
        loss.backward()  #!
    if last:
        sgd.step()
        sgd.zero_grad()
dist.destroy_process_group()
""",
    ),
    "ranks that never hold back": (
        "GA601",
        """
import contextlib
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    last = (i + 1) % K == 0
    with contextlib.nullcontext():  #bad
    with contextlib.nullcontext() if last else ddp.no_sync():  #good
        (F.cross_entropy(ddp(x), y) / K).backward()  #!
    if last:
        sgd.step()
        sgd.zero_grad()
dist.destroy_process_group()
""",
    ),
    "a teacher that gets gradients": (
        "GA309",
        """
teacher, student = nn.Linear(3, 2), nn.Linear(3, 2)
sgd = torch.optim.SGD(student.parameters(), lr=0.1)  #!
for i, (x, y) in enumerate(data):
    target = teacher(x).softmax(1)  #bad
    with torch.no_grad():  #good
        target = teacher(x).softmax(1)  #good
    (F.cross_entropy(student(x), target) / K).backward()
    if (i + 1) % K == 0:
        sgd.step()
        sgd.zero_grad()
""",
    ),
    "a target network that is not held still": (
        "GA309",
        """
online, target = nn.Linear(3, 2), nn.Linear(3, 2)
target.load_state_dict(online.state_dict())
adam = torch.optim.Adam(online.parameters(), lr=0.01)  #!
for i, (x, a) in enumerate(data):
    best = target(x.roll(1, 0)).max(1).values
    best = best.detach()  #good
    q = online(x).gather(1, a[:, None]).squeeze(1)
    loss = F.smooth_l1_loss(q, 1.0 + 0.9 * best)
    adam.zero_grad()
    loss.backward()
    adam.step()
    if i % 4 == 3:
        target.load_state_dict(online.state_dict())
""",
    ),
    "the epoch's figure is divided by the updates": (
        "GA205",
        """
def epoch_loss():
    total, updates = 0.0, 0
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        (loss / K).backward()
        total += loss.item()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return total / updates  #bad!
    return total / len(data)  #good
print(epoch_loss() > 0)
""",
    ),
    "a norm by hand over parameters without a gradient": (
        "GA409",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)
    def forward(self, x):
        return self.used(x)
net = Net()
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in data[:4]:
    sgd.zero_grad()
    F.cross_entropy(net(x), y).backward()
    try:
        total = 0.0
        for p in net.parameters():
            if p.grad is not None:  #good
                total += p.grad.norm().item() ** 2  #good
            total += p.grad.norm().item() ** 2  #bad!
    except AttributeError:
        pass
    sgd.step()
""",
    ),
    "features made under inference mode": (
        "GA503",
        """
backbone, head = nn.Linear(3, 8), nn.Linear(8, 2)
sgd = torch.optim.SGD(head.parameters(), lr=0.1)
def features(x):
    with torch.inference_mode():  #bad
    with torch.no_grad():  #good
        return backbone(x)  #!
for x, y in data[:4]:
    try:
        loss = F.cross_entropy(head(features(x)), y)
        loss.backward()
        sgd.step()
    except RuntimeError:
        break
    sgd.zero_grad()
""",
    ),
    "a hidden state that a write behind the graph changes": (
        "GA308",
        """
w = nn.Parameter(torch.ones(3))
scale = nn.Parameter(torch.ones(()))
sgd = torch.optim.SGD([w, scale], lr=0.1)
for x, _ in data[:4]:
    hidden = x * w
    loss = (hidden * scale).pow(2).mean()
    hidden.data.mul_(0.5)  #bad!
    loss.backward()
    hidden.data.mul_(0.5)  #good
    sgd.step()
    sgd.zero_grad()
""",
    ),
    "a running loss in bfloat16": (
        "GA802",
        """
net = nn.Linear(3, 2).bfloat16()
sgd = torch.optim.SGD(net.parameters(), lr=0.01)
running = torch.zeros((), dtype=torch.bfloat16)  #bad
running = torch.zeros((), dtype=torch.float32)  #good
for i in range(400):
    x, y = data[i % 12]
    loss = F.cross_entropy(net(x.bfloat16()), y) + 1
    loss.backward()
    sgd.step()
    sgd.zero_grad()
    running += loss.detach()  #!
print(running > 0)
""",
    ),
}
