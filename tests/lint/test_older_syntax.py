"""What this Python no longer parses: the finding says so, and the loops are read all the same."""

import pytest

from gradaccum.lint.engine import lint_source
from gradaccum.lint.files.older import modernised
from gradaccum.lint.files.program import Program
from gradaccum.lint.files.sources import Source
from gradaccum.lint.settings import load

from .good_loops import HEAD

LOOP = """
model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(9):
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        LINE
        loss = criterion(model(x), y) / k
        loss.backward()
        if (i + 1) % k == 0:
            opt.step()
            opt.zero_grad()
"""
LINES = [
    "y = y.cuda(async=True)",
    "print 'loss', loss.data[0]",
    "print 'epoch %d of %d' % (\n            epoch, 9)",
    "if i == 0: print i",
    "if i <> 0: pass",
    "try: check(x)\n        except IOError, error: pass",
    "if i > 9: raise ValueError, 'too many'",
    "seen = 10L + 0777",
    "\tpass",
]


def codes(line: str) -> list[str]:
    text = HEAD + LOOP.replace("        LINE", "        " + line if line[0] != "\t" else line)
    found = lint_source(Source("old.py", text.encode()), Program(), load([], []))
    return sorted(item.code for item in found)


@pytest.mark.parametrize("line", LINES)
def test_the_loop_is_read_and_the_finding_says_that_it_does_not_parse(line):
    assert codes(line) == ["GA001", "GA302"]


def test_what_parses_is_not_called_old():
    assert codes("print('loss', loss)") == ["GA302"]


def test_what_is_no_python_at_all_stays_unread():
    assert codes("print (((") == ["GA001"]
    assert modernised("x = = 3\n") is None


def test_lines_stay_where_they_are():
    old = "print 'a'\nx.cuda(async=True)\nopt.step()\n"
    new = modernised(old)
    assert new is not None
    assert new.splitlines()[2] == "opt.step()"
    assert new.count("\n") == old.count("\n")
