"""More right loops: coefficients that are no divisions, and the methods that people train with."""

COEFFICIENTS = {
    "two coefficients, divided once": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    out = model(x)
    loss = F.cross_entropy(out, y) + 0.01 * out.pow(2).mean()
    (loss / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "each term divided, one with a coefficient": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    out = model(x)
    (0.01 * out.pow(2).mean() / 4 + F.cross_entropy(out, y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "smoothed labels by hand": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    logs = model(x).log_softmax(-1)
    loss = 0.9 * F.nll_loss(logs, y) + 0.1 * -logs.mean(-1).mean()
    (loss / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "weights of tasks": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    out = model(x)
    parts = {"kind": F.cross_entropy(out, y), "size": out.abs().mean(), "flat": out.var()}
    weights = {"kind": 0.1, "size": 0.5, "flat": 2.0}
    loss = sum(weights[name] * part for name, part in parts.items())
    if torch.isfinite(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "a bonus for entropy": """
optimizer = torch.optim.Adam(model.parameters())
for x, y in data:
    chances = torch.distributions.Categorical(logits=model(x))
    loss = -(chances.log_prob(y) * torch.randn(4)).mean() - 0.01 * chances.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "an autoencoder with a weight for its prior": """
maker = nn.Linear(2, 3)
both = [*model.parameters(), *maker.parameters()]
optimizer = torch.optim.Adam(both)
for i, (x, _) in enumerate(data):
    mean, spread = model(x).chunk(2, -1)
    code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
    back = maker(torch.cat([code, code], -1))
    prior = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).mean()
    ((F.mse_loss(back, x) + 0.25 * prior) / 2).backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a factor that grows": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data * 3):
    factor = min(1.0, (i // 4 + 1) / 4)
    (factor * F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "half a square, and a condition": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, _ in data:
    loss = 0.5 * model(x).pow(2).mean()
    loss.backward()
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        optimizer.step()
    optimizer.zero_grad()
""",
    "one tenth of a loss, four passes": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    for noise in torch.randn(4, 4, 3):
        (0.1 * F.cross_entropy(model(x + noise), y)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a quarter of a loss, four passes": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    for noise in torch.randn(4, 4, 3):
        out = model(x + noise)
        (0.25 * F.cross_entropy(out, y) + 0.25 * out.pow(2).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "the mean of heads": """
heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))
optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
for x, y in data:
    loss = sum(F.cross_entropy(head(x), y) for head in heads) / len(heads)
    if loss.isfinite():
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "as many heads as micro-batches": """
heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))
optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    loss = (F.cross_entropy(heads[0](x), y) + F.cross_entropy(heads[1](x), y)) / 2
    (loss / 2).backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
""",
    "the mean of heads, and windows of another length": """
heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))
optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    loss = sum(F.cross_entropy(head(x), y) for head in heads) / 3 / 4
    loss.backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a temperature": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
teacher = copy.deepcopy(model).requires_grad_(False)
for x, y in data:
    mine, its = (model(x) / 2).log_softmax(-1), (teacher(x) / 2).softmax(-1)
    soft = F.kl_div(mine, its, reduction="batchmean")
    loss = 0.5 * F.cross_entropy(model(x), y) + 0.5 * 4 * soft
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a reward divided by ten": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 10).backward()
    if i % 2 == 1 or i == len(data) - 1:
        optimizer.step()
        optimizer.zero_grad()
    elif i > 100:
        break
""",
}

METHODS = {
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
    "clipped by hand": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        factor = (0.1 / (norm + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
""",
    "clipped as the gradients are": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
past = []
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    past.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
    bound = sorted(past)[len(past) // 2]
    nn.utils.clip_grad_norm_(model.parameters(), bound)
    optimizer.step()
""",
    "layers recomputed, in windows": """
from torch.utils.checkpoint import checkpoint
deep = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Tanh()) for _ in range(3))
last = nn.Linear(3, 2)
optimizer = torch.optim.AdamW([*deep.parameters(), *last.parameters()])
for i, (x, y) in enumerate(data):
    for layer in deep:
        x = checkpoint(layer, x, use_reentrant=False)
    (F.cross_entropy(last(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "no dropout, so no state to keep": """
from torch.utils.checkpoint import checkpoint
optimizer = torch.optim.AdamW(model.parameters())
for x, y in data:
    optimizer.zero_grad()
    out = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
    F.cross_entropy(out, y).backward()
    optimizer.step()
""",
    "narrow forwards": """
optimizer = torch.optim.AdamW(model.parameters())
for i, (x, y) in enumerate(data):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
""",
    "longer windows as it goes": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter(data * 4)
for every in (1, 2, 4, 8):
    for _ in range(2):
        for _ in range(every):
            x, y = next(batches)
            (F.cross_entropy(model(x), y) / every).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "easy samples first": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    share = (epoch + 2) / 4
    for x, y in data:
        losses = F.cross_entropy(model(x), y, reduction="none")
        kept = losses.topk(max(1, int(share * len(losses))), largest=False).values
        optimizer.zero_grad()
        kept.mean().backward()
        optimizer.step()
""",
    "tasks in turn": """
heads = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
optimizer = torch.optim.Adam([*model.parameters(), *heads.parameters()])
for x, y in data:
    optimizer.zero_grad()
    for name, weight in (("a", 1.0), ("b", 0.3)):
        (weight * F.cross_entropy(heads[name](model(x)), y)).backward()
    optimizer.step()
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
    "pairs, one batch an update": """
other = copy.deepcopy(model)
optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])
for x, _ in data:
    a, b = F.normalize(model(x), dim=-1), F.normalize(other(x + 0.1), dim=-1)
    sim = a @ b.T / 0.1
    loss = (F.cross_entropy(sim, torch.arange(4)) + F.cross_entropy(sim.T, torch.arange(4))) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a frozen body, then thawed": """
for p in model[0].parameters():
    p.requires_grad_(False)
optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()))
for epoch in range(2):
    if epoch == 1:
        for p in model[0].parameters():
            p.requires_grad_(True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "a low-rank side path": """
left, right = nn.Parameter(torch.randn(3, 2) * 0.1), nn.Parameter(torch.zeros(2, 2))
model.requires_grad_(False)
optimizer = torch.optim.AdamW([left, right])
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x) + x @ left @ right, y) / 2).backward()
    if i % 2:
        nn.utils.clip_grad_norm_([left, right], 1.0)
        optimizer.step()
        optimizer.zero_grad()
""",
    "a last short batch": """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(18, 3), torch.randint(0, 2, (18,))), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "a last short batch, weighed by its samples": """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(18, 3), torch.randint(0, 2, (18,))), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    batches = list(loader)
    for start in range(0, len(batches), 2):
        window = batches[start : start + 2]
        total = sum(len(y) for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x), y) * len(y) / total).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "sums over all that count": """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(18, 3), torch.randint(0, 2, (18,))), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = 0
for i, (x, y) in enumerate(loader):
    F.cross_entropy(model(x), y, reduction="sum").backward()
    count += len(y)
    if (i + 1) % 2 == 0 or i + 1 == len(loader):
        for p in model.parameters():
            p.grad /= count
        optimizer.step()
        optimizer.zero_grad()
        count = 0
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
    "through time, cut": """
cell = nn.GRUCell(3, 4)
out = nn.Linear(4, 2)
optimizer = torch.optim.SGD([*cell.parameters(), *out.parameters()], lr=0.1)
state, loss = torch.zeros(4, 4), 0.0
for i, (x, y) in enumerate(data):
    state = cell(x, state)
    loss = loss + F.cross_entropy(out(state), y) / 4
    if (i + 1) % 4 == 0:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimizer.step()
        state, loss = state.detach(), 0.0
""",
    "a rate of its own, by hand, without an optimizer": """
for x, y in data:
    loss = F.cross_entropy(model(x), y)
    for p, slope in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        with torch.no_grad():
            p -= 0.1 * slope
""",
}

VALUES = {
    "a sum of squares of complex gradients, by their size": """
weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
optimizer = torch.optim.SGD([weight], lr=0.1)
for x, _ in data:
    optimizer.zero_grad()
    (x.to(torch.complex64) @ weight).abs().mean().backward()
    norm = (weight.grad.abs() ** 2).sum().sqrt()
    if norm > 1:
        weight.grad /= norm
    optimizer.step()
""",
    "squares of real gradients beside complex ones": """
spectrum = nn.Parameter(torch.randn(2, dtype=torch.complex64))
optimizer = torch.optim.SGD([*model.parameters(), spectrum], lr=0.1)
for x, _ in data:
    optimizer.zero_grad()
    (model(x).to(torch.complex64) @ spectrum).abs().mean().backward()
    norm = sum((p.grad ** 2).sum() for p in model.parameters()) ** 0.5
    optimizer.step()
""",
    "sparse gradients, not clipped": """
table = nn.Embedding(8, 2, sparse=True)
sparse = torch.optim.SparseAdam(table.parameters())
dense = torch.optim.Adam(model.parameters())
for x, y in data:
    sparse.zero_grad()
    dense.zero_grad()
    F.cross_entropy(model(x) + table(y), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    sparse.step()
    dense.step()
""",
    "a dropout that is off in a checkpoint": """
from torch.utils.checkpoint import checkpoint
block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
drop = nn.Dropout(0.5)
optimizer = torch.optim.Adam([*block.parameters(), *model.parameters()])
for x, y in data:
    optimizer.zero_grad()
    out = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    F.cross_entropy(drop(model(out)), y).backward()
    optimizer.step()
""",
    "sums over all values, divided by their number": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data):
    losses = F.cross_entropy(model(x), y, reduction="none")
    (losses.sum() / losses.numel() / 4).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    "sums over what counts, divided by all that count": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for start in (0, 4):
    part = [(x, y.masked_fill(x[:, 0] > 0, -1)) for x, y in data[start : start + 4]]
    total = sum(y[y >= 0].numel() for _, y in part)
    for x, y in part:
        loss = F.cross_entropy(model(x), y, ignore_index=-1, reduction="sum")
        (loss / total).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}

MORE = {**COEFFICIENTS, **METHODS, **VALUES}
