"""Right loops: methods that need several backwards, optimizers, closures or updates by hand."""

from loops import DATA

HEAD = DATA

LOOPS = {
    "gan, zeroed at the top": """
maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
makers = torch.optim.Adam(maker.parameters())
judges = torch.optim.Adam(judge.parameters())
bce = nn.BCEWithLogitsLoss()
for x, _ in data:
    fake = maker(torch.randn(4, 2))
    judges.zero_grad()
    bce(judge(x), torch.ones(4, 1)).backward()
    bce(judge(fake.detach()), torch.zeros(4, 1)).backward()
    judges.step()
    makers.zero_grad()
    bce(judge(fake), torch.ones(4, 1)).backward()
    makers.step()
""",
    "critic with a penalty": """
maker, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
makers = torch.optim.Adam(maker.parameters())
critics = torch.optim.Adam(critic.parameters())
for i, (x, _) in enumerate(data):
    critics.zero_grad()
    fake = maker(torch.randn(4, 2)).detach()
    mixed = (0.5 * x + 0.5 * fake).requires_grad_()
    [slope] = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).pow(2).mean()
    (critic(fake).mean() - critic(x).mean() + 10 * penalty).backward()
    critics.step()
    if i % 2 == 1:
        makers.zero_grad()
        (-critic(maker(torch.randn(4, 2))).mean()).backward()
        makers.step()
""",
    "two optimizers, one loss": """
body, head = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        body.step()
        head.step()
        body.zero_grad()
        head.zero_grad()
""",
    "sharpness aware": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    F.cross_entropy(model(x), y).backward()
    moved = []
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            by = 0.05 * p.grad / norm
            p.add_(by)
            moved.append(by)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, by in zip(model.parameters(), moved):
            p.sub_(by)
    optimizer.step()
    optimizer.zero_grad()
""",
    "lbfgs": """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
x, y = data[0]

def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss

for _ in range(3):
    optimizer.step(closure)
""",
    "a closure that accumulates": """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

def closure():
    optimizer.zero_grad()
    total = 0.0
    for x, y in data:
        loss = F.cross_entropy(model(x), y) / len(data)
        loss.backward()
        total += loss.item()
    return torch.tensor(total)

for _ in range(2):
    optimizer.step(closure)
""",
    "episodes": """
optimizer = torch.optim.Adam(model.parameters())
for update in range(4):
    optimizer.zero_grad()
    for episode in range(1 + update % 3):
        x, _ = data[episode]
        chosen = torch.distributions.Categorical(logits=model(x))
        action = chosen.sample()
        (-(chosen.log_prob(action) * torch.randn(4)).sum()).backward()
    optimizer.step()
""",
    "learned step by step": """
cell, head = nn.RNNCell(3, 4), nn.Linear(4, 2)
optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
hidden = torch.zeros(4, 4)
for x, y in data:
    hidden = cell(x, hidden.detach())
    optimizer.zero_grad()
    F.cross_entropy(head(hidden), y).backward()
    optimizer.step()
""",
    "learned to learn": """
optimizer = torch.optim.Adam(model.parameters())
for start in range(0, 8, 2):
    optimizer.zero_grad()
    for x, y in data[start : start + 2]:
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes)}
        (F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y) / 2).backward()
    optimizer.step()
""",
    "one optimizer every other update": """
fast = torch.optim.SGD(model[0].parameters(), lr=0.1)
slow = torch.optim.SGD(model[2].parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    F.cross_entropy(model(x), y).backward()
    fast.step()
    fast.zero_grad()
    if i % 2 == 1:
        slow.step()
        slow.zero_grad()
""",
    "a policy improved in passes": """
optimizer = torch.optim.Adam(model.parameters())
for x, y in data[:4]:
    with torch.no_grad():
        old = model(x).log_softmax(1)[torch.arange(4), y]
    for _ in range(3):
        new = model(x).log_softmax(1)[torch.arange(4), y]
        ratio = (new - old).exp()
        loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
""",
    "taught by another": """
teacher = copy.deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    with torch.no_grad():
        wanted = teacher(x).softmax(1)
    out = model(x)
    loss = 0.5 * F.cross_entropy(out, y)
    loss = loss + 0.5 * F.kl_div(out.log_softmax(1), wanted, reduction="batchmean")
    (loss / 4).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a critic with a penalty, in three passes": """
maker, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
makers, critics = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
for i, (x, _) in enumerate(data):
    fake = maker(torch.randn(4, 2)).detach()
    critics.zero_grad()
    (-critic(x).mean()).backward()
    critic(fake).mean().backward()
    mixed = x.lerp(fake, torch.rand(4, 1)).requires_grad_()
    [slope] = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    (10 * (slope.norm(dim=1) - 1).pow(2).mean()).backward()
    critics.step()
    if i % 2:
        for p in critic.parameters():
            p.requires_grad_(False)
        makers.zero_grad()
        (-critic(maker(torch.randn(4, 2))).mean()).backward()
        makers.step()
        for p in critic.parameters():
            p.requires_grad_(True)
""",
    "a penalty now and then, on the data": """
critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(critic.parameters())
for i, (x, _) in enumerate(data):
    optimizer.zero_grad()
    F.softplus(-critic(x)).mean().backward()
    optimizer.step()
    if i % 4 == 0:
        optimizer.zero_grad()
        real = x.clone().requires_grad_()
        [slope] = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
        (10.0 / 2 * slope.pow(2).sum(1).mean() * 4).backward()
        optimizer.step()
""",
    "a policy and its value, in epochs of minibatches": """
value = nn.Linear(3, 1)
both = [*model.parameters(), *value.parameters()]
optimizer = torch.optim.Adam(both, lr=1e-3)
for turn in range(2):
    seen = torch.randn(16, 3)
    with torch.no_grad():
        acts = torch.distributions.Categorical(logits=model(seen))
        taken = acts.sample()
        old, gain = acts.log_prob(taken), torch.randn(16)
    for epoch in range(3):
        for part in torch.randperm(16).split(6):
            now = torch.distributions.Categorical(logits=model(seen[part]))
            ratio = (now.log_prob(taken[part]) - old[part]).exp()
            first = ratio * gain[part]
            second = ratio.clamp(0.8, 1.2) * gain[part]
            loss = -torch.min(first, second).mean()
            loss = loss + 0.5 * F.mse_loss(value(seen[part]).squeeze(-1), gain[part])
            loss = loss - 0.01 * now.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(both, 0.5)
            optimizer.step()
        if (ratio.mean() - 1).abs() > 0.5:
            break
""",
    "an actor, a critic and a soft target": """
actor, critic = nn.Linear(3, 1), nn.Linear(4, 1)
target = copy.deepcopy(critic).requires_grad_(False)
actors, critics = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
for x, _ in data:
    with torch.no_grad():
        wanted = torch.randn(4, 1) + 0.99 * target(torch.cat([x, actor(x)], 1))
    critics.zero_grad()
    F.mse_loss(critic(torch.cat([x, torch.randn(4, 1)], 1)), wanted).backward()
    critics.step()
    actors.zero_grad()
    (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()
    actors.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), critic.parameters()):
            slow.mul_(0.99).add_(0.01 * fast)
""",
    "tasks, adapted by hand": """
optimizer = torch.optim.Adam(model.parameters())
from torch.func import functional_call
for start in (0, 4):
    total = 0.0
    for x, y in data[start : start + 4]:
        fast = dict(model.named_parameters())
        for _ in range(2):
            inner = F.cross_entropy(functional_call(model, fast, x), y)
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes)}
        total = total + F.cross_entropy(functional_call(model, fast, x), y)
    optimizer.zero_grad()
    (total / 4).backward()
    optimizer.step()
""",
    "meta-learning of the first order": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for start in (0, 4):
    optimizer.zero_grad()
    for x, y in data[start : start + 4]:
        copy_ = copy.deepcopy(model)
        inner = torch.optim.SGD(copy_.parameters(), lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            F.cross_entropy(copy_(x), y).backward()
            inner.step()
        inner.zero_grad()
        F.cross_entropy(copy_(x), y).backward()
        for p, q in zip(model.parameters(), copy_.parameters()):
            p.grad = q.grad / 4 if p.grad is None else p.grad + q.grad / 4
    optimizer.step()
""",
    "steps towards the tasks": """
for x, y in data:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        inner.zero_grad()
        F.cross_entropy(model(x), y).backward()
        inner.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name] + 0.5 * (p - before[name]))
""",
    "sharpness aware, in a class": """
class Sharp(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **more):
        super().__init__(params, dict(rho=rho, **more))
        self.base = base(self.param_groups, **more)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

optimizer = Sharp(model.parameters(), torch.optim.SGD, lr=0.1)
for x, y in data:
    F.cross_entropy(model(x), y).backward()
    optimizer.first_step()
    F.cross_entropy(model(x), y).backward()
    optimizer.second_step()
""",
    "a teacher that follows, and windows": """
optimizer = torch.optim.AdamW(model.parameters())
teacher = copy.deepcopy(model).eval().requires_grad_(False)
for i, (x, y) in enumerate(data):
    with torch.no_grad():
        soft = teacher(x).softmax(-1)
    out = model(x + 0.1 * torch.randn_like(x))
    ((F.cross_entropy(out, y) + 0.5 * F.mse_loss(out.softmax(-1), soft)) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters()):
                slow.lerp_(fast, 0.01)
""",
    "two optimizers, one now and then": """
body, head = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())
for i, (x, y) in enumerate(data):
    F.cross_entropy(model(x), y).backward()
    head.step()
    head.zero_grad()
    if i % 2 == 0:
        body.step()
    body.zero_grad()
""",
    "lbfgs over micro-batches": """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

def closure():
    optimizer.zero_grad()
    total = 0.0
    for x, y in data[:4]:
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        total += loss.item()
    return total

for _ in range(3):
    optimizer.step(closure)
""",
    "weights learned for the tasks": """
spread = nn.Parameter(torch.zeros(2))
optimizer = torch.optim.Adam([*model.parameters(), spread])
for x, y in data:
    out = model(x)
    losses = torch.stack([F.cross_entropy(out, y), out.pow(2).mean()])
    loss = ((-spread).exp() * losses + spread).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a style found by steps on an image": """
image = torch.rand(1, 3, 8, 8, requires_grad=True)
layers = nn.Conv2d(3, 4, 3).requires_grad_(False)
wanted = layers(torch.rand(1, 3, 8, 8))
optimizer = torch.optim.Adam([image])
for _ in range(5):
    optimizer.zero_grad()
    loss = F.mse_loss(layers(image), wanted) + 1e-2 * image.diff(dim=-1).abs().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        image.clamp_(0, 1)
""",
    "an attack inside training": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    shift = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        loss = F.cross_entropy(model(x + shift), y)
        [slope] = torch.autograd.grad(loss, shift)
        shift = (shift + 0.01 * slope.sign()).clamp(-0.1, 0.1).detach().requires_grad_()
    optimizer.zero_grad()
    F.cross_entropy(model(x + shift.detach()), y).backward()
    optimizer.step()
""",
    "an inner problem on kept features": """
body, head = nn.Linear(3, 8), nn.Linear(8, 2)
outer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
for x, y in data:
    features = body(x)
    noise = torch.zeros_like(features).requires_grad_()
    inner = torch.optim.SGD([noise], lr=0.1)
    for _ in range(3):
        inner.zero_grad()
        F.cross_entropy(head(features + noise), y).backward(retain_graph=True)
        inner.step()
    outer.zero_grad()
    F.cross_entropy(head(features + noise.detach()), y).backward()
    outer.step()
""",
    "momentum by hand, in the gradient": """
w = torch.zeros(3, requires_grad=True)
for x, y in data:
    if w.grad is not None:
        w.grad.mul_(0.9)
    (x @ w - y).pow(2).mean().backward()
    with torch.no_grad():
        w -= 0.01 * w.grad
""",
}
