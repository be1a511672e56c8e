"""Pairs of loops: what goes with the updates: schedules, scalers' skips, averages."""

PAIRS = {
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
    "an averaged model of torch's own, moved in every micro-batch": (
        "GA317",
        """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)  #good
    average.update_parameters(model)  #bad!
""",
    ),
    "a shadow in a table, moved in every micro-batch": (
        "GA317",
        """
class Shadow:
    def __init__(self, decay):
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
    def follow(self):
        for name, p in model.named_parameters():
            old = self.values[name]
            self.values[name] = self.decay * old + (1 - self.decay) * p.detach()
shadow = Shadow(0.9)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
        shadow.follow()  #good
    shadow.follow()  #bad!
""",
    ),
    "a cosine as long as the epochs, stepped for each batch": (
        "GA312",
        """
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)  #!
for epoch in range(3):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()  #bad
    schedule.step()  #good
""",
    ),
}
