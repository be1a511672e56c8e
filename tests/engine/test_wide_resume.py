"""A window of wide sums, saved half way, goes on in a fresh process, with every optimizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga

EVERY, STOP, BATCHES = 4, 6, 10
# LBFGS evaluates its loss several times; SparseAdam takes sparse gradients, which a Linear has not
LEFT_OUT = {"Optimizer", "LBFGS", "SparseAdam"}
NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in LEFT_OUT
)


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    bias = name != "Muon"  # it takes matrices only
    model = nn.Sequential(nn.Linear(4, 8, bias=bias), nn.Tanh(), nn.Linear(8, 2, bias=bias))
    model.bfloat16()
    return model, getattr(torch.optim, name)(model.parameters(), lr=0.01)


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator).bfloat16() for _ in range(BATCHES)]


def train(model: nn.Module, acc: ga.Accumulator, batches: list[Tensor], stop: int = 0) -> None:
    loop = acc.microbatches(batches)
    for i, micro in enumerate(loop, 1):
        micro.backward(model(micro.batch).float().square().sum(), len(micro.batch))
        if i == stop:
            break


def accumulator(
    model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: Any
) -> ga.Accumulator:
    return ga.Accumulator(model, optimizer, every=EVERY, accumulate_dtype=accumulate)


def go_on(path: str) -> None:
    """What the fresh process does with each saved window."""
    saved = torch.load(path, weights_only=True)
    ends = {}
    for key, state in saved.items():
        name, accumulate = key.split()
        model, optimizer = build(name)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if name == "NAdam":
            # torch's load_state_dict rounds this float32 number to the parameter's dtype
            for i, values in enumerate(optimizer.state.values()):
                values["mu_product"] = state["optimizer"]["state"][i]["mu_product"]
        acc = accumulator(model, optimizer, widths()[accumulate])
        acc.load_state_dict(state["window"])
        train(model, acc, data()[STOP:])
        ends[key] = model.state_dict()
    torch.save(ends, path)


def widths() -> dict[str, Any]:
    return {"float32": torch.float32, "compensated": "compensated"}


@pytest.mark.filterwarnings("ignore::gradaccum.errors.OpenWindowWarning")
def test_every_optimizer_goes_on_to_the_bit_in_a_fresh_process(tmp_path: Path) -> None:
    saved, truth = {}, {}
    for name in NAMES:
        for width, accumulate in widths().items():
            model, optimizer = build(name)
            train(model, accumulator(model, optimizer, accumulate), data())
            truth[f"{name} {width}"] = model.state_dict()
            model, optimizer = build(name)
            acc = accumulator(model, optimizer, accumulate)
            train(model, acc, data(), stop=STOP)
            assert acc.pending == STOP % EVERY
            saved[f"{name} {width}"] = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "window": acc.state_dict(),
            }
            acc.discard()
    path = tmp_path / "saved.pt"
    torch.save(saved, path)
    done = subprocess.run(
        [sys.executable, __file__, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ends = torch.load(path, weights_only=True)
    assert ends.keys() == truth.keys()
    assert len(truth) >= 2 * 11
    unlike = [
        key for key in truth if not all(map(torch.equal, ends[key].values(), truth[key].values()))
    ]
    assert unlike == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    go_on(sys.argv[1])
