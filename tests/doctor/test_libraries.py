"""Loops through real libraries: quiet where they are right, found where they are wrong."""

import importlib.util
import os

import pytest
from runs import diagnose

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
samples = {samples}
data = TensorDataset(torch.randn(samples, 4), torch.randint(0, 2, (samples,)))
loader = DataLoader(data, batch_size=2)
model = nn.Linear(4, 2)
"""

ACCELERATE = (
    HEAD
    + """\
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            {first}
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            {last}
"""
)

TRAINER = """\
import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x, labels{more}):
        out = self.inner(x)
        return {{"loss": nn.functional.cross_entropy(out, labels), "logits": out}}


samples = [{{"x": torch.randn(4), "labels": torch.tensor(i % 2)}} for i in range({samples})]
options = TrainingArguments(
    output_dir={folder!r}, per_device_train_batch_size=2, gradient_accumulation_steps=4,
    num_train_epochs=2, report_to=[], logging_strategy="no", save_strategy="no", use_cpu=True,
    disable_tqdm=True, dataloader_pin_memory=False,
)
trainer = Trainer(model=Net(), args=options, train_dataset=samples)
trainer.train()
"""

LIGHTNING = (
    HEAD
    + """\
import lightning


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.inner(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=2, accumulate_grad_batches=4, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), loader)
"""
)

FABRIC = (
    HEAD
    + """\
from lightning_fabric import Fabric

fabric = Fabric(accelerator="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for i, (x, y) in enumerate(loader):
    waits = (i + 1) % 4 != 0
    with fabric.no_backward_sync(model, enabled=waits):
        loss = nn.functional.cross_entropy(model(x), y){divided}
        fabric.backward(loss)
    if not waits:
        optimizer.step()
        optimizer.zero_grad()
"""
)

IGNITE = (
    HEAD
    + """\
from ignite.engine import create_supervised_trainer

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = create_supervised_trainer(
    model, optimizer, nn.CrossEntropyLoss(), gradient_accumulation_steps=4
)
trainer.run(loader, max_epochs=1)
"""
)

SKORCH = (
    HEAD
    + """\
import numpy
from skorch import NeuralNetClassifier


class Accumulating(NeuralNetClassifier):
    every = 4
    seen = 0

    def get_loss(self, *args, **more):
        return super().get_loss(*args, **more){divided}

    def train_step(self, batch, **more):
        step = self.train_step_single(batch, **more)
        self.seen += 1
        if self.seen % self.every == 0:
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        return self.inner(x).softmax(-1)


x, y = data.tensors[0].numpy(), data.tensors[1].numpy()
Accumulating(Net, max_epochs=2, batch_size=2, train_split=None, verbose=0).fit(x, y)
"""
)

LAST = {"first": "pass", "last": "optimizer.zero_grad()"}
FIRST = {"first": "optimizer.zero_grad()", "last": "pass"}
TAKE = "step = self.train_step_single(batch, **more)"
# library, what, script, its fields, and the code with the line that is to be found
CASES: list[tuple[str, str, str, dict[str, object], tuple[str, str] | None]] = [
    ("accelerate", "right", ACCELERATE, {"samples": 32, **LAST}, None),
    ("accelerate", "tail", ACCELERATE, {"samples": 20, **LAST}, ("GA204", "optimizer.step()")),
    ("accelerate", "zeroed", ACCELERATE, {"samples": 32, **FIRST}, ("GA102", FIRST["first"])),
    ("transformers", "right", TRAINER, {"samples": 16, "more": ""}, None),
    ("transformers", "its own tail", TRAINER, {"samples": 20, "more": ""}, None),
    (
        "transformers",
        "takes anything",
        TRAINER,
        {"samples": 16, "more": ", **more"},
        ("GA201", "trainer.train()"),
    ),
    ("lightning", "right", LIGHTNING, {"samples": 32}, None),
    ("lightning", "tail", LIGHTNING, {"samples": 20}, ("GA204", "trainer.fit(Net(), loader)")),
    ("lightning_fabric", "right", FABRIC, {"samples": 32, "divided": " / 4"}, None),
    (
        "lightning_fabric",
        "undivided",
        FABRIC,
        {"samples": 32, "divided": ""},
        ("GA201", "fabric.backward(loss)"),
    ),
    ("ignite", "right", IGNITE, {"samples": 32}, None),
    ("ignite", "leftover", IGNITE, {"samples": 36}, ("GA302", "trainer.run(loader, max_epochs=1)")),
    ("skorch", "right", SKORCH, {"samples": 32, "divided": " / self.every"}, None),
    ("skorch", "undivided", SKORCH, {"samples": 32, "divided": ""}, ("GA201", TAKE)),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize(
    ("library", "what", "text", "fields", "wanted"),
    [pytest.param(*case, id=f"{case[0]}, {case[1]}") for case in CASES],
)
def test_a_library(library, what, text, fields, wanted, tmp_path):
    if importlib.util.find_spec(library) is None:
        assert not os.environ.get("CI"), f"{library} must be tested by CI: the extra `peers`"
        pytest.skip(f"{library} is not installed (the extra `peers`)")
    script = (
        text.replace("{folder!r}", repr(str(tmp_path / "out")))
        .replace("{{", "{")
        .replace("}}", "}")
    )
    for name, value in fields.items():
        script = script.replace("{" + name + "}", str(value))
    seen = diagnose(script, tmp_path)
    assert seen.run.error == ""
    assert seen.optimizers[0].steps > 0
    lines = script.splitlines()
    told = [(one.code, lines[one.line - 1].strip()) for one in seen.findings]
    assert told == ([] if wanted is None else [wanted])
