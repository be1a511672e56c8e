"""Pairs of loops in the style of public reports: a wrong one, and a right one as close as can be.

A line that ends in `#bad` is the wrong one's only, one in `#good` the right one's; `!` after
either, or `#!` on a line of both, marks the line to be found in the wrong one.
"""

HEAD = """\
import copy
import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
K = 4
data = [(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in range(12)]
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""

PAIRS = {
    "a micro-step loop that draws its batches": (
        "GA201",
        """
pool = iter(itertools.cycle(data))
def get_batch():
    return next(pool)
for it in range(4):
    for micro_step in range(K):
        x, y = get_batch()
        loss = F.cross_entropy(model(x), y)
        loss = loss / K  #good
        loss.backward()  #!
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
""",
    ),
    "cleared with each micro-batch": (
        "GA102",
        """
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()  #bad!
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()  #good
""",
    ),
    "an embedding made larger after the optimizer was made": (
        "GA306",
        """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 8), nn.Linear(8, 2)
    def forward(self, ids):
        return self.out(self.embed(ids).mean(1))
def grow(model, size):
    old = model.embed
    model.embed = nn.Embedding(size, 8)  #!
    with torch.no_grad():
        model.embed.weight[:10] = old.weight
tagger = Tagger()
grow(tagger, 12)  #good
adam = torch.optim.AdamW(tagger.parameters(), lr=0.01)
grow(tagger, 12)  #bad
for i in range(12):
    ids = torch.randint(0, 12, (4, 5))
    (F.cross_entropy(tagger(ids), torch.randint(0, 2, (4,))) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        tagger.zero_grad()
""",
    ),
    "a generator's loss stays in the critic": (
        "GA104",
        """
maker, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
opt_g = torch.optim.Adam(maker.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3)
bce = nn.BCEWithLogitsLoss()
for x, _ in data:
    real, fake = torch.ones(4, 1), torch.zeros(4, 1)
    made = maker(torch.randn(4, 2))
    opt_g.zero_grad()
    bce(critic(made), real).backward()
    opt_g.step()
    opt_d.zero_grad()  #good
    loss_d = (bce(critic(x), real) + bce(critic(made.detach()), fake)) / 2
    loss_d.backward()
    opt_d.step()  #!
    opt_d.zero_grad()  #bad
""",
    ),
    "one batch is not finite and is never cleared": (
        "GA104",
        """
for i, (x, y) in enumerate(data):
    if i == 5:
        x = x * float("nan")
    (F.cross_entropy(model(x), y) / 2).backward()
    if (i + 1) % 2 == 0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
            optimizer.zero_grad()  #bad!
        optimizer.zero_grad()  #good
""",
    ),
    "the test for the step is upside down": (
        "GA303",
        """
for batches_done, (x, y) in enumerate(data, 1):
    (F.cross_entropy(model(x), y) / K).backward()
    if batches_done % K:  #bad!
    if batches_done % K == 0:  #good
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "means over tokens, where padding is ignored": (
        "GA203",
        """
vocabulary, length = 7, 6
lm = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))
adam = torch.optim.AdamW(lm.parameters(), lr=0.01)
batches = []
for n in (2, 6, 3, 5, 1, 6, 4, 2):
    labels = torch.randint(0, vocabulary, (2, length))
    labels[:, n:] = -100
    batches.append((torch.randint(0, vocabulary, (2, length)), labels))
for start in range(0, 8, K):
    window = batches[start : start + K]
    total = sum((labels != -100).sum() for _, labels in window)
    for ids, labels in window:
        logits = lm(ids).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100) / K  #bad!
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / total  #good
        loss.backward()
    adam.step()
    adam.zero_grad()
""",
    ),
    "what an epoch leaves over is divided by all": (
        "GA204",
        """
for epoch in range(2):
    batches = data[:10]
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        loss = loss / K  #bad
        loss = loss / min(K, len(batches) - step // K * K)  #good
        loss.backward()
        if (step + 1) % K == 0 or step == len(batches) - 1:
            optimizer.step()  #!
            optimizer.zero_grad()
""",
    ),
    "a cosine as long as all micro-batches": (
        "GA312",
        """
epochs = 3
total = epochs * len(data)  #bad
total = epochs * math.ceil(len(data) / K)  #good
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)  #!
for epoch in range(epochs):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
""",
    ),
    "a line down to zero that counts micro-batches": (
        "GA312",
        """
epochs = 2
steps = len(data) * epochs  #bad
steps = len(data) // K * epochs  #good
warm = max(1, steps // 10)
def rate(step):
    if step < warm:
        return step / warm
    return max(0.0, (steps - step) / (steps - warm))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)  #!
for epoch in range(epochs):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
""",
    ),
    "a linear schedule that counts micro-batches": (
        "GA312",
        """
epochs = 2
planned = len(data) * epochs  #bad
planned = len(data) * epochs // K  #good
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=planned)  #!
for epoch in range(epochs):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
""",
    ),
    "a scheduler that steps with each micro-batch": (
        "GA305",
        """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        scheduler.step()  #good
        optimizer.zero_grad()
    scheduler.step()  #bad!
""",
    ),
    "a clip that sees scaled gradients": (
        "GA402",
        """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i, (x, y) in enumerate(data):
    scaler.scale(F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        scaler.unscale_(optimizer)  #good
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #!
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "a scaler that is updated with each micro-batch": (
        "GA404",
        """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i, (x, y) in enumerate(data):
    scaler.scale(F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()  #good
    scaler.update()  #bad!
""",
    ),
    "an optimizer that steps on scaled gradients": (
        "GA406",
        """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i, (x, y) in enumerate(data):
    scaler.scale(F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()  #bad!
        scaler.step(optimizer)  #good
        scaler.update()  #good
        optimizer.zero_grad()
""",
    ),
    "a step with each micro-batch, cleared once a window": (
        "GA316",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    optimizer.step()  #bad!
    if (i + 1) % K == 0:
        optimizer.step()  #good
        optimizer.zero_grad()
""",
    ),
    "a scaler that steps with each micro-batch": (
        "GA316",
        """
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for i, (x, y) in enumerate(data):
    scaler.scale(F.cross_entropy(model(x), y) / K).backward()
    scaler.step(optimizer)  #bad!
    scaler.update()  #bad
    if i % K == K - 1:
        scaler.step(optimizer)  #good
        scaler.update()  #good
        optimizer.zero_grad()
""",
    ),
    "a closure that does not clear": (
        "GA101",
        """
search = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
for x, y in data[:4]:
    def closure():
        search.zero_grad()  #good
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    search.step(closure)  #!
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
    "cleared between backward and step": (
        "GA103",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.zero_grad()  #bad!
        optimizer.step()
        optimizer.zero_grad()  #good
""",
    ),
    "cleared once an epoch while each batch steps": (
        "GA101",
        """
for epoch in range(2):
    optimizer.zero_grad()
    for x, y in data:
        optimizer.zero_grad()  #good
        F.cross_entropy(model(x), y).backward()
        optimizer.step()  #!
""",
    ),
    "a clearing that is not called": (
        "GA101",
        """
for x, y in data:
    optimizer.zero_grad  #bad
    optimizer.zero_grad()  #good
    F.cross_entropy(model(x), y).backward()
    optimizer.step()  #!
""",
    ),
    "a step that is not called": (
        "GA309",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step  #bad!
        optimizer.step()  #good
        optimizer.zero_grad()
""",
    ),
    "what an epoch leaves over is thrown away": (
        "GA302",
        """
for epoch in range(3):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(data[:10]):
        last = i + 1 == 10
        size = 2 if i >= 8 else K
        (F.cross_entropy(model(x), y) / size).backward()
        if (i + 1) % K == 0:  #bad!
        if (i + 1) % K == 0 or last:  #good
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
}
