"""`torch.compile` under the doctor: the same graphs and numbers, and what is wrong is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from runs import found

from doctor_harness import DOCTOR, run

COMPILED = """\
import torch
from torch import nn
from torch._dynamo.utils import counters
torch.manual_seed(0)
torch.set_num_threads(1)
inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
model = torch.compile(inner, backend="aot_eager")
optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
for i in range(24):
    loss = model(torch.randn(5, 4)).square().mean() / 4
    loss.backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
print(loss.item(), [p.tolist() for p in inner.parameters()], torch.get_rng_state().sum())
print(sorted(counters["stats"].items()), sorted(counters["graph_break"].items()))

@torch.compile(backend="aot_eager")
def compute(x):
    return inner(x).square().mean() / 2

for i in range(8):
    compute(torch.randn(3, 4)).backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
print([p.tolist() for p in inner.parameters()])
"""


@pytest.mark.slow
def test_a_compiled_model_is_the_same_and_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COMPILED)
    plain = run([sys.executable, "train.py"], tmp_path)
    assert plain.code == 0, plain.stderr.decode()
    under = run([*DOCTOR, "-q", "--json", "r.json", "train.py"], tmp_path)
    assert under == plain
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["findings"] == []
    assert (report["totals"]["backward"], report["totals"]["step"]) == (32, 10)


def test_a_fault_around_a_compiled_model_is_found(tmp_path: Path) -> None:
    text = COMPILED.replace("optimizer.zero_grad()", "pass")
    line = 1 + text.splitlines().index("        optimizer.step()")
    try:
        assert ("GA101", line) in found(text, tmp_path)
    finally:
        torch._dynamo.reset()
