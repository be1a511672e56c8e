"""Plant each fault in twenty right loops, mechanically, and count how many are found."""

import pytest

from .good_loops import LOOPS
from .planting import Change, both, codes, insert, move, remove, replace, twice

MUTANTS: list[tuple[str, str, Change]] = [
    ("GA101", "no zeroing", remove("Z")),
    ("GA102", "zeroed before each forward", move("Z", "F", after=False)),
    ("GA102", "zeroed before each backward", move("Z", "B", after=False)),
    ("GA103", "zeroed before the step", move("Z", "S", after=False)),
    ("GA201", "not divided", remove("D")),
    ("GA202", "divided twice", twice("D")),
    ("GA301", "stepped twice", twice("S")),
    ("GA302", "tail dropped", replace("G", r" or .*:", ":")),
    ("GA303", "off by one", replace("G", r"\(i \+ 1\) % (\S+) == 0 or", r"i % \1 == 0 or")),
    ("GA303", "inverted", replace("G", r"% (\S+) == 0", r"% \1 != 0")),
    ("GA305", "scheduler each time", move("H", "B")),
    ("GA401", "clip each time", move("C", "B")),
    ("GA402", "no unscale", remove("U")),
    ("GA403", "unscale each time", move("U", "B")),
    ("GA404", "no update", remove("P")),
    ("GA405", "clip after the step", move("C", "S")),
    (
        "GA406",
        "past the scaler",
        both(replace("S", r"\S+\.step\((\S+)\)", r"\1.step()"), remove("U")),
    ),
    ("GA501", "losses kept", insert("B", "history.append(LOSS)")),
    ("GA501", "running loss", insert("B", "dataset.total += LOSS")),
    ("GA502", "retained", replace("B", r"\.backward\(\)", ".backward(retain_graph=True)")),
    ("GA503", "detached", replace("D", r"= (\S+) /", r"= \1.detach() /")),
    ("GA601", "wrapped", insert("M", "MODEL = nn.parallel.DistributedDataParallel(MODEL)")),
    ("GA703", "left in eval", insert("S", "MODEL.eval()")),
]


@pytest.mark.parametrize("name", LOOPS)
def test_right_loops_are_silent(name):
    assert codes(LOOPS[name]) == set()


def table() -> dict[str, tuple[int, int, list[str]]]:
    rows: dict[str, tuple[int, int, list[str]]] = {}
    for code, what, change in MUTANTS:
        found = tried = 0
        missed = []
        for name, text in LOOPS.items():
            lines = change(text.splitlines())
            if lines is None:
                continue
            tried += 1
            if code in codes("\n".join(lines) + "\n"):
                found += 1
            else:
                missed.append(name)
        rows[f"{code} {what}"] = (found, tried, missed)
    return rows


def test_nine_of_ten_planted_faults_are_found():
    rows = table()
    for what, (found, tried, missed) in rows.items():
        print(f"{what:40} {found:3} of {tried:3}  {', '.join(missed)}")  # noqa: T201
    found = sum(row[0] for row in rows.values())
    tried = sum(row[1] for row in rows.values())
    print(f"{found} of {tried}")  # noqa: T201
    assert all(tried for _, tried, _ in rows.values())
    assert found >= 0.9 * tried
