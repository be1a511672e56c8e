"""Pairs of loops: parameters that the optimizer and the losses do not share."""

PAIRS = {
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
    "values that are loaded by putting others in their place": (
        "GA306",
        """
stored = copy.deepcopy(model.state_dict())
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
net.load_state_dict(stored, assign=True)  #good
adam = torch.optim.AdamW(net.parameters(), lr=0.01)
net.load_state_dict(stored, assign=True)  #bad!
for i, (x, y) in enumerate(data):
    (F.cross_entropy(net(x), y) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        adam.zero_grad()
""",
    ),
    "a norm of the weights that is set up after the optimizer": (
        "GA306",
        """
from torch.nn.utils.parametrizations import weight_norm
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
weight_norm(net[0])  #good
adam = torch.optim.AdamW(net.parameters(), lr=0.01)
weight_norm(net[0])  #bad!
for i, (x, y) in enumerate(data):
    (F.cross_entropy(net(x), y) / K).backward()
    if (i + 1) % K == 0:
        adam.step()
        adam.zero_grad()
""",
    ),
}
