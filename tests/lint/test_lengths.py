"""Loops whose length the script says: whether a tail is left, or no window is ever full."""

import pytest

from .pairing import MODEL, Pairs, codes, pair, twins

LOOP = """
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(net(x), y) / 4).backward()
        if (i + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()
"""
DATA = "from torch.utils.data import DataLoader, TensorDataset\n"
PAIRS: Pairs = {}

for name, text, bad, good in (
    ("a list of range", "data = [(torch.randn(4, 8), 0) for _ in range(@)]", "18", "16"),
    ("a long list", "data = [(torch.randn(4, 8), 0) for _ in range(@)]", "402", "400"),
    ("a loader over tensors",
     "data = DataLoader(TensorDataset(torch.ones(@, 8), torch.ones(40)), batch_size=5)",
     "41", "40"),
    ("a loader that drops the rest",
     "data = DataLoader(TensorDataset(torch.ones(44, 8)), batch_size=5, drop_last=@)",
     "False", "True"),
    ("pieces of a tensor", "data = zip(torch.randn(@, 8).split(2), torch.ones(@).split(2))",
     "18", "16"),
    ("chunks of a tensor", "data = list(zip(torch.randn(36, 8).chunk(@), range(99)))", "18", "12"),
    ("drawn at random",
     "data = DataLoader(TensorDataset(torch.randint(0, 9, (@, 8))), 4, shuffle=True)", "20", "32"),
):  # fmt: skip
    pair(PAIRS, name, "GA302", DATA + MODEL + text + LOOP, bad, good)

pair(
    PAIRS,
    "starts of batches",
    "GA302",
    MODEL
    + """
examples = torch.randn(@, 8)
for n, start in enumerate(range(0, len(examples), 2)):
    (net(examples[start : start + 2]).mean() / 4).backward()
    if (n + 1) % 4 == 0:
        opt.step()
        opt.zero_grad()
""",
    "18",
    "16",
)

pair(
    PAIRS,
    "an epoch that is shorter than a window",
    "GA302",
    DATA
    + MODEL
    + """
data = DataLoader(TensorDataset(torch.ones(@, 8)), batch_size=4)
every = 8
for epoch in range(3):
    for i, (x,) in enumerate(data):
        loss = net(x).mean() / every
        loss.backward()
        if (i + 1) % every == 0:
            opt.step()
            opt.zero_grad()
""",
    "20",
    "32",
)

pair(
    PAIRS,
    "an end that is counted by hand",
    "GA302",
    """
class Loop:
    def __init__(self, net, every):
        self.net, self.every, self.seen = net, every, 0
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
    def fit(self, data, last):
        for n, x in enumerate(data, start=1):
            (self.net(x).mean() / self.every).backward()
            self.seen += 1
            if self.seen >= self.every@:
                self.opt.step()
                self.opt.zero_grad()
                self.seen = 0
            if n == last:
                break
Loop(nn.Linear(3, 2), 4).fit([torch.randn(4, 3) for _ in range(20)], last=14)
""",
    "",
    " or n == last",
)

pair(
    PAIRS,
    "a known tail over the full window",
    "GA204",
    MODEL
    + """
examples = torch.ones(18, 8)
total = (len(examples) + 1) // 2
for n, start in enumerate(range(0, len(examples), 2)):
    window = @
    (net(examples[start : start + 2]).mean() / window).backward()
    if (n + 1) % 4 == 0 or n + 1 == total:
        opt.step()
        opt.zero_grad()
""",
    "4",
    "min(4, total - n // 4 * 4)",
)

test_a_known_length_decides_and_its_right_twin_is_silent = twins(PAIRS)

RIGHT = {
    "long windows that fill the loop": """
data = [torch.randn(4, 8) for _ in range(32)]
for i, x in enumerate(data):
    (net(x).mean() / 16).backward()
    if (i + 1) % 16 == 0:
        opt.step()
        opt.zero_grad()
""",
    "a counter that goes on": """
data = [torch.randn(4, 8) for _ in range(5)]
done = 0
for epoch in range(16):
    for x in data:
        (net(x).mean() / 8).backward()
        done += 1
        if done % 8 == 0:
            opt.step()
            opt.zero_grad()
""",
    "a thousand in tens": """
for i in range(1000):
    (net(torch.randn(4, 8)).mean() / 10).backward()
    if (i + 1) % 10 == 0:
        opt.step()
        opt.zero_grad()
""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_whole_windows_are_silent(name):
    assert not codes(MODEL + RIGHT[name]) & {"GA302", "GA303", "GA204"}
