"""`ga.watch()` and the pytest fixture: the doctor in one's own process, and nothing left of it."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import found
from torch import nn

import gradaccum as ga
from gradaccum.errors import LoopError
from gradaccum.faults import CATALOGUE

WATCHED = (
    torch.Tensor,
    torch.nn.Parameter,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
    torch.autograd.Variable,
    torch.nn.parallel.DistributedDataParallel,
    torch.utils.data.dataloader._BaseDataLoaderIter,
    torch.nn.utils,
    torch.nn.utils.clip_grad,
    sys.modules["torch.optim.optimizer"],
)


def everything() -> list[dict[str, Any]]:
    """What hooks could have been left in, by identity: what is held, and functions' code."""
    module = sys.modules["torch.optim.optimizer"]
    tables = [vars(holder) for holder in WATCHED]
    hooks = [module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks]
    engine = sys.modules["torch.autograd.graph"]
    return [
        {
            key: (id(value), id(getattr(inspect.unwrap(value), "__code__", None)))
            if callable(value) and not isinstance(value, type)
            else id(value)
            for key, value in table.items()
        }
        for table in (*tables, vars(engine), *hooks)
    ]


def loop(zero: bool = True, windows: int = 4) -> nn.Module:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(windows):
        for _ in range(2):
            (model(torch.randn(4, 3)).square().mean() / 2).backward()
        optimizer.step()
        if zero:
            optimizer.zero_grad()
    return model


def test_no_hook_is_left() -> None:
    loop()  # torch imports some of itself when it is first used
    before = everything()
    with ga.watch():
        assert everything() != before
        loop()
    assert everything() == before


def test_no_hook_is_left_after_an_error() -> None:
    before = everything()
    with pytest.raises(TypeError), ga.watch():
        loop(windows="four")  # type: ignore[arg-type]
    assert everything() == before


def test_it_finds_a_fault_and_only_where_there_is_one() -> None:
    with ga.watch() as trace:
        loop(zero=False)
    assert [finding.code for finding in trace.findings] == ["GA101"]
    assert trace.findings[0].path == __file__
    assert "GA101" in trace.report()
    with ga.watch() as trace:
        loop()
    assert trace.findings == ()


def test_nothing_watched_is_no_error() -> None:
    with ga.watch() as trace:
        pass
    assert trace.findings == ()
    assert trace.report()


def test_the_same_numbers_with_and_without() -> None:
    def numbers() -> list[Any]:
        torch.manual_seed(3)
        model = loop()
        return [*(p.tolist() for p in model.parameters()), torch.get_rng_state().tolist()]

    plain = numbers()
    with ga.watch():
        watched = numbers()
    assert watched == plain


def test_no_tensor_is_kept_alive() -> None:
    kept: list[weakref.ref[Any]] = []

    def train() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            x = torch.randn(4, 3, requires_grad=True)
            loss = model(x).mean()
            loss.backward()
            kept.extend(map(weakref.ref, (x, loss, model.weight, model.weight.grad)))
            optimizer.step()
            optimizer.zero_grad()
        kept.extend(map(weakref.ref, (model, optimizer)))

    gc.collect()
    gc.disable()
    try:
        with ga.watch():
            train()
            gc.collect()
            assert [reference() for reference in kept if reference() is not None] == []
    finally:
        gc.enable()


def test_one_at_a_time_and_judged_afterwards() -> None:
    with ga.watch() as trace:
        with pytest.raises(LoopError, match="running already"):
            ga.watch().__enter__()
        with pytest.raises(LoopError, match="before the block is left"):
            trace.report()
    assert trace.report()
    with pytest.raises(LoopError, match="running already"):
        trace.__enter__()


def test_reports_are_written(tmp_path: Path) -> None:
    with ga.watch() as trace:
        loop(zero=False)
    trace.report(html=str(tmp_path / "r.html"), json=str(tmp_path / "r.json"))
    assert "GA101" in (tmp_path / "r.html").read_text()
    assert '"GA101"' in (tmp_path / "r.json").read_text()


TESTS = """
import torch
def train(zero):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.ones(3, 2)).square().mean().backward()
        optimizer.step()
        if zero:
            optimizer.zero_grad()
def test_good(training_doctor): train(True)
def test_bad(training_doctor): train(False)
def test_own_failure(training_doctor): train(False); assert 0, "own"
def test_unasked(): train(False)
"""


@pytest.mark.slow
def test_the_fixture_fails_a_test_whose_loop_has_a_fault(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-p", "no:cacheprovider", "-q", "-rA", "--disable-plugin-autoload"]
    command = [sys.executable, "-m", "pytest", *options, "-p", "gradaccum.doctor.fixture", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "GA101" in done.stdout
    assert "FAILED test_it.py::test_own_failure - AssertionError: own" in done.stdout


def test_the_plugin_imports_no_torch() -> None:
    code = "import gradaccum.doctor.fixture, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_model_without_memory_that_lives_beside_is_no_trouble(tmp_path: Path) -> None:
    fault = CATALOGUE["GA101"]
    beside = torch.nn.Linear(2, 2, device="meta"), torch.nn.LazyLinear(3)
    codes = [code for code, _ in found(f"{fault.prelude}\n{fault.bad}", tmp_path)]
    assert codes == ["GA101"]
    del beside


THREADS = """\
import threading, torch
from torch import nn
import gradaccum as ga
def train():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(600):
        (model(torch.full((2, 3), float(i % 7))).tanh().mean() / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
with ga.watch() as trace:
    threads = [threading.Thread(target=train) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
totals = trace.diagnosis.totals
print(totals["backward"], totals["step"], totals.get("step_failed", 0))
"""


@pytest.mark.slow
def test_threads_that_train_are_not_disturbed(tmp_path: Path) -> None:
    """To read a gradient while another thread's engine writes to it ended the process."""
    (tmp_path / "threads.py").write_text(THREADS)
    done = subprocess.run(
        [sys.executable, "threads.py"], cwd=tmp_path, capture_output=True, timeout=300, text=True
    )
    assert (done.returncode, done.stdout) == (0, "3600 1800 0\n"), done.stderr[-2000:]


def test_what_cannot_be_listened_to_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradaccum.doctor.touch.grafted", lambda _function, _graft: None)
    with ga.watch() as trace:
        loop()
    assert "Not everything was seen (not listened to: " in trace.diagnosis.verdict
    assert "_engine_run_backward" in trace.diagnosis.verdict


def test_a_fault_of_the_doctor_itself_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ArithmeticError("one\nand two")

    monkeypatch.setattr("gradaccum.doctor.hooks.modules._Watch.before_zero", fails)
    with ga.watch() as trace:
        loop().zero_grad()
    assert "ArithmeticError: one and two)." in trace.diagnosis.verdict


def test_nothing_of_the_kind_is_said_otherwise() -> None:
    with ga.watch() as trace:
        loop()
    assert "Not everything" not in trace.diagnosis.verdict
