"""Lightning's manual optimisation: a step of training that its trainer calls."""

from .pairing import Pairs, codes, pair, twins

PAIRS: Pairs = {}

MODULE = """
import lightning as L

class Speaker(L.LightningModule):
    def __init__(self, every):
        super().__init__()
        self.automatic_optimization = False
        self.every = every
        self.net = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        plan = self.lr_schedulers()
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)@
        self.manual_backward(loss)
        if TEST:
            opt.step()
            opt.zero_grad()
            plan.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        plan = torch.optim.lr_scheduler.StepLR(opt, 10)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": plan, "interval": "step"}}
"""
LAST = " or self.trainer.is_last_batch"

pair(
    PAIRS,
    "an undivided loss",
    "GA201",
    MODULE.replace("TEST", "(batch_idx + 1) % self.every == 0" + LAST),
    "",
    " / self.every",
)

pair(
    PAIRS,
    "a tail that leaks",
    "GA302",
    MODULE.replace("@", " / self.every").replace("TEST", "(batch_idx + 1) % self.every == 0@"),
    "",
    LAST,
)

pair(
    PAIRS,
    "a first window that is too long",
    "GA303",
    MODULE.replace("@", " / 4").replace("TEST", "batch_idx > 0 and @ % 4 == 0" + LAST),
    "batch_idx",
    "(batch_idx + 1)",
)

pair(
    PAIRS,
    "a flush at the end of the epoch",
    "GA302",
    MODULE.replace("@", " / self.every").replace("TEST", "(batch_idx + 1) % self.every == 0")
    + """
    def @(self):
        opt = self.optimizers()
        opt.step()
        opt.zero_grad()
""",
    "restart",
    "on_train_epoch_end",
)


test_it_is_blamed_and_its_right_twin_is_not = twins(PAIRS)


def test_two_optimizers_in_turns_are_right():
    assert not codes("""
import lightning as L

class Painter(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = -self.judge(self.maker(batch)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = self.judge(self.maker(batch).detach()).mean() - self.judge(batch).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self):
        first = torch.optim.Adam(self.maker.parameters(), lr=1e-4)
        second = torch.optim.Adam(self.judge.parameters(), lr=1e-4)
        return [first, second], []
""")
