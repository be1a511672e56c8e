"""Pairs of loops: terms of a loss that have no graph."""

PAIRS = {
    "a gradient penalty in a function, without its graph": (
        "GA503",
        """
critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    one = torch.ones_like(scores)
    grads = torch.autograd.grad(scores, mixed, grad_outputs=one, retain_graph=True)[0]  #bad!
    grads = torch.autograd.grad(scores, mixed, grad_outputs=one, create_graph=True)[0]  #good
    grads = grads.view(grads.size(0), -1)
    return ((grads.norm(2, dim=1) - 1) ** 2).mean()
for x, y in data:
    fake = torch.randn(4, 3)
    opt.zero_grad()
    d_loss = critic(fake).mean() - critic(x).mean()
    gp = gradient_penalty(x, fake)
    total = d_loss + 10 * gp
    total.backward()
    opt.step()
""",
    ),
    "a penalty on the slope at real data": (
        "GA503",
        """
critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
for x, y in data:
    x.requires_grad_(True)
    score = critic(x)
    loss = F.softplus(-score).mean()
    g, = torch.autograd.grad(score.sum(), x, retain_graph=True)  #bad!
    g, = torch.autograd.grad(score.sum(), x, create_graph=True)  #good
    penalty = g.pow(2).sum(1).mean()
    loss += 5.0 * penalty
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "a loss of the derivative, without its graph": (
        "GA503",
        """
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for x, y in data:
    x = x.clone().requires_grad_()
    u = net(x)
    du = torch.autograd.grad(u, x, torch.ones_like(u), retain_graph=True)[0]  #bad!
    du = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]  #good
    loss_u = F.mse_loss(u, x[:, :1].detach())
    loss_du = F.mse_loss(du, torch.ones_like(du))
    loss = loss_u + 0.5 * loss_du
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "a sum of absolute weights through .data": (
        "GA503",
        """
def l1(net):
    total = 0.0
    for p in net.parameters():
        total = total + p.data.abs().sum()  #bad!
        total = total + p.abs().sum()  #good
    return total
for x, y in data:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y) + 1e-3 * l1(model)
    loss.backward()
    optimizer.step()
""",
    ),
    "a sum of squares as numbers": (
        "GA503",
        """
for x, y in data:
    optimizer.zero_grad()
    ce = F.cross_entropy(model(x), y)
    l2 = sum(p.pow(2).sum().item() for p in model.parameters())  #bad!
    l2 = sum(p.pow(2).sum() for p in model.parameters())  #good
    loss = ce + 1e-3 * l2
    loss.backward()
    optimizer.step()
""",
    ),
    "norms put into a new tensor": (
        "GA503",
        """
for x, y in data:
    optimizer.zero_grad()
    ce = F.cross_entropy(model(x), y)
    l2 = torch.tensor([p.norm() for p in model.parameters()]).sum()  #bad!
    l2 = torch.stack([p.norm() for p in model.parameters()]).sum()  #good
    (ce + 1e-3 * l2).backward()
    optimizer.step()
""",
    ),
    "a distillation of the detached student": (
        "GA503",
        """
teacher = copy.deepcopy(model)
for x, y in data:
    s = model(x)
    with torch.no_grad():
        t = teacher(x)
    kd = F.kl_div(F.log_softmax(s.detach(), 1), t.softmax(1), reduction="batchmean")  #bad!
    kd = F.kl_div(F.log_softmax(s / 2, 1), F.softmax(t / 2, 1), reduction="batchmean")  #good
    loss = F.cross_entropy(s, y) + 4 * kd
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
}
