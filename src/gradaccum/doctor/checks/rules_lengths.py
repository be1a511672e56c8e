"""How long windows are, beside what their loss is divided by: GA302, GA303, GA204."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gradaccum.doctor.checks.context import Context
from gradaccum.doctor.checks.hits import Hit, figure, hit, plural
from gradaccum.doctor.checks.named import counts_to
from gradaccum.doctor.checks.source import gate, gate_counts, gate_divides, unbracketed
from gradaccum.doctor.checks.story import Window, inside, place_of
from gradaccum.doctor.checks.weights import Series, close
from gradaccum.doctor.trace.model import Event, Place

__all__ = ["RULES"]


def wrong_length(context: Context) -> Iterator[Hit]:
    """GA303, GA302, GA204: windows that are not as long as what their loss is divided by."""
    for line, windows in context.lines():
        if line in context.settled:
            continue
        told = [
            (window, _means(terms))
            for window, terms in context.plain(windows)
            if context.one_line(window)
        ]
        if not told or not all(terms for _, terms in told):
            continue
        micro = context.story.micros(told[0][0])[-1]
        lengths = [len(window.fresh) for window, _ in told]
        hooked = all(inside(w.step, context.story) for w, _ in told if w.step is not None)
        every = _divisor([terms for _, terms in told], lengths, line, place_of(micro), hooked)
        if every is None or all(length == every for length in lengths):
            continue
        seen = _Lengths(line, lengths, every, micro, told[0][0])
        found = _judge(context, windows, seen)
        if found:
            context.wrong += [
                (window, every / len(window.fresh), one.path)
                for window, terms in told
                for one in terms
                if every in one.divisors | one.shares
            ]
        yield from found


def _divisor(
    told: list[list[Series]],
    lengths: list[int],
    line: Place,
    backward: Place | None,
    hooked: bool,
) -> int | None:
    """The number of micro-batches that a window's loss is divided by; `None` if it is not known.

    What divides a loss may be anything's number: heads, a temperature, a penalty's weight. It is
    that of the micro-batches where most windows have as many, where the first has and the rest of
    an epoch is added to the others, or where the source divides by what the step's test counts to.
    A coefficient is believed only for the last reason. Where backward itself steps (`hooked`) there
    are none of these, and a loss of one term is taken at its word.
    """
    divided = frozenset.intersection(*(_shared(terms, "divisors") for terms in told))
    counts = Counter(lengths)
    most = max(counts.values())
    usual_ones = [n for n in divided if counts[n] == most]
    if not usual_ones and lengths[0] in divided and min(lengths) == lengths[0]:
        usual_ones = [lengths[0]]
    if not usual_ones and hooked and all(len(terms) == 1 for terms in told):
        usual_ones = list(divided)
    if len(usual_ones) == 1:
        return usual_ones[0]
    scaled = frozenset.intersection(*(_shared(terms, "shares") for terms in told))
    proven = [n for n in divided if gate_divides(line, backward, n)]
    proven += [n for n in scaled - divided if gate_divides(line, backward, None)]
    return proven[0] if len(proven) == 1 else None


def _shared(terms: list[Series], how: str) -> frozenset[int]:
    """Numbers for all terms of a loss; else those of a term beside which others are not divided."""
    each: list[frozenset[int]] = [getattr(one, how) for one in terms]
    return frozenset.intersection(*each) or (
        frozenset().union(*each) if how == "divisors" else frozenset()
    )


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Windows of one update line beside the number that their loss is divided by."""

    line: Place
    sizes: list[int]
    every: int
    micro: Event
    first: Window

    @property
    def shown(self) -> str:
        """The sizes, as far as they are worth reading."""
        return ", ".join(map(str, self.sizes[:8])) + (", ..." if len(self.sizes) > 8 else "")

    def hit(self, code: str, rest: str) -> list[Hit]:
        """A finding at the condition that decides when to update, or at the update."""
        message = (
            f"updates hold {self.shown} micro-batches while the loss is divided by "
            f"{self.every}{rest}"
        )
        condition = None if code == "GA102" else gate(self.line, place_of(self.micro))
        return hit(
            code,
            condition or self.line,
            message,
            (self.micro, f"the loss is divided by {self.every}"),
            (self.line if condition else None, "the step"),
        )

    def short(self, context: Context, sizes: list[int]) -> list[Hit]:
        """Tails that were divided by more than they hold: seen to happen, so more than advice."""
        every, kinds = self.every, sorted(set(sizes))
        parts = ", ".join(f"{size}/{every}" for size in kinds)
        ones = "short one is" if len(sizes) == 1 else "short ones are"
        evidence = []
        for size in kinds[:3]:
            found = [w for w in context.story.windows if w.line == self.line]
            micros = [context.story.micros(w) for w in found if len(w.fresh) == size]
            what = (
                f"each micro-batch of an update of {size} weighs {figure(1 / every)} and should "
                f"weigh {'1' if size == 1 else f'1/{size}'}: it is {size}/{every} of the mean"
            )
            evidence.append((micros[0][-1] if micros and micros[0] else self.micro, what))
        return hit(
            "GA204",
            self.line,
            f"updates hold {self.shown} micro-batches while the loss is divided by {every}: the "
            f"{ones} {parts} of the mean ({plural(len(sizes), 'update')})",
            *evidence,
            severity="warning",
        )


def _judge(context: Context, windows: list[Window], seen: _Lengths) -> list[Hit]:
    sizes, every = seen.sizes, seen.every
    full, longest = sizes.count(every), max(sizes)
    short = [size for size in sizes if size < every]
    if any(window.step is not None and inside(window.step, context.story) for window in windows):
        return seen.hit(
            "GA102", ": the optimizer steps inside every backward, so nothing accumulates"
        )
    if longest > every and full:
        context.settled.add(seen.line)
        return seen.hit(
            "GA302",
            ": what an epoch leaves over is added to the next epoch's first window, which is "
            f"{longest / every:.3g} times the mean",
        )
    begun = full + sizes.count(sizes[0]) >= len(sizes)
    begun = begun or (full >= 2 and sizes[0] < every and all(n <= every for n in sizes))
    if short and full and sizes[0] < every and begun:
        context.settled.add(seen.line)
        return seen.hit("GA303", f": the first is {sizes[0]}/{every} of the mean")
    if short and full and longest == every:
        return seen.short(context, short)
    if short and len(sizes) > 1 and context.gated(seen.first, seen.line):
        context.settled.add(seen.line)
        return seen.hit("GA303", "")
    if len(sizes) == 1 and sizes[0] >= 2 and short:
        return seen.short(context, sizes)
    return []


def _means(terms: list[Series]) -> list[Series]:
    """Terms whose weight is that of a mean; a sum's own divisor may be anything's number."""
    kinds = ("mean", "none")
    found = [one for one in terms if one.terms[0].reduction in kinds or one.terms[0].masked]
    return [one for one in found if one.known and any(one.weights)]


def irregular(context: Context) -> Iterator[Hit]:
    """GA303: a test by remainder whose divisor moves."""
    for line, windows in context.lines():
        if line in context.settled or len(windows) < 4:
            continue
        if not all(window.whole and context.one_line(window) for window in windows):
            continue
        lengths = [len(window.fresh) for window in windows]
        inner = set(lengths[1:])
        if len(inner) < 3 or not context.gated(windows[0], line) or not gate_counts(line):
            continue
        terms = [one for _, found in context.plain(windows) for one in found]
        if terms and all(one.known and close(one.total, 1.0) for one in terms):
            continue  # as many as it is divided by, each time
        shown = ", ".join(map(str, lengths[:8]))
        yield from hit(
            "GA303",
            context.gate(windows[-1]) or line,
            f"updates hold {shown} micro-batches: the test for the step is by remainder, and what "
            "it divides by changes from one to the next",
            (line, "the step"),
        )


def without_brackets(context: Context) -> Iterator[Hit]:
    """GA303: `i + 1 % n == 0` is `i + (1 % n) == 0`, and so never, or only at the beginning."""
    for line, windows in context.lines():
        micros = context.story.micros(windows[0])
        condition = gate(line, place_of(micros[-1])) if micros else None
        number = unbracketed(condition)
        if not number or condition is None:
            continue
        lengths = ", ".join(str(len(window.fresh)) for window in windows[:8])
        yield from hit(
            "GA303",
            condition,
            f"`{number}` takes the remainder of 1 before it adds, so this does not count: updates "
            f"hold {lengths} micro-batches",
            (line, "the step"),
            mend="Put the sum in brackets: `(i + 1) % n == 0`.",
        )
        context.settled.add(line)


def leaks(context: Context) -> Iterator[Hit]:
    """GA302: windows that are longer than what the test for the step counts to."""
    for line, windows in context.lines():
        if line in context.settled or len(windows) < 3:
            continue
        seen = [window for window in windows if window.whole]
        if len(seen) < 3 or not all(w.fresh and not w.stale and context.one_line(w) for w in seen):
            continue
        condition = context.gate(seen[-1])
        every = counts_to(condition)
        lengths = [len(window.fresh) for window in seen]
        if condition is None or every < 2 or every not in lengths or max(lengths) <= every:
            continue
        if min(lengths) < every or max(lengths) >= 2 * every:
            continue
        shown = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
        yield from hit(
            "GA302",
            condition,
            f"updates hold {shown} micro-batches, though this counts to {every}: what an epoch "
            "leaves over is added to the next epoch's first window",
            (line, "the step"),
        )
        context.settled.add(line)


RULES = (without_brackets, wrong_length, irregular, leaks)
