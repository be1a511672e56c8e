"""Pairs of loops: clips and scalers."""

PAIRS = {
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
    "a clip of two optimizers' gradients, of which one is unscaled": (
        "GA402",
        """
reader, writer = nn.Linear(3, 8), nn.Linear(8, 2)
first = torch.optim.SGD(reader.parameters(), lr=0.1)
second = torch.optim.SGD(writer.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for i, (x, y) in enumerate(data):
    scaler.scale(F.cross_entropy(writer(reader(x)), y) / K).backward()
    if (i + 1) % K == 0:
        scaler.unscale_(first)
        scaler.unscale_(second)  #good
        nn.utils.clip_grad_norm_([*reader.parameters(), *writer.parameters()], 1.0)  #!
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        first.zero_grad()
        second.zero_grad()
""",
    ),
}
