"""GA205: whether the loss that is shown is the one that is optimised."""

from __future__ import annotations

from collections.abc import Iterator

from gradaccum.lint.facts import Facts, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.values import Num

__all__ = ["GLOBAL"]


def log_by_updates(facts: Facts) -> Iterator[Hit]:
    """GA205."""
    events = facts.trace.events
    for index, event in enumerate(events):
        if event.kind != "average" or event.thing is None or tensor_of(event).divisors:
            continue
        terms, by = event.thing.args
        assert isinstance(terms, Num)
        assert isinstance(by, Num)
        passes = [at for at, other in enumerate(events[:index]) if other.kind == "backward"]
        count = int(terms.value)
        if not 1 < count <= len(passes):
            continue
        steps = sum(1 for other in events[passes[-count] : index] if other.kind == "step")
        if by.value == steps and 0 < steps < count:
            yield hit("GA205", event, "a loss is summed for each micro-batch, and the sum is "
                      "divided by the number of updates: "
                      "the logged loss grows with the length of the window")  # fmt: skip
            return


GLOBAL = (log_by_updates,)
