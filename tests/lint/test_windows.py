"""Windows that a default switches off are still windows; what was divided is never called whole."""

import pytest

from .test_mutation import codes

TRAINER = """
class Trainer:
    def __init__(self, model, loader, *, every=1, total=1000):
        self.model = model
        self.loader = loader
        self.every = every
        self.total = total
        self.opt = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.done = 0

    def train(self):
        while self.done < self.total:
            for _ in range(self.every):
                loss = self.model(next(self.loader)).mean()
                LOSS.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.done += 1
"""


def test_a_default_of_one_is_a_window_that_may_be_set():
    assert "GA201" in codes(TRAINER.replace("LOSS", "loss"))


@pytest.mark.parametrize("divided", ["(loss / self.every)", "(loss * (1 / self.every))"])
def test_what_was_divided_is_not_called_undivided(divided):
    assert not codes(TRAINER.replace("LOSS", divided))


def test_a_script_that_steps_every_time_stays_silent():
    assert not codes(TRAINER.replace("range(self.every)", "range(1)").replace("LOSS", "loss"))


PLANNED = """
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(args.epochs):
    for i, start in enumerate(RANGE):
        loss = model(data[start : start + args.size]).mean() / args.every
        loss.backward()
        if (i + 1) % args.every == 0:
            opt.step()
            opt.zero_grad()
"""


def test_a_tail_is_reported_whether_data_or_settings_leave_one():
    head = "args = settings()\ndata = load()\n"
    assert "GA302" in codes(head + PLANNED.replace("RANGE", "range(0, len(data), args.size)"))
    assert "GA302" in codes(head + PLANNED.replace("RANGE", "range(0, args.total, args.size)"))


IGNORED = """
def train(model, loader, every):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        PREPARE
        loss = torch.nn.functional.cross_entropy(model(x), y, ignore_index=0)
        (loss / every).backward()
        if (i + 1) % every == 0:
            opt.step()
            opt.zero_grad()
"""


def test_a_mean_over_tokens_is_noted_only_where_the_script_makes_some_to_ignore():
    assert "GA203" in codes(IGNORED.replace("PREPARE", "y = y.masked_fill(y < 0, 0)"))
    assert "GA203" not in codes(IGNORED.replace("PREPARE", "y = y.long()"))


EVAL = """
def train(model, loader):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        FIRST
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        LAST
"""


def test_eval_right_before_the_forward_is_meant_and_eval_left_over_is_not():
    assert "GA703" in codes(EVAL.replace("FIRST", "pass").replace("LAST", "model.eval()"))
    assert "GA703" not in codes(EVAL.replace("FIRST", "model.eval()").replace("LAST", "pass"))
