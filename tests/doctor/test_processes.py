"""More processes than one: ranks are reported each and together, workers that load data are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from doctor_harness import DOCTOR, run

RANKS = """\
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
def main(rank=None, world=None, store=None):
    method = dict(init_method=f"file://{store}", rank=rank, world_size=world) if store else {}
    dist.init_process_group("gloo", **method)
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in range(3):
        for i in range(4):
            loss = model(torch.randn(4, 4)).square().mean() / 4
            loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 or window == 2:
            optimizer.zero_grad()
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""
SPAWNS = """\
import sys, torch.multiprocessing as mp
import ranks
if __name__ == "__main__":
    mp.start_processes(ranks.main, args=(2, sys.argv[2]), nprocs=2, start_method=sys.argv[1])
"""
LAUNCHES = """\
import subprocess, sys
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
sys.exit(subprocess.run([*command, "ranks.py"]).returncode)
"""
LOADS = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for context in ("fork", "spawn"):
        loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4, num_workers=1,
                            multiprocessing_context=context, shuffle=True)
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(model.weight)
"""


def report(path: Path) -> dict:
    return json.loads(path.read_text())


def check_ranks(folder: Path) -> None:
    whole = report(folder / "r.json")
    assert whole["verdict"].startswith("2 ranks")
    ranks = [report(folder / f"r.rank{rank}.json") for rank in (0, 1)]
    assert [(r["run"]["rank"], r["run"]["ranks"]) for r in ranks] == [(0, 2), (1, 2)]
    assert all(r["totals"]["backward"] == 12 and r["totals"]["step"] == 3 for r in ranks)
    assert [len(r["optimizers"]) for r in ranks] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a script that starts torchrun", "spawn", "fork"])
def test_one_report_for_each_rank_and_one_together(how: str, tmp_path: Path) -> None:
    for name, source in (("ranks", RANKS), ("spawns", SPAWNS), ("launches", LAUNCHES)):
        (tmp_path / f"{name}.py").write_text(source)
    command = {
        "a script that starts torchrun": ["launches.py"],
        "spawn": ["spawns.py", "spawn", str(tmp_path / "store")],
        "fork": ["spawns.py", "fork", str(tmp_path / "store")],
    }[how]  # fmt: skip
    done = run([*DOCTOR, "--json", "r.json", *command], tmp_path)
    assert done.code == 0, done.stderr.decode()
    check_ranks(tmp_path)


@pytest.mark.slow
def test_a_doctor_for_each_rank(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    doctor = ["--nproc-per-node", "2", "-m", "gradaccum", "doctor", "--json", "r.json", "ranks.py"]
    done = run([*launcher, *doctor], tmp_path)
    assert done.code == 0, done.stderr.decode()
    check_ranks(tmp_path)


@pytest.mark.slow
def test_loading_workers_are_not_reported_and_load_the_same(tmp_path: Path) -> None:
    (tmp_path / "loads.py").write_text(LOADS)
    plain = run([sys.executable, "loads.py"], tmp_path)
    under = run([*DOCTOR, "-q", "--trace", "t.jsonl", "--json", "r.json", "loads.py"], tmp_path)
    assert (under.code, under.stdout, under.stderr) == (plain.code, plain.stdout, plain.stderr)
    assert sorted(path.name for path in tmp_path.glob("[tr].*")) == ["r.json", "t.jsonl"]
    assert report(tmp_path / "r.json")["totals"]["backward"] == 8
