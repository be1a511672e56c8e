"""Sums in a 16-bit type, and passes whose gradients nobody reads."""

from .pairing import Pairs, pair, twins

PAIRS: Pairs = {}


pair(
    PAIRS,
    "passes that are only timed",
    "GA801",
    """
def passes(x, layer):
    layer = layer.half()
    spent = 0.0
    for _ in range(100):
        y = layer(x)
        y.sum().backward()
        spent += clock()
    @
    return spent
""",
    "torch.optim.SGD(layer.parameters(), lr=0.1).step()",
    "pass",
)

test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)
