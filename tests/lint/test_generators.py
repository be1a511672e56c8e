"""Loops that draw from a generator of the same program."""

from .pairing import MODEL, Pairs, codes, pair, twins

PAIRS: Pairs = {}

LOGGER = """
class Meter:
    def report(self, iterable, every, header=""):
        i = 0
        print(header, len(iterable))
        for item in iterable:
            yield item
            if i % every == 0 or i == len(iterable) - 1:
                print(i)
            i += 1

meter = Meter()
"""

pair(
    PAIRS,
    "a logger that hands out the indices",
    "GA302",
    MODEL
    + LOGGER
    + """
def epoch(net, batches, opt, steps, every):
    for i in meter.report(range(steps), 50):
        x, y = next(batches)
        loss = F.cross_entropy(net(x), y) / every
        loss.backward()
        if (i + 1) % every == 0@:
            opt.step()
            opt.zero_grad()
""",
    "",
    " or i + 1 == steps",
)

pair(
    PAIRS,
    "numbered batches of a logger",
    "GA303",
    MODEL
    + LOGGER
    + """
opt.zero_grad()
for i, (x, y) in enumerate(meter.report(loader, 50)):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if @ % args.every == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
""",
    "i",
    "(i + 1)",
)

pair(
    PAIRS,
    "epochs inside the generator, one counter over all of them",
    "GA303",
    MODEL
    + """
def batches(loader, epochs):
    for epoch in range(epochs):
        for i, batch in enumerate(loader):
            yield epoch, i, batch

for epoch, i, (x, y) in batches(loader, args.epochs):
    done = i + epoch * args.turns
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if @:
        opt.step()
        opt.zero_grad()
""",
    "done % args.every == 0 and done > 0",
    "(done + 1) % args.every == 0",
)

pair(
    PAIRS,
    "epochs inside the generator, a counter that starts anew",
    "GA302",
    MODEL
    + """
def batches(loader, epochs):
    for epoch in range(epochs):
        for i, batch in enumerate(loader):
            yield epoch, i, batch

for epoch, i, (x, y) in batches(loader, args.epochs):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if (@ + 1) % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "i",
    "(i + epoch * args.turns)",
)

pair(
    PAIRS,
    "a loop that breaks off behind a window",
    "GA302",
    MODEL
    + """
def rows(loader):
    yield from loader

for epoch in range(args.epochs):
    for i, (x, y) in enumerate(rows(loader)):
        if i == @:
            break
        loss = F.cross_entropy(net(x), y) / 2
        loss.backward()
        if (i + 1) % 2 == 0:
            opt.step()
            opt.zero_grad()
""",
    "5",
    "4",
)


test_it_is_blamed_and_its_right_twin_is_not = twins(PAIRS)


def test_a_generator_that_trains_is_walked_though_nobody_draws():
    wrong = """
def training(loader):
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.zero_grad()
        opt.step()
        yield loss.item()

losses = list(training(loader))
"""
    assert "GA103" in codes(MODEL + wrong)
