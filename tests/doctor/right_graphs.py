"""Right loops that look like graphs kept, terms cut off, and sums left standing."""

from loops import TRAINED as HEAD

__all__ = ["HEAD", "LOOPS"]

LOOPS = {
    "the last features only": """
last = None
for x, y in data:
    h = model[1](model[0](x))
    out = model[2](h)
    if last is not None:
        drift = (h - last).pow(2).mean().item()
    last = h
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "an episode's chances, kept until it ends": """
for episode in range(8):
    chances, gains = [], []
    for x, y in data[:4]:
        dist = torch.distributions.Categorical(logits=model(x))
        act = dist.sample()
        chances.append(dist.log_prob(act).mean())
        gains.append(torch.rand(()))
    loss = -sum(c * g for c, g in zip(chances, gains)) / len(chances)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a state detached between chunks": """
cell, out = nn.GRUCell(3, 4), nn.Linear(4, 2)
opt = torch.optim.SGD([*cell.parameters(), *out.parameters()], lr=0.1)
h = torch.zeros(4, 4)
for x, y in data:
    h = cell(x, h.detach())
    opt.zero_grad()
    F.cross_entropy(out(h), y).backward()
    opt.step()
""",
    "truncated over two chunks by hand": """
cell, out = nn.GRUCell(3, 4), nn.Linear(4, 2)
opt = torch.optim.SGD([*cell.parameters(), *out.parameters()], lr=0.1)
h = torch.zeros(4, 4)
for s in range(0, 12, 2):
    opt.zero_grad()
    total = 0
    for x, y in data[s : s + 2]:
        h = cell(x, h)
        total = total + F.cross_entropy(out(h), y)
    (total / 2).backward()
    opt.step()
    h = h.detach()
""",
    "a lazy penalty with its graph": """
critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
for i, (x, y) in enumerate(data):
    x = x.clone().requires_grad_(True)
    score = critic(x)
    loss = F.softplus(-score).mean()
    if i % 3 == 0:
        (g,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        loss = loss + 3 * 5.0 * g.pow(2).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "a weight made of two gradients": """
disc = nn.Linear(2, 1)
for x, y in data:
    out = model(x)
    rec = F.cross_entropy(out, y)
    adv = -disc(out).mean()
    last = model[2].weight
    a = torch.autograd.grad(rec, last, retain_graph=True)[0]
    b = torch.autograd.grad(adv, last, retain_graph=True)[0]
    weight = (a.norm() / (b.norm() + 1e-4)).clamp(0, 10).detach()
    loss = rec + weight * adv
    optimizer.zero_grad()
    loss.backward(inputs=list(model.parameters()))
    optimizer.step()
""",
    "a value that is kept and a gradient that is not": """
for x, y in data:
    logits = model(x)
    chance = F.log_softmax(logits, 1).gather(1, y[:, None]).mean()
    magic = chance - chance.detach()
    loss = F.cross_entropy(logits, y) + 0.1 * magic
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "constants of a likelihood": """
log_sigma = nn.Parameter(torch.zeros(2))
opt = torch.optim.SGD([*model.parameters(), log_sigma], lr=0.1)
for x, y in data:
    r = (model(x) - F.one_hot(y, 2)) / log_sigma.exp()
    loss = 0.5 * r.pow(2).mean() + log_sigma.mean() + 0.5 * math.log(2 * math.pi)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "class priors from the data": """
prior = torch.tensor([(y == k).float().mean().item() for k in range(2) for _, y in data[:1]]) + 1e-3
for x, y in data:
    out = model(x) + prior.log()
    loss = F.cross_entropy(out, y) - prior.log().mean() * 0.1
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a moving target of the loss": """
level = 0.0
for x, y in data:
    loss = (F.cross_entropy(model(x), y) - 0.1).abs() + 0.1
    level = 0.9 * level + 0.1 * loss.item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "squares summed by hand as AdaGrad does": """
seen = [torch.zeros_like(p) for p in model.parameters()]
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    sgd.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for s, p in zip(seen, model.parameters()):
        s += p.grad**2
        p.grad = p.grad / (s.sqrt() + 1e-8)
    sgd.step()
""",
    "a momentum of its own": """
moving = [torch.zeros_like(p) for p in model.parameters()]
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    sgd.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for m, p in zip(moving, model.parameters()):
        m.mul_(0.9).add_(p.grad)
        p.grad = m.clone()
    sgd.step()
""",
    "what compression left out is added next time": """
left = [torch.zeros_like(p) for p in model.parameters()]
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    sgd.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for r, p in zip(left, model.parameters()):
        r += p.grad
        sent = torch.where(r.abs() > r.abs().mean(), r, torch.zeros_like(r))
        r -= sent
        p.grad = sent
    sgd.step()
""",
    "sums of a window in a table, begun anew": """
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for start in range(0, 12, K):
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for x, y in data[start : start + K]:
        grads = torch.autograd.grad(F.cross_entropy(model(x), y) / K, list(model.parameters()))
        for n, g in zip(sums, grads):
            sums[n] += g
    for n, p in model.named_parameters():
        p.grad = sums[n]
    sgd.step()
""",
    "a hook that is taken away again": """
for x, y in data:
    held = [p.register_hook(lambda g: g * 0.5) for p in model.parameters()]
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for one in held:
        one.remove()
""",
    "layers frozen after some passes": """
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for i, (x, y) in enumerate(data):
    if i == 6:
        model[0].requires_grad_(False)
        model[0].zero_grad(set_to_none=True)
    sgd.zero_grad()
    F.cross_entropy(model(x), y).backward()
    sgd.step()
""",
    "a critic held still while the actor learns": """
actor, critic = nn.Linear(3, 2), nn.Linear(2, 1)
oa = torch.optim.SGD(actor.parameters(), lr=0.1)
oc = torch.optim.SGD(critic.parameters(), lr=0.1)
for x, y in data:
    oc.zero_grad()
    F.mse_loss(critic(actor(x).detach()), x[:, :1]).backward()
    oc.step()
    critic.requires_grad_(False)
    oa.zero_grad()
    (-critic(actor(x)).mean()).backward()
    oa.step()
    critic.requires_grad_(True)
""",
    "a scheduler made anew with its optimizer": """
for phase in range(2):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2)
    for epoch in range(3):
        for x, y in data[:3]:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        sched.step()
""",
    "first-order adaptation that hands gradients over": """
meta = torch.optim.SGD(model.parameters(), lr=0.1)
for a, b in zip(data[::2], data[1::2]):
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.1)
    F.cross_entropy(fast(a[0]), a[1]).backward()
    inner.step()
    inner.zero_grad()
    F.cross_entropy(fast(b[0]), b[1]).backward()
    for p, q in zip(model.parameters(), fast.parameters()):
        p.grad = q.grad.clone()
    meta.step()
""",
    "a mean shown every few passes": """
shown, count = 0.0, 0
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    shown += loss.item()
    count += 1
    if (i + 1) % 4 == 0:
        print("loss", shown / count > 0)
""",
    "a mean shown every few passes and begun anew": """
shown = 0.0
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    shown += loss.item()
    if (i + 1) % 4 == 0:
        print("loss", shown / 4 > 0)
        shown = 0.0
""",
    "a loss for each sample, divided by the samples": """
pairs = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
loader = torch.utils.data.DataLoader(pairs, batch_size=8)
for epoch in range(2):
    total, seen = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        seen += len(x)
    print("loss", total / seen > 0, total / len(loader.dataset) > 0)
""",
    "a validation under no_grad": """
def evaluate():
    total, outs = 0.0, []
    with torch.no_grad():
        for x, y in data:
            out = model(x)
            total += F.cross_entropy(out, y)
            outs.append(out)
    return total / len(data), torch.cat(outs)
for epoch in range(4):
    for x, y in data[:4]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    evaluate()
""",
    "losses of a whole set summed in a function": """
def objective():
    total = 0.0
    for x, y in data[:4]:
        total = total + F.cross_entropy(model(x), y)
    return total / 4
for epoch in range(6):
    optimizer.zero_grad()
    loss = objective()
    loss.backward()
    optimizer.step()
""",
    "outputs of a step, kept as numbers": """
rows = []
for x, y in data:
    out = model(x)
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    hits = (out.argmax(1) == y).sum().item()
    rows.append({"loss": float(loss), "hits": hits, "top": out.max(1).values.tolist()})
""",
    "features cached for another pass in the window": """
for start in range(0, 12, K):
    kept = [(model[0](x), y) for x, y in data[start : start + K]]
    optimizer.zero_grad()
    for h, y in kept:
        (F.cross_entropy(model[2](model[1](h)), y) / K).backward()
    optimizer.step()
""",
    "embeddings of memory, detached": """
bank = torch.zeros(0, 2)
for x, y in data:
    z = model(x)
    bank = torch.cat([bank, z.detach()])[-8:]
    loss = F.cross_entropy(z, y) + 0.01 * (z @ bank.T).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a penalty on weights by their norms": """
for x, y in data:
    loss = F.cross_entropy(model(x), y)
    reg = torch.zeros(())
    for p in model.parameters():
        reg = reg + p.norm()
    loss = loss + 1e-3 * reg
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a temperature's own optimizer": """
log_alpha = torch.zeros((), requires_grad=True)
oa = torch.optim.SGD([log_alpha], lr=0.1)
for x, y in data:
    logits = model(x)
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    loss = F.cross_entropy(logits, y) - log_alpha.exp().detach() * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    oa.zero_grad()
    (-(log_alpha * (0.5 - entropy.detach()))).backward()
    oa.step()
""",
    "two losses through one scaler": """
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for x, y in data:
    sgd.zero_grad()
    out = model(x)
    scaler.scale(F.cross_entropy(out, y)).backward(retain_graph=True)
    scaler.scale(out.pow(2).mean()).backward()
    scaler.step(sgd)
    scaler.update()
""",
    "a step that sums over time in place": """
for x, y in data:
    loss = 0.0
    h = x
    for layer in model:
        h = layer(h)
        loss = loss + 1e-3 * h.pow(2).mean()
    loss = loss + F.cross_entropy(h, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
}
