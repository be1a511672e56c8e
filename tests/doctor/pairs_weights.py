"""Pairs of loops: what a micro-batch weighs in its update, and in the log."""

PAIRS = {
    "a micro-step loop that draws its batches": (
        "GA201",
        """
pool = iter(itertools.cycle(data))
def get_batch():
    return next(pool)
for it in range(4):
    for micro_step in range(K):
        x, y = get_batch()
        loss = F.cross_entropy(model(x), y)
        loss = loss / K  #good
        loss.backward()  #!
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
""",
    ),
    "a second loss that is not divided": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    out = model(x)
    loss = F.cross_entropy(out, y)
    extra = out.pow(2).mean()
    loss = loss / K + 0.1 * extra  #bad!
    loss = (loss + 0.1 * extra) / K  #good
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a vector that is differentiated as a sum": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = losses.mean() / K  #good
    loss = losses.mean()  #bad
    loss.backward(torch.ones_like(loss))  #!
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a regulariser that every micro-batch adds whole": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y) / K
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    loss = loss + 0.01 * penalty  #bad!
    loss = loss + 0.01 * penalty / K  #good
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "two terms, neither divided": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    out = model(x)
    loss = F.cross_entropy(out, y) + 0.1 * out.pow(2).mean()
    loss = loss / K  #good
    loss.backward()  #!
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "divided in the loss and in the loop": (
        "GA202",
        """
def criterion(out, y):
    return F.cross_entropy(out, y) / K
for i, (x, y) in enumerate(data):
    loss = criterion(model(x), y)
    loss = loss / K  #bad!
    loss.backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "means over tokens, where padding is ignored": (
        "GA203",
        """
vocabulary, length = 7, 6
lm = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))
adam = torch.optim.AdamW(lm.parameters(), lr=0.01)
batches = []
for n in (2, 6, 3, 5, 1, 6, 4, 2):
    labels = torch.randint(0, vocabulary, (2, length))
    labels[:, n:] = -100
    batches.append((torch.randint(0, vocabulary, (2, length)), labels))
for start in range(0, 8, K):
    window = batches[start : start + K]
    total = sum((labels != -100).sum() for _, labels in window)
    for ids, labels in window:
        logits = lm(ids).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100) / K  #bad!
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / total  #good
        loss.backward()
    adam.step()
    adam.zero_grad()
""",
    ),
    "a weighted mean over uneven masks": (
        "GA203",
        """
for start in range(0, 12, K):
    part = data[start : start + K]
    masks = [(torch.arange(4) <= (start + j) % 3).float() for j in range(K)]
    for m in masks:
        m[0] = 1.0
    total = sum(m.sum() for m in masks)
    for (x, y), m in zip(part, masks):
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = (losses * m).sum() / m.sum() / K  #bad!
        loss = (losses * m).sum() / total  #good
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "what an epoch leaves over is divided by all": (
        "GA204",
        """
for epoch in range(2):
    batches = data[:10]
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        loss = loss / K  #bad
        loss = loss / min(K, len(batches) - step // K * K)  #good
        loss.backward()
        if (step + 1) % K == 0 or step == len(batches) - 1:
            optimizer.step()  #!
            optimizer.zero_grad()
""",
    ),
    "the epoch's figure is divided by the updates": (
        "GA205",
        """
def epoch_loss():
    total, updates = 0.0, 0
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        (loss / K).backward()
        total += loss.item()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return total / updates  #bad!
    return total / len(data)  #good
print(epoch_loss() > 0)
""",
    ),
    "a loop that is named after its micro-batches": (
        "GA201",
        """
accumulation_steps = 4
for it in range(3):
    optimizer.zero_grad()
    for j in range(accumulation_steps):
        x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))
        loss = F.cross_entropy(model(x), y)
        loss = loss / accumulation_steps  #good
        loss.backward()  #!
    optimizer.step()
""",
    ),
    "gradients divided after every micro-batch": (
        "GA202",
        """
for i, (x, y) in enumerate(data):
    F.cross_entropy(model(x), y).backward()
    last = (i + 1) % K == 0
    if last:  #good
        for p in model.parameters():  #good
            p.grad /= K  #good
    for p in model.parameters():  #bad
        p.grad /= K  #bad!
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a log of losses that were divided for their backward": (
        "GA205",
        """
total = 0.0
for i, (x, y) in enumerate(data):
    loss = F.cross_entropy(model(x), y)
    total += loss.item()  #good
    loss = loss / K
    loss.backward()
    total += loss.item()  #bad!
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
print(total / len(data) > 0)
""",
    ),
    "one function that sums and averages": (
        "GA201",
        """
def update(divide):
    w = torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([w], lr=1.0)
    for micro in range(K):
        loss = (3 * w).sum()
        if divide:
            loss = loss / K
        loss.backward()  #!
    adam.step()
update(True)
update(False)  #bad
""",
    ),
    "two backwards in each micro-batch, one of an undivided loss": (
        "GA201",
        """
for i, (x, y) in enumerate(data):
    out = model(x)
    (F.cross_entropy(out, y) / K).backward(retain_graph=True)
    size = out.pow(2).mean()
    size = size / K  #good
    size.backward()  #!
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "a mean of means that is divided on a line of its own": (
        "GA203",
        """
words = nn.Embedding(7, 7)
adam = torch.optim.AdamW(words.parameters(), lr=0.01)
labels = [torch.randint(0, 7, (6,)) for _ in range(8)]
for i, y in enumerate(labels):
    y[i % 4 + 1 :] = -1
for start in (0, 4):
    total = sum((y >= 0).sum() for y in labels[start : start + 4])
    for y in labels[start : start + 4]:
        scores = words(torch.arange(6))
        loss = F.cross_entropy(scores, y, ignore_index=-1)  #bad!
        loss = F.cross_entropy(scores, y, ignore_index=-1, reduction="sum")  #good
        loss /= 4  #bad
        loss /= total  #good
        loss.backward()
    adam.step()
    adam.zero_grad()
""",
    ),
}
