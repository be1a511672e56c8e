"""The tutorial that started this: its example and its three "incorrect" loops, restated."""

from runs import diagnose

HEAD = """\
import torch

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.tensor([[1.0]], requires_grad={asks})
y = torch.tensor([[2.0]])
"""

EXAMPLE = (
    HEAD.format(asks=True)
    + """\
for _ in range(3):
    guess = model(x)
    loss = ((guess - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p += -optimizer.param_groups[0]["lr"] * p.grad.data
"""
)

FORGETS = """\
import torch

model = torch.nn.Linear(1, 1)
x, y = torch.tensor([[1.0]]), torch.tensor([[2.0]])
for _ in range(3):
    guess = model(x)
    loss = ((guess - y) ** 2).mean()
    loss.backward()
"""

WITHOUT_BACKWARD = (
    HEAD.format(asks=False)
    + """\
for _ in range(3):
    guess = model(x)
    loss = ((guess - y) ** 2).mean()
    optimizer.step()
    optimizer.zero_grad()
"""
)

THROUGH_DATA = (
    HEAD.format(asks=False)
    + """\
for _ in range(3):
    guess = model(x)
    loss = ((guess - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.data -= optimizer.param_groups[0]["lr"] * p.grad
"""
)


def test_its_example_accumulates_nothing(tmp_path):
    seen = diagnose(EXAMPLE, tmp_path)
    assert [(one.code, one.severity, one.line) for one in seen.findings] == [
        ("GA105", "warning", 5),  # x asks for a gradient
        ("GA102", "note", 10),  # zero_grad in each pass
        ("GA309", "note", 14),  # the line that writes the parameters
    ]
    assert "`x` asked for a gradient that no optimizer owns" in seen.findings[0].message
    assert "3 updates of one micro-batch each: nothing was accumulated" in seen.verdict
    assert "gradients were zeroed in each" in seen.verdict
    assert "made outside any optimizer (line 14)" in seen.verdict
    assert "3 updates of one micro-batch each: the gradients are zeroed" in seen.findings[1].message
    assert "3 updates of 2 parameters are made by this line" in seen.findings[2].message
    assert [window.stepped for window in seen.windows if window.microbatches] == [True] * 3
    assert {item.line for item in seen.findings[0].evidence} == {10, 11}


def test_the_first_never_clears_and_never_steps(tmp_path):
    seen = diagnose(FORGETS, tmp_path)
    assert [(one.code, one.line) for one in seen.findings] == [("GA101", 8)]
    assert "3 backwards and no update: gradients were never cleared and never used" in seen.verdict


def test_the_second_steps_on_gradients_that_no_backward_made(tmp_path):
    seen = diagnose(WITHOUT_BACKWARD, tmp_path)
    assert [(one.code, one.line) for one in seen.findings] == [("GA301", 10)]
    assert "3 steps, none with a gradient: no backward made any" in seen.verdict


def test_the_third_is_not_wrong_in_what_it_computes(tmp_path):
    seen = diagnose(THROUGH_DATA, tmp_path)
    assert {one.severity for one in seen.findings} <= {"note"}
    assert "made outside any optimizer (line 13)" in seen.verdict
    assert "not wrong in what it computes" in seen.verdict
