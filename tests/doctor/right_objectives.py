"""Right loops: several objectives, schedules in other units, clips and averages by other ways."""

from loops import TRAINED

HEAD = TRAINED

LOOPS = {
    "an advantage that is detached, over an encoder that both losses train": """
body, policy, baseline = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
adam = torch.optim.Adam(policy.parameters(), lr=0.01)
other = torch.optim.Adam([*body.parameters(), *baseline.parameters()], lr=0.01)
for x, y in data:
    features = body(x)
    gain = y.float() - baseline(features)[:, 0]
    advantage = gain.detach()
    log_prob = F.log_softmax(policy(features), 1)[:, 0]
    objective = -(log_prob * advantage).mean()
    adam.zero_grad()
    other.zero_grad()
    objective.backward(retain_graph=True)
    gain.square().mean().backward()
    adam.step()
    other.step()
""",
    "a helper that trains and tells of its input's gradient": """
seen = []
def differentiate(x, y):
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    seen.append(x.grad.abs().mean().item())
    return loss.item()
for x, y in data:
    optimizer.zero_grad()
    differentiate(x, y)
    (0.01 * model(x).square().mean()).backward()
    optimizer.step()
""",
    "a perturbation that takes its own gradient alone": """
def worst_case(x, y):
    shift = torch.zeros_like(x).requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x + shift), y), shift)
    return x + 0.1 * slope.sign()
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(worst_case(x, y)), y).backward()
    optimizer.step()
""",
    "one optimizer to begin with, another over the same afterwards": """
first, second = optimizer, torch.optim.SGD(model.parameters(), lr=0.1)
for chosen in (first, second):
    for x, y in data[:5]:
        chosen.zero_grad()
        F.cross_entropy(model(x), y).backward()
        chosen.step()
""",
    "a closure that adds up what it is given, and clears first": """
fit = torch.optim.LBFGS(model.parameters(), max_iter=5)
def evaluate():
    fit.zero_grad()
    total = 0.0
    for x, y in data[:3]:
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        total += loss.item()
    return total
for epoch in range(2):
    fit.step(evaluate)
""",
    "schedulers in a loop of their own, once an epoch": """
rounds = 5
schedules = [torch.optim.lr_scheduler.StepLR(optimizer, rounds // 2)]
for epoch in range(rounds):
    for x, y in data[:4]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for schedule in schedules:
        schedule.step()
""",
    "a schedule in epochs of one update each": """
rounds = 5
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=rounds // 2)
for epoch in range(rounds):
    for i, (x, y) in enumerate(data[:4]):
        (F.cross_entropy(model(x), y) / 4).backward()
        if i == 3:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
""",
    "a limit that is multiplied by the loss scale": """
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for x, y in data[:6]:
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    most = 0.5 * scaler.get_scale()
    nn.utils.clip_grad_norm_(model.parameters(), most)
    scaler.step(optimizer)
    scaler.update()
""",
    "a norm that is measured with every fourth step": """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    optimizer.step()
    optimizer.zero_grad()
""",
    "sums over a constant that is the count of each window by chance": """
for start in range(0, 12, 2):
    for i, (x, y) in enumerate(data[start : start + 2]):
        each = F.cross_entropy(model(x), y, reduction="none") * (torch.arange(4) < 1 + 2 * i)
        (each.sum() / 4 / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}
