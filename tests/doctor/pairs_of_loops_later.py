"""Loops that were written after the rules, to see what they know; marked as `pairs_of_loops`."""

LATER = {
    "an average of weights moved in every micro-batch": (
        "GA317",
        """
ema = copy.deepcopy(model).requires_grad_(False)
def follow(decay=0.9):
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters()):
            e.mul_(decay).add_(p, alpha=1 - decay)  #!
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
        follow()  #good
    follow()  #bad
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
    "a vector that is differentiated as a sum": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = losses.mean() / K  #good
    loss = losses.mean()  #bad
    loss.backward(torch.ones_like(loss))  #!
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
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
    "a trainer class that never clears": (
        "GA101",
        """
class Trainer:
    def __init__(self, model, opt):
        self.model, self.opt, self.seen = model, opt, 0
    def update(self, x, y):
        loss = F.cross_entropy(self.model(x), y) / K
        loss.backward()
        self.seen += 1
        if self.seen % K == 0:
            self.opt.step()  #!
            self.opt.zero_grad()  #good
trainer = Trainer(model, optimizer)
for epoch in range(2):
    for x, y in data:
        trainer.update(x, y)
""",
    ),
    "a weighted mean over uneven masks": (
        "GA203",
        """
for start in range(0, 12, K):
    part = data[start : start + K]
    masks = [(torch.arange(4) <= (start + j) % 3).float() for j in range(K)]
    for m in masks:
        m[0] = 1.0
    total = sum(m.sum() for m in masks)
    for (x, y), m in zip(part, masks):
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = (losses * m).sum() / m.sum() / K  #bad!
        loss = (losses * m).sum() / total  #good
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "a regulariser that every micro-batch adds whole": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y) / K
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    loss = loss + 0.01 * penalty  #bad!
    loss = loss + 0.01 * penalty / K  #good
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a layer exchanged for another class count": (
        "GA306",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(3, 8), nn.Linear(8, 5)
    def forward(self, x):
        return self.fc(self.body(x).relu())
net = Net()
net.fc = nn.Linear(8, 2)  #good
adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
net.fc = nn.Linear(8, 2)  #bad!
for i, (x, y) in enumerate(data):
    (F.cross_entropy(net(x), y) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        adam.zero_grad()
""",
    ),
    "a polynomial schedule that counts batches": (
        "GA312",
        """
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=2 * len(data))  #bad!
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=2 * len(data) // K)  #good
for epoch in range(2):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
""",
    ),
    "a cosine of lambdas that counts batches": (
        "GA312",
        """
total = 3 * len(data)  #bad
total = 3 * len(data) // K  #good
cosine = lambda s: 0.5 * (1 + math.cos(math.pi * s / total))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)  #!
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
""",
    ),
    "two terms, neither divided": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    out = model(x)
    loss = F.cross_entropy(out, y) + 0.1 * out.pow(2).mean()
    loss = loss / K  #good
    loss.backward()  #!
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "one of two optimizers clears": (
        "GA101",
        """
encoder, decoder = nn.Linear(3, 8), nn.Linear(8, 2)
first = torch.optim.SGD(encoder.parameters(), lr=0.1)
second = torch.optim.SGD(decoder.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(decoder(encoder(x)), y) / K).backward()
    if (i + 1) % K == 0:
        first.step()
        second.step()  #!
        first.zero_grad()
        second.zero_grad()  #good
""",
    ),
    "a window that ends at the batch of an epoch's end": (
        "GA302",
        """
count = 0
for epoch in range(3):
    for b, (x, y) in enumerate(data[:7]):
        (F.cross_entropy(model(x), y) / (K if b < K else 3)).backward()
        count += 1
        if count == K:  #bad!
        if count == K or b == 6:  #good
            optimizer.step()
            optimizer.zero_grad()
            count = 0
    count = 0
    optimizer.zero_grad()
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
    "weights changed by hand through data in mid-window": (
        "GA307",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    model[0].weight.data.clamp_(-0.3, 0.3)  #bad!
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.data.clamp_(-0.3, 0.3)  #good
""",
    ),
    "decay by hand in each micro-batch": (
        "GA307",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    last = (i + 1) % K == 0
    if i >= 0:  #bad
    if last:  #good
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.999)  #!
    if last:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
}
