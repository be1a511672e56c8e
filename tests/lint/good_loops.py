"""Twenty right loops in as many shapes. A tag at the end of a line says what the line does:

`Z` clears, `F` runs the forward, `D` divides, `B` runs backward, `U` unscales, `C` clips,
`S` steps, `P` updates the scaler, `H` steps the scheduler, `G` is the test that gates the step, `M`
makes the model.
"""

HEAD = """\
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
import dataset
k = 4
history = []
loader = DataLoader(dataset.train, batch_size=2)
criterion = nn.CrossEntropyLoss()
"""

LOOPS: dict[str, str] = {
    "plain": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = StepLR(optimizer, 10)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B
        if (i + 1) % k == 0 or i + 1 == len(loader):  #G
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
            optimizer.step()  #S
            scheduler.step()  #H
            optimizer.zero_grad()  #Z
""",
    "other names": """
red = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))  #M
optimizador = torch.optim.SGD(red.parameters(), lr=0.1)
agenda = StepLR(optimizador, 10)
for epoca in range(3):
    for paso, lote in enumerate(loader):
        perdida = criterion(red(lote[0]), lote[1])  #F
        perdida = perdida / k  #D
        perdida.backward()  #B
        if (paso + 1) % k == 0 or paso + 1 == len(loader):  #G
            nn.utils.clip_grad_norm_(red.parameters(), 1.0)  #C
            optimizador.step()  #S
            agenda.step()  #H
            optimizador.zero_grad()  #Z
""",
    "global counter": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
seen = 0
for epoch in range(3):
    for x, y in loader:
        seen += 1
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B
        if seen % k == 0:  #G
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
            optimizer.step()  #S
            optimizer.zero_grad()  #Z
            scheduler.step()  #H
""",
    "counter that restarts": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
pending = 0
for epoch in range(3):
    for x, y in loader:
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B
        pending += 1
        if pending == k:  #G
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
            optimizer.step()  #S
            optimizer.zero_grad()  #Z
            scheduler.step()  #H
            pending = 0
""",
    "early continue": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
seen = 0
for epoch in range(3):
    for x, y in loader:
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B
        seen += 1
        if seen % k != 0:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
        optimizer.step()  #S
        optimizer.zero_grad()  #Z
        scheduler.step()  #H
""",
    "while": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
step = 0
batches = iter(loader)
while step < 100:
    x, y = next(batches)
    loss = criterion(model(x), y)  #F
    loss = loss / k  #D
    loss.backward()  #B
    step += 1
    if step % k == 0:  #G
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
        optimizer.step()  #S
        optimizer.zero_grad()  #Z
        scheduler.step()  #H
""",
    "match": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
seen = 0
for epoch in range(3):
    for x, y in loader:
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B
        seen += 1
        match seen % k:
            case 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
                optimizer.step()  #S
                optimizer.zero_grad()  #Z
                scheduler.step()  #H
            case _:
                pass
""",
    "function": """
def train(net, batches, opt, sched, every):
    for i, (x, y) in enumerate(batches):
        loss = criterion(net(x), y)  #F
        loss = loss / every  #D
        loss.backward()  #B
        if (i + 1) % every == 0 or i + 1 == len(batches):  #G
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  #C
            opt.step()  #S
            sched.step()  #H
            opt.zero_grad()  #Z

model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    train(model, loader, optimizer, StepLR(optimizer, 10), 4)
""",
    "class": """
class Trainer:
    def __init__(self, every):
        self.net = nn.Linear(4, 2)  #M
        self.opts = [torch.optim.Adam(self.net.parameters())]
        self.sched = StepLR(self.opts[0], 10)
        self.every = every
        self.done = 0

    def fit(self, batches):
        for x, y in batches:
            self.done += 1
            loss = criterion(self.net(x), y)  #F
            loss = loss / self.every  #D
            loss.backward()  #B
            if self.done % self.every == 0:  #G
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)  #C
                self.opts[0].step()  #S
                self.opts[0].zero_grad()  #Z
                self.sched.step()  #H

trainer = Trainer(4)
for epoch in range(3):
    trainer.fit(loader)
""",
    "helpers": """
def backward(loss):
    loss.backward()

def clear(opt):
    opt.zero_grad()

def build():
    net = nn.Linear(4, 2)
    return net, torch.optim.Adam(net.parameters())

model, optimizer = build()
scheduler = StepLR(optimizer, 10)
seen = 0
for epoch in range(3):
    for x, y in loader:
        seen += 1
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        backward(loss)  #B
        if seen % k == 0:  #G
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
            optimizer.step()  #S
            clear(optimizer)  #Z
            scheduler.step()  #H
""",
    "closure": """
def make(net):
    opt = torch.optim.Adam(net.parameters())

    def micro(x, y):
        loss = criterion(net(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B

    def update():
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)  #C
        opt.step()  #S
        opt.zero_grad()  #Z

    return micro, update

micro, update = make(nn.Linear(4, 2))
seen = 0
for epoch in range(3):
    for x, y in loader:
        micro(x, y)
        seen += 1
        if seen % k == 0:  #G
            update()
""",
    "inner loop": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
batches = iter(loader)
for update in range(100):
    for micro in range(k):
        x, y = next(batches)
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
    optimizer.step()  #S
    optimizer.zero_grad()  #Z
    scheduler.step()  #H
""",
    "comprehension": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
batches = iter(loader)
for update in range(100):
    losses = [criterion(model(x), y) / k for x, y in [next(batches) for _ in range(4)]]
    [loss.backward() for loss in losses]  #B
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
    optimizer.step()  #S
    optimizer.zero_grad()  #Z
""",
    "amp": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
scaler = torch.amp.GradScaler("cuda")
seen = 0
for epoch in range(3):
    for x, y in loader:
        seen += 1
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        scaler.scale(loss).backward()  #B
        if seen % k == 0:  #G
            scaler.unscale_(optimizer)  #U
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
            scaler.step(optimizer)  #S
            scaler.update()  #P
            scheduler.step()  #H
            optimizer.zero_grad()  #Z
""",
    "amp in a class": """
class Fit:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.AdamW(net.parameters())
        self.amp = torch.cuda.amp.GradScaler()

    def run(self, batches):
        count = 0
        for x, y in batches:
            count += 1
            loss = criterion(self.net(x), y)  #F
            loss = loss / k  #D
            self.amp.scale(loss).backward()  #B
            if count % k == 0 or count == len(batches):  #G
                self.amp.unscale_(self.opt)  #U
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)  #C
                self.amp.step(self.opt)  #S
                self.amp.update()  #P
                self.opt.zero_grad()  #Z

fit = Fit(nn.Linear(4, 2))
for epoch in range(3):
    fit.run(loader)
""",
    "amp by option": """
def train(args, net, batches, opt, scaler):
    for epoch in range(args.epochs):
        for i, (x, y) in enumerate(batches):
            loss = criterion(net(x), y)  #F
            loss = loss / args.every  #D
            scaler.scale(loss).backward()  #B
            if (i + 1) % args.every == 0 or i == len(batches) - 1:  #G
                if args.clip > 0:
                    scaler.unscale_(opt)  #U
                    nn.utils.clip_grad_norm_(net.parameters(), args.clip)  #C
                scaler.step(opt)  #S
                scaler.update()  #P
                opt.zero_grad()  #Z
""",
    "last of the window": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B
        if i % k == k - 1 or i == len(loader) - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
            optimizer.step()  #S
            scheduler.step()  #H
            model.zero_grad()  #Z
""",
    "named flag": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
for epoch in range(3):
    for i, (x, y) in enumerate(loader, start=1):
        ready = i % k == 0 or i == len(loader)
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B
        if ready:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
            optimizer.step()  #S
            scheduler.step()  #H
            optimizer.zero_grad()  #Z
""",
    "flush after the loop": """
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    pending = 0
    for x, y in loader:
        loss = criterion(model(x), y)  #F
        loss = loss / k  #D
        loss.backward()  #B
        pending += 1
        if pending == k:  #G
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
            optimizer.step()  #S
            optimizer.zero_grad()  #Z
            pending = 0
    if pending:
        optimizer.step()
        optimizer.zero_grad()
""",
    "with and progress": """
from tqdm import tqdm
model = nn.Linear(4, 2)  #M
optimizer = torch.optim.Adam(model.parameters())
scheduler = StepLR(optimizer, 10)
seen = 0
for epoch in range(3):
    with tqdm(total=len(loader)) as bar:
        for batch in loader:
            seen += 1
            with torch.autocast("cpu"):
                loss = criterion(model(batch["x"]), batch["y"])  #F
            loss = loss / k  #D
            loss.backward()  #B
            bar.update(1)
            if seen % k == 0:  #G
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #C
                optimizer.step()  #S
                scheduler.step()  #H
                optimizer.zero_grad()  #Z
""",
}
