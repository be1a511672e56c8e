"""Pairs of loops: windows that are broken off, and states that are lost."""

PAIRS = {
    "a remainder taken before the sum": (
        "GA303",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if i + 1 % K == 0 or i + 1 == len(data):  #bad!
    if (i + 1) % K == 0 or i + 1 == len(data):  #good
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "weights clamped into nothing": (
        "GA306",
        """
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for p in model.parameters():
        p.data.clamp(-0.5, 0.5)  #bad!
        p.data.clamp_(-0.5, 0.5)  #good
""",
    ),
    "a check that clears an open window": (
        "GA103",
        """
def check():
    model.zero_grad(set_to_none=True)  #bad!
    with torch.no_grad():
        return F.cross_entropy(model(data[0][0]), data[0][1]).item()
for i, (x, y) in enumerate(data, 1):
    (F.cross_entropy(model(x), y) / K).backward()
    if i % K == 0:
        optimizer.step()
        optimizer.zero_grad()
    if i % 6 == 0:
        check()
""",
    ),
    "a clearing where a window goes on": (
        "GA302",
        """
done = 0
for epoch in range(2):
    optimizer.zero_grad()  #bad!
    for x, y in data[:6]:
        (F.cross_entropy(model(x), y) / K).backward()
        done += 1
        if done % K == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    "a schedule moved by two lines": (
        "GA312",
        """
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
def train():
    for x, y in data[:3]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    schedule.step()
for epoch in range(4):
    train()
    schedule.step()  #bad!
""",
    ),
    "a state loaded into an optimizer that is made again": (
        "GA304",
        """
class Held:
    def take(self, params):
        self.inner = torch.optim.Adam(params, lr=0.01)
def build(net, state=None):
    held = Held()
    held.take(net.parameters())
    if state is not None:
        held.inner.load_state_dict(state)
        held.inner = torch.optim.Adam(net.parameters(), lr=0.01)  #bad!
    return held
first = build(model)
def train(held):
    for x, y in data[:4]:
        held.inner.zero_grad()
        F.cross_entropy(model(x), y).backward()
        held.inner.step()
train(first)
train(build(model, copy.deepcopy(first.inner.state_dict())))
""",
    ),
    "a norm and a factor over one generator": (
        "GA407",
        """
def limit(parameters, most):
    parameters = list(parameters)  #good
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for p in parameters:  #!
        p.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    limit(model.parameters(), 0.1)
    optimizer.step()
""",
    ),
    "a pruned layer, and a model that clears its own": (
        "GA306",
        """
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    if i == 6:
        net[0].bias = nn.Parameter(net[0].bias.detach() * 0.5)  #bad!
        net[0].bias.data.mul_(0.5)  #good
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()
    sgd.step()
""",
    ),
    "a whole loss undivided that leaks as well": (
        "GA302",
        """
for epoch in range(3):
    for i, (x, y) in enumerate(data[:10]):
        F.cross_entropy(model(x), y).div(1.0).mul(0.25).backward()
        if (i + 1) % 4 == 0:  #bad!
        if (i + 1) % 5 == 0:  #good
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    "a check with gradients in evaluation": (
        "GA104",
        """
net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2))
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
def run(rows, step):
    for x, y in rows:
        loss = F.cross_entropy(net(x), y)
        loss.backward()  #bad!
        if step:
            loss.backward()  #good
            sgd.step()
            sgd.zero_grad()
for epoch in range(3):
    net.train()
    run(data[:4], True)
    net.eval()
    run(data[4:6], False)
""",
    ),
}
