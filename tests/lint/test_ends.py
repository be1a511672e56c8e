"""`step % N == 0 or step == total`: an end that the script counts to, and nobody knows."""

import pytest

from .pairing import MODEL, Pairs, codes, pair, twins

PAIRS: Pairs = {}

LOOP = (
    MODEL
    + """
total = int(args.examples / args.size)
for epoch in range(args.epochs):
    done = 0
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)WHOLE
        loss.backward()
        done += 1
        if COUNT % args.every == 0 or END:
            opt.step()
            opt.zero_grad()
"""
)


def loop(whole: str = " / args.every", count: str = "done", end: str = "done == total") -> str:
    return LOOP.replace("WHOLE", whole).replace("COUNT", count).replace("END", end)


pair(PAIRS, "the loss before such an end", "GA201", loop(whole="@"), "", " / args.every")
pair(PAIRS, "the first window before such an end", "GA303", loop(count="@"), "(done + 1)", "done")
pair(
    PAIRS,
    "an end spelled first",
    "GA201",
    loop(whole="@", end="total == done"),
    "",
    " / args.every",
)
pair(
    PAIRS,
    "a counter through two loops",
    "GA201",
    MODEL
    + """
for epoch in range(args.epochs):
    done, seen = 0, 0
    for talk in loader:
        for x, y in talk:
            loss = F.cross_entropy(net(x), y)@
            loss.backward()
            done += 1
            if done % args.every == 0 or done == args.total:
                opt.step()
                opt.zero_grad()
""",
    "",
    " / args.every",
)

test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)


@pytest.mark.parametrize(
    "end", ["done == total", "done + 1 == total", "total == done", "done >= total"]
)
def test_an_end_is_believed_to_flush(end):
    assert codes(loop(end=end)) <= {"GA204"}  # a short last window is divided by the full one


def test_a_target_that_moves_is_no_end():
    assert "GA201" not in codes(loop(whole="", end="done == targets[x]"))
