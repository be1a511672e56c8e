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
