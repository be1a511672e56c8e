"""Plant the faults that need something beside the loop: a mask, a stream, a shared weight."""

import re

import pytest

from gradaccum.lint.files.program import Program
from gradaccum.lint.judge import judge

from .good_loops import HEAD, LOOPS
from .planting import Change, at, both, indent, insert, name_of, replace

MORE = """
from contextlib import nullcontext
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint

class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 9

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), []

    def forward(self, x):
        self.seen.append(1)
        return self.linear(x)

block, dropper = Block(), nn.Dropout(0.1)
phase = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
mask, ids = dataset.mask, dataset.ids
"""


def codes(text: str, head: str = HEAD) -> set[str]:
    program = Program({"loop.py": head + MORE + text})
    module = program.load("loop.py")
    assert module is not None, text
    return {one.code for one in judge(program, module)}


def flushed(lines: list[str]) -> bool:
    index = at(lines, "G")
    return index is not None and "== len(" in lines[index]


def floored(lines: list[str]) -> list[str] | None:
    """Plan the schedule for the full windows alone, though the loop steps the short one too."""
    if not flushed(lines) or at(lines, "H") is None:
        return None
    found = [index for index, line in enumerate(lines) if "StepLR(" in line]
    if not found:
        return None
    lines[found[0]] = re.sub(
        r"StepLR\((\S+), 10\)", r"OneCycleLR(\1, 0.1, total_steps=3 * (len(loader) // k))",
        lines[found[0]],
    )  # fmt: skip
    return lines


def synced_first(lines: list[str]) -> list[str] | None:
    """Wrap the model, and leave `no_sync` at the window's first micro-batch, not its last."""
    places = [at(lines, tag) for tag in ("F", "D", "B", "G", "M")]
    model = name_of(lines, "M")
    if None in places or model is None:
        return None
    first, middle, last, gate, made = [place for place in places if place is not None]
    counter = re.search(r"\((\w+) \+ 1\) % (\S+)", lines[gate])
    if (middle, last) != (first + 1, first + 2) or counter is None:
        return None
    index, every = counter.groups()
    head = f"{indent(lines[first])}with {model}.no_sync() if {index} % {every} else nullcontext():"
    body = [f"    {line}" for line in lines[first : last + 1]]
    lines[first : last + 1] = [head, *body]
    wrap = f"{indent(lines[made])}{model} = nn.parallel.DistributedDataParallel({model})"
    lines.insert(made + 1, wrap)
    return lines


def tied(lines: list[str]) -> list[str] | None:
    """Share the weight of the first layer with the last, and clip both."""
    model, clip = name_of(lines, "M"), at(lines, "C")
    if model is None or clip is None or "self" in model:
        return None
    lines[clip] = re.sub(
        r"norm_\(\S+\.parameters\(\)", r"norm_([*words.parameters(), *head.parameters()]",
        lines[clip],
    )  # fmt: skip
    made = at(lines, "M")
    assert made is not None
    space = indent(lines[made])
    lines[made + 1 : made + 1] = [
        f"{space}words, head = nn.Embedding(9, 4), nn.Linear(4, 9)",
        f"{space}head.weight = words.weight",
        f"{space}{model} = nn.Sequential(words, {model}, head)",
    ]
    return lines


MUTANTS: list[tuple[str, str, Change]] = [
    ("GA106", "added to after zeroing",
     insert("Z", "for p in MODEL.parameters(): p.grad += 1e-3")),
    ("GA206", "bare count of a mask", insert("D", "LOSS = (LOSS * mask).sum() / mask.sum()")),
    ("GA207", "padding counted", insert("D", "keep = ids != 0; LOSS = LOSS / ids.numel()")),
    ("GA312", "floor and flush", floored),
    ("GA408", "square of a complex gradient", insert("B", "size = (phase.grad ** 2).sum()")),
    ("GA409", "norms of frozen parameters",
     both(insert("M", "MODEL.body = nn.Linear(4, 4); MODEL.body.requires_grad_(False)"),
          insert("B", "sizes = [p.grad.norm() for p in MODEL.parameters()]"))),
    ("GA410", "clip of sparse gradients",
     both(insert("M", "MODEL = nn.Sequential(nn.Embedding(9, 4, sparse=True), MODEL)"),
          replace("C", "$", "  #C"))),
    ("GA411", "tied weights clipped twice", tied),
    ("GA504", "checkpoint that counts",
     insert("D", "LOSS = LOSS + checkpoint(block, ids).mean()", after=False)),
    ("GA505", "checkpoint without random state",
     insert("D", "LOSS = LOSS + checkpoint(dropper, ids, preserve_rng_state=False).mean()",
            after=False)),
    ("GA603", "no_sync one off", synced_first),
]  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_right_loops_are_silent_beside_all_that(name):
    assert codes(LOOPS[name]) <= {"GA204", "GA311", "GA701"}


def planted(code: str, change: Change, head: str = HEAD) -> tuple[list[str], list[str]]:
    found, missed = [], []
    for name, text in LOOPS.items():
        lines = change(text.splitlines())
        if lines is not None:
            where = found if code in codes("\n".join(lines) + "\n", head) else missed
            where.append(name)
    return found, missed


def test_nine_of_ten_planted_faults_are_found():
    total = tried = 0
    for code, what, change in MUTANTS:
        found, missed = planted(code, change)
        count = len(found) + len(missed)
        print(f"{code} {what:32} {len(found):3} of {count:3}  {', '.join(missed)}")  # noqa: T201
        assert count, what
        total, tried = total + len(found), tried + count
    print(f"{total} of {tried}")  # noqa: T201
    assert total >= 0.9 * tried


def test_a_stream_whose_length_ends_the_window():
    head = HEAD.replace("dataset.train", "Stream()")
    head, stream = head.split("loader = ")[0], "loader = " + head.split("loader = ")[1]

    def change(lines: list[str]) -> list[str] | None:
        inside = any("enumerate(loader)" in line for line in lines)
        return [*stream.splitlines(), *lines] if inside and flushed(lines) else None

    found, missed = planted("GA310", change, head)
    assert found
    assert not missed


def test_a_schedule_that_goes_on_where_the_scaler_skipped():
    lines = LOOPS["amp"].splitlines()
    assert "GA311" in codes(LOOPS["amp"])
    update, schedule = at(lines, "P"), at(lines, "H")
    assert update is not None
    assert schedule is not None
    inner = indent(lines[schedule])
    lines[schedule] = f"{inner}if scaler.get_scale() >= before:\n{inner}    scheduler.step()"
    lines[update] = f"{inner}before = scaler.get_scale()\n{lines[update]}"
    assert "GA311" not in codes("\n".join(lines) + "\n")
