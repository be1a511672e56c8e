"""Pairs of loops: graphs, ranks, modes and precision."""

PAIRS = {
    "losses kept for the epoch's mean": (
        "GA501",
        """
for epoch in range(2):
    losses = []
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        (loss / K).backward()
        losses.append(loss)  #bad!
        losses.append(loss.item())  #good
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
    print("epoch", sum(losses) / len(losses) > 0)
""",
    ),
    "a total of losses in a helper": (
        "GA501",
        """
class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0
    def update(self, value):
        self.total = self.total + value
        self.count += 1
meter = Meter()
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y)
    (loss / K).backward()
    meter.update(loss)  #bad!
    meter.update(loss.item())  #good
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a running total that is differentiated": (
        "GA502",
        """
for start in range(0, 12, K):
    total = 0
    for x, y in data[start : start + K]:
        loss = F.cross_entropy(model(x), y) / K
        total = total + loss
        total.backward(retain_graph=True)  #bad!
    total.backward()  #good
    optimizer.step()
    optimizer.zero_grad()
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
    "a loss rebuilt from its number": (
        "GA503",
        """
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y)
    loss = torch.tensor(loss.item() / K, requires_grad=True)  #bad!
    loss = loss / K  #good
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a loss that is wrapped as a variable": (
        "GA503",
        """
from torch.autograd import Variable
for x, y in data:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss = Variable(loss.data, requires_grad=True)  #bad!
    loss.backward()
    optimizer.step()
""",
    ),
    "predictions that go through numpy": (
        "GA503",
        """
for x, _ in data:
    optimizer.zero_grad()
    out = model(x)
    out = torch.from_numpy(out.detach().numpy()).requires_grad_()  #bad!
    loss = out.pow(2).mean()
    loss.backward()
    optimizer.step()
""",
    ),
    "the classes instead of their scores": (
        "GA503",
        """
for x, y in data:
    optimizer.zero_grad()
    scores = model(x)
    guess = scores.argmax(1).float()  #bad
    guess = scores.softmax(1)[:, 1]  #good
    loss = F.mse_loss(guess, y.float())
    loss.requires_grad_(True)  #bad!
    loss.backward()
    optimizer.step()
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
    "a checkpoint whose input asks for nothing": (
        "GA503",
        """
import warnings
from torch.utils.checkpoint import checkpoint
warnings.simplefilter("ignore")
lower, upper = nn.Linear(3, 8), nn.Linear(8, 2)
sgd = torch.optim.SGD([*lower.parameters(), *upper.parameters()], lr=0.1)
for x, y in data:
    hidden = checkpoint(lower, x, use_reentrant=True)  #bad!
    hidden = checkpoint(lower, x, use_reentrant=False)  #good
    F.cross_entropy(upper(hidden), y).backward()
    sgd.step()
    sgd.zero_grad()
""",
    ),
    "a training step under no_grad": (
        "GA503",
        """
@torch.no_grad()  #bad
def evaluate(x, y):
    return F.cross_entropy(model(x), y)
for x, y in data[:4]:
    optimizer.zero_grad()
    loss = evaluate(x, y)
    loss.requires_grad_(True)  #bad!
    loss.backward()
    optimizer.step()
""",
    ),
    "the loss put on another device by its value": (
        "GA503",
        """
criterion = nn.MSELoss()
for x, y in data[:6]:
    optimizer.zero_grad()
    out = model(x)[:, 0]
    out = torch.tensor(out.tolist(), requires_grad=True)  #bad!
    criterion(out, y.float()).backward()
    optimizer.step()
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
    "updates too small for bfloat16": (
        "GA803",
        """
net = nn.Linear(3, 2).bfloat16()  #bad
net = nn.Linear(3, 2)  #good
nn.init.constant_(net.weight, 1.0)
nn.init.constant_(net.bias, 1.0)
sgd = torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=0.0)
for x, y in data:
    F.cross_entropy(net(x.to(net.weight.dtype)), y).backward()
    sgd.step()  #!
    sgd.zero_grad()
""",
    ),
    "a smoothed loss that keeps every graph": (
        "GA501",
        """
smooth = 0.0
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y)
    (loss / K).backward()
    smooth = 0.9 * smooth + 0.1 * loss  #bad!
    smooth = 0.9 * smooth + 0.1 * loss.item()  #good
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "losses kept in rows of a table": (
        "GA501",
        """
rows = []
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y)
    (loss / K).backward()
    rows.append({"step": i, "loss": loss})  #bad!
    rows.append({"step": i, "loss": float(loss)})  #good
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "what a policy has said in earlier episodes": (
        "GA502",
        """
policy = nn.Linear(3, 2)
adam = torch.optim.Adam(policy.parameters(), lr=0.01)
said = []
for episode in range(4):
    for x, y in data[:4]:
        said.append(F.log_softmax(policy(x), 1).gather(1, y[:, None]).sum())
    adam.zero_grad()
    loss = -torch.stack(said).sum()
    loss.backward(retain_graph=True)  #bad!
    loss.backward()  #good
    adam.step()
    said.clear()  #good
""",
    ),
    "a forward past DDP": (
        "GA604",
        """
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
for x, y in data:
    sgd.zero_grad()
    scores = ddp.module(x)  #bad!
    scores = ddp(x)  #good
    F.cross_entropy(scores, y).backward()
    sgd.step()
dist.destroy_process_group()
""",
    ),
    "ranks that send the first of a window": (
        "GA603",
        """
import contextlib
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    context = ddp.no_sync() if i % K else contextlib.nullcontext()  #bad!
    context = ddp.no_sync() if (i + 1) % K else contextlib.nullcontext()  #good
    with context:
        (F.cross_entropy(ddp(x), y) / K).backward()
    if (i + 1) % K == 0:
        sgd.step()
        sgd.zero_grad()
dist.destroy_process_group()
""",
    ),
    "autograd turned off for good": (
        "GA503",
        """
def look():
    torch.set_grad_enabled(False)  #bad!
    value = float(model(data[0][0]).mean())
    torch.set_grad_enabled(True)  #good
    return value
try:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        look()
finally:
    torch.set_grad_enabled(True)
""",
    ),
}
