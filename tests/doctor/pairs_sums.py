"""Pairs of loops: gradients and losses that a script adds up itself."""

PAIRS = {
    "sums in a list that nobody clears": (
        "GA101",
        """
acc = [torch.zeros_like(p) for p in model.parameters()]
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) / K).backward()
    for a, p in zip(acc, model.parameters()):
        a += p.grad  #!
    if (i + 1) % K == 0:
        for a, p in zip(acc, model.parameters()):
            p.grad = a.clone()
        optimizer.step()
        for a in acc:  #good
            a.zero_()  #good
""",
    ),
    "a flat sum that nobody clears": (
        "GA101",
        """
from torch.nn.utils import parameters_to_vector, vector_to_parameters
params = list(model.parameters())
flat = torch.zeros(sum(p.numel() for p in params))
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y) / K
    grads = torch.autograd.grad(loss, params)
    flat += torch.cat([g.reshape(-1) for g in grads])  #!
    if (i + 1) % K == 0:
        offset = 0
        for p in params:
            p.grad = flat[offset : offset + p.numel()].view_as(p).clone()
            offset += p.numel()
        optimizer.step()
        flat.zero_()  #good
""",
    ),
    "sums in a table that nobody divides": (
        "GA201",
        """
sums = {}
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for n, p in model.named_parameters():
        sums[n] = sums.get(n, 0) + p.grad.clone()
    if (i + 1) % K == 0:
        for n, p in model.named_parameters():
            p.grad = sums[n]  #bad!
            p.grad = sums[n] / K  #good
        optimizer.step()
        sums = {}
""",
    ),
    "sums of asked gradients that nobody divides": (
        "GA201",
        """
params = list(model.parameters())
total = [torch.zeros_like(p) for p in params]
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y)
    for t, g in zip(total, torch.autograd.grad(loss, params)):
        t += g
    if (i + 1) % K == 0:
        for p, t in zip(params, total):
            p.grad = t.clone()  #bad!
            p.grad = t.clone() / K  #good
            t.zero_()
        optimizer.step()
""",
    ),
    "copies that are adapted through .data": (
        "GA309",
        """
meta = torch.optim.SGD(model.parameters(), lr=0.1)
def adapt(x, y):
    fast = copy.deepcopy(model)
    inner = F.cross_entropy(fast(x), y)
    grads = torch.autograd.grad(inner, list(fast.parameters()), create_graph=True)
    for p, g in zip(fast.parameters(), grads):  #bad
        p.data = p.data - 0.1 * g  #bad!
    return fast
def adapt2(x, y):
    w = dict(model.named_parameters())
    out = torch.func.functional_call(model, w, (x,))
    grads = torch.autograd.grad(F.cross_entropy(out, y), list(w.values()), create_graph=True)
    fast = {n: p - 0.1 * g for (n, p), g in zip(w.items(), grads)}
    return lambda q: torch.func.functional_call(model, fast, (q,))
for a, b in zip(data[::2], data[1::2]):
    meta.zero_grad()
    fast = adapt(*a)  #bad
    fast = adapt2(*a)  #good
    F.cross_entropy(fast(b[0]), b[1]).backward()
    meta.step()
""",
    ),
    "means of unequal batches by their number": (
        "GA203",
        """
T = [2, 6, 3, 5]
for s in range(3):
    for i in range(4):
        x, y = torch.randn(T[i], 3), torch.randint(0, 2, (T[i],))
        loss = F.cross_entropy(model(x), y) * (1 / 4)  #bad!
        loss = F.cross_entropy(model(x), y) * (T[i] / sum(T))  #good
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "a sum over samples divided by batches": (
        "GA205",
        """
from torch.utils.data import DataLoader, TensorDataset
rows = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
loader = DataLoader(rows, batch_size=8)
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * x.size(0)
    print("loss", total / len(loader) > 0)  #bad!
    print("loss", total / len(loader.dataset) > 0)  #good
""",
    ),
    "a running sum shown again and again": (
        "GA205",
        """
running = 0.0
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    running += loss.item()
    if i % 4 == 3:
        print("loss", running / 4 > 0)  #!
        running = 0.0  #good
""",
    ),
    "an optimizer that is given copies": (
        "GA309",
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD([p.detach().clone().requires_grad_() for p in net.parameters()], 0.1)  #bad!
opt = torch.optim.SGD([p for p in net.parameters()], lr=0.1)  #good
for x, y in data:
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
    ),
    "ranks that add up the sum so far": (
        "GA601",
        """
import os, socket, torch.distributed as dist
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); os.environ["MASTER_PORT"] = str(s.getsockname()[1])
os.environ["MASTER_ADDR"] = "127.0.0.1"
dist.init_process_group("gloo", rank=0, world_size=1)

for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    for p in model.parameters():  #bad
        dist.all_reduce(p.grad)  #bad!
        p.grad /= dist.get_world_size()  #bad
    if (i + 1) % K == 0:
        for p in model.parameters():  #good
            dist.all_reduce(p.grad)  #good
            p.grad /= dist.get_world_size()  #good
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
""",
    ),
    "a window's losses differentiated together": (
        "GA201",
        """
total = 0.0
for i, (x, y) in enumerate(data):
    total = total + F.cross_entropy(model(x), y)  #bad
    total = total + F.cross_entropy(model(x), y) / K  #good
    if (i + 1) % K == 0:
        optimizer.zero_grad()
        total.backward()  #!
        optimizer.step()
        total = 0.0
""",
    ),
    "an epoch's mean of what is left": (
        "GA205",
        """
shown = 0.0
whole = 0.0
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    shown += loss.item()
    whole += loss.item()
    if (i + 1) % 5 == 0:
        print(shown / 5 > 0)
        shown = 0.0
print(shown / len(data) > 0)  #bad!
print(whole / len(data) > 0)  #good
""",
    ),
    "large and small batches in one window": (
        "GA203",
        """
rows = [(torch.randn(n, 3), torch.randint(0, 2, (n,))) for n in (8, 2, 8, 2)]
for i, (x, y) in enumerate(rows):
    loss = F.cross_entropy(model(x), y) / 2  #bad!
    loss = F.cross_entropy(model(x), y) * len(x) / 10  #good
    loss.backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
}
