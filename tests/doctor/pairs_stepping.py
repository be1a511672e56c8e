"""Pairs of loops: how long a window is, and what changes inside it."""

PAIRS = {
    "what an epoch leaves over is thrown away": (
        "GA302",
        """
for epoch in range(3):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(data[:10]):
        last = i + 1 == 10
        size = 2 if i >= 8 else K
        (F.cross_entropy(model(x), y) / size).backward()
        if (i + 1) % K == 0:  #bad!
        if (i + 1) % K == 0 or last:  #good
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    "a window that ends at the batch of an epoch's end": (
        "GA302",
        """
count = 0
for epoch in range(3):
    for b, (x, y) in enumerate(data[:7]):
        (F.cross_entropy(model(x), y) / (K if b < K else 3)).backward()
        count += 1
        if count == K:  #bad!
        if count == K or b == 6:  #good
            optimizer.step()
            optimizer.zero_grad()
            count = 0
    count = 0
    optimizer.zero_grad()
""",
    ),
    "the test for the step is upside down": (
        "GA303",
        """
for batches_done, (x, y) in enumerate(data, 1):
    (F.cross_entropy(model(x), y) / K).backward()
    if batches_done % K:  #bad!
    if batches_done % K == 0:  #good
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a first window of one": (
        "GA303",
        """
for i, (x, y) in enumerate(data + data[:1]):  #bad
for i, (x, y) in enumerate(data):  #good
    (F.cross_entropy(model(x), y) / K).backward()
    if i % K == 0:  #bad!
    if i % K == K - 1:  #good
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "Adam made anew with each epoch": (
        "GA304",
        """
adam = torch.optim.Adam(model.parameters(), lr=0.01)  #good
for epoch in range(3):
    adam = torch.optim.Adam(model.parameters(), lr=0.01)  #bad!
    for x, y in data[:4]:
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
""",
    ),
    "weights that are clamped within a window": (
        "GA307",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  #good
            for p in model.parameters():  #good
                p.clamp_(-0.5, 0.5)  #good
    with torch.no_grad():  #bad
        for p in model.parameters():  #bad
            p.clamp_(-0.5, 0.5)  #bad!
""",
    ),
    "weights changed by hand through data in mid-window": (
        "GA307",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    model[0].weight.data.clamp_(-0.3, 0.3)  #bad!
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.data.clamp_(-0.3, 0.3)  #good
""",
    ),
    "decay by hand in each micro-batch": (
        "GA307",
        """
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / K).backward()
    last = (i + 1) % K == 0
    if i >= 0:  #bad
    if last:  #good
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.999)  #!
    if last:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a hidden state that a write behind the graph changes": (
        "GA308",
        """
w = nn.Parameter(torch.ones(3))
scale = nn.Parameter(torch.ones(()))
sgd = torch.optim.SGD([w, scale], lr=0.1)
for x, _ in data[:4]:
    hidden = x * w
    loss = (hidden * scale).pow(2).mean()
    hidden.data.mul_(0.5)  #bad!
    loss.backward()
    hidden.data.mul_(0.5)  #good
    sgd.step()
    sgd.zero_grad()
""",
    ),
    "a state that is saved inside a window": (
        "GA315",
        """
def run(model, optimizer, batches, first):
    for i, (x, y) in enumerate(batches, first):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
cut = 6  #bad
cut = 8  #good
run(model, optimizer, data[:cut], 0)
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  #!
fresh = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
again = torch.optim.AdamW(fresh.parameters(), lr=0.01)
fresh.load_state_dict(saved["model"])
again.load_state_dict(saved["optimizer"])
run(fresh, again, data[cut:], cut)
""",
    ),
    "a step for what is left, with nothing left": (
        "GA301",
        """
for epoch in range(2):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    if len(data) % K:  #good
        optimizer.step()  #good
        optimizer.zero_grad(set_to_none=False)  #good
    optimizer.step()  #bad!
    optimizer.zero_grad(set_to_none=False)  #bad
""",
    ),
}
