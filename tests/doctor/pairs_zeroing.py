"""Pairs of loops: when gradients are cleared, and who uses what was not."""

PAIRS = {
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
    "a sharpness-aware step that keeps its first gradient": (
        "GA104",
        """
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    F.cross_entropy(model(x), y).backward()
    size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    moves = [0.05 * p.grad / size for p in model.parameters()]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p.add_(move)
    sgd.zero_grad()  #good
    F.cross_entropy(model(x), y).backward()  #!
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p.sub_(move)
    sgd.step()
    sgd.zero_grad()
""",
    ),
    "an update by hand that clears nothing": (
        "GA101",
        """
w = torch.zeros(3, requires_grad=True)
for x, y in data:
    (x @ w - y).pow(2).mean().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad  #!
        w.grad = None  #good
""",
    ),
    "a helper that forgets the gradients before each micro-batch": (
        "GA102",
        """
def forget():
    for p in model.parameters():
        p.grad = None  #!
for i, (x, y) in enumerate(data):
    if i % 2 == 0:  #good
    if i >= 0:  #bad
        forget()
    (F.cross_entropy(model(x), y) / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
""",
    ),
    "gradients forgotten one by one before each micro-batch": (
        "GA102",
        """
for i, (x, y) in enumerate(data):
    for p in model.parameters():
        p.grad = None  #bad!
        p.grad = p.grad if i % 2 else None  #good
    (F.cross_entropy(model(x), y) / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
""",
    ),
}
