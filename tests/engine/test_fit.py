"""`gradaccum.fit`: what it reports, what it chooses, and what it refuses."""

import dataclasses
import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import gradaccum as ga
from gradaccum.errors import GradaccumError, InputError, PlanError
from memory_models import cases, loss_fn, padded


def tagger():
    torch.manual_seed(0)
    case = cases()["transformer"]()
    lengths = torch.randint(4, 60, (32,)).tolist()
    return case.model, padded(lengths), lengths


def test_with_lengths_it_plans():
    model, batch, lengths = tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    loose = ga.fit(model, loss_fn, batch, optimizer=optimizer, lengths=lengths)
    assert loose.auto
    assert loose.plan is not None
    assert loose.fits
    limit = loose.memory.bytes(4, max(lengths))
    found = ga.fit(model, loss_fn, batch, optimizer=optimizer, lengths=lengths, memory=limit)
    assert found.plan is not None
    assert found.microbatches == len(found.plan) > 4
    assert found.peak == max(micro.bytes for micro in found.plan) <= limit
    assert found.parameters == sum(p.nbytes for p in model.parameters())
    assert found.gradients == found.parameters
    assert 2 * found.parameters <= found.optimizer <= 2.01 * found.parameters
    measured = [row for row in found.rows if row.measured]
    assert {row.samples for row in measured} == {2, 4}
    assert all(row.bytes <= limit for row in measured)
    for row in measured:
        assert found.memory.bytes(row.samples, row.width) == pytest.approx(row.bytes, rel=0.01)
    assert max(row.samples for row in found.rows) == 32


def test_without_lengths_it_splits_evenly():
    model = nn.Linear(100, 100)
    found = ga.fit(model, loss_fn, torch.randn(100, 100), memory="1GiB")
    assert (found.microbatches, found.microbatch, found.plan) == (1, 100, None)
    limit = found.memory.bytes(30)
    found = ga.fit(model, loss_fn, torch.randn(100, 100), memory=limit)
    assert (found.microbatches, found.microbatch) == (4, 25)
    assert found.peak <= limit
    assert found.optimizer == 0


def test_what_it_chose_is_within_the_limit_when_it_runs():
    from gradaccum.planner.meter import meter_for

    model, batch, lengths = tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    least = ga.fit(model, loss_fn, batch, optimizer=optimizer, lengths=lengths)
    limit = max(least.memory.bytes(2, max(lengths)), least.memory.floor)
    found = ga.fit(model, loss_fn, batch, optimizer=optimizer, lengths=lengths, memory=limit)
    assert found.plan is not None
    acc = ga.Accumulator(model, optimizer, every=len(found.plan))
    from gradaccum.planner.split import gather

    samples = gather([batch], lengths=lengths)
    meter = meter_for("cpu")
    before = meter.used(model.parameters())
    with meter.peak(marks=False) as peak:
        for micro in acc.microbatches(samples.microbatch(m.indices, m.width) for m in found.plan):
            micro.backward(*loss_fn(model, micro.batch))
    assert before + peak.bytes <= 1.05 * limit


def test_nothing_fits_and_it_says_what_would():
    model, batch, lengths = tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    for memory in (1, "300KB"):
        found = ga.fit(model, loss_fn, batch, optimizer=optimizer, lengths=lengths, memory=memory)
        assert not found.fits
        assert found.plan is None
        assert found.seconds == 0
        assert "Nothing fits: what stays" in found.verdict()
    tight = found.memory.floor + 1
    found = ga.fit(model, loss_fn, batch, optimizer=optimizer, lengths=lengths, memory=tight)
    assert not found.fits
    assert "Not every sample fits" in found.verdict()
    again = ga.fit(model, loss_fn, batch, optimizer=optimizer, lengths=lengths, memory=found.peak)
    assert again.fits, "what it asked for is enough"


def test_the_table():
    model, batch, lengths = tagger()
    text = str(ga.fit(model, loss_fn, batch, lengths=lengths, memory="200KB"))
    assert "32 samples on cpu, memory 195.3 KiB (given)" in text
    assert "measured" in text
    assert "predicted, does not fit" in text
    assert "width" in text
    assert "width" not in str(ga.fit(nn.Linear(3, 3), loss_fn, torch.randn(8, 3)))


@pytest.mark.parametrize("memory", ["auto", 1, "2MB"])
def test_json_and_back(memory):
    model, batch, lengths = tagger()
    found = ga.fit(model, loss_fn, batch, lengths=lengths, memory=memory)
    assert ga.Fit.from_json(found.to_json()) == found
    plain = ga.fit(nn.Linear(3, 3), loss_fn, torch.randn(8, 3), memory=memory)
    assert ga.Fit.from_json(plain.to_json()) == plain
    names = {field.name for field in dataclasses.fields(found)} | {"version"}
    assert json.loads(found.to_json()).keys() == names


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"rows": [{}]},
        {"plan": {}},
        {"memory": {"phases": [], "resident": 1, "step": 0}},
        {"samples": "8"},
        {"seconds": None},
        {"seconds": float("nan")},
        {"auto": 1},
        {"rows": 5},
    ],
)
def test_text_that_is_no_fit(change):
    found = ga.fit(nn.Linear(3, 3), loss_fn, torch.randn(8, 3), memory="1GiB")
    broken = json.dumps({**json.loads(found.to_json()), **change})
    with pytest.raises(PlanError, match="not a `Fit` that this version can read"):
        ga.Fit.from_json(broken)
    for text in ("", "[]", "null", "{}"):
        with pytest.raises(PlanError, match="not a `Fit`"):
            ga.Fit.from_json(text)


def test_a_batch_of_one_and_of_three():
    for n in (1, 3):
        found = ga.fit(nn.Linear(3, 3), loss_fn, torch.randn(n, 3), memory="1GiB")
        assert (found.samples, found.microbatches, found.microbatch) == (n, 1, n)
    found = ga.fit(cases()["lstm"]().model, loss_fn, padded([5]), lengths=[5], memory="1GiB")
    assert found.microbatches == 1


def test_a_list_of_samples_with_means():
    def mean_loss(model, x):
        return model(x).square().mean(), x.numel()

    found = ga.fit(
        nn.Linear(3, 3),
        mean_loss,
        [torch.randn(3) for _ in range(9)],
        collate=torch.stack,
        reduction="mean",
        memory="1GiB",
    )
    assert found.samples == 9


@pytest.mark.parametrize("counted", [0, 5, 8])
def test_labels_that_are_ignored_in_the_samples_that_ran(counted):
    """A batch counts nothing only where none of its samples does."""
    own = torch.arange(9) == counted

    def masked(model, batch):
        x, own = batch
        return (model(x).square().sum(1) * own).sum(), own.sum()

    assert ga.fit(nn.Linear(3, 3), masked, (torch.zeros(9, 3), own), memory="1GiB").fits
    with pytest.raises(InputError) as caught:
        ga.fit(nn.Linear(3, 3), masked, (torch.zeros(9, 3), own & False), memory="1GiB")
    assert caught.value.slug == "window-without-count"


OTHER = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ({"memory": "much"}, "memory-size"),
        ({"model": nn.Identity()}, "model"),
        ({"model": 5}, "model"),
        ({"loss_fn": lambda model, x: model(x).sum()}, "loss-without-count"),
        ({"loss_fn": lambda model, x: (model(x), 1)}, "loss-not-scalar"),
        ({"loss_fn": lambda model, x: (model(x).sum().detach(), 1)}, "loss-without-graph"),
        ({"loss_fn": lambda model, x: (model(x).sum(), 0)}, "window-without-count"),
        ({"loss_fn": lambda model, x: (OTHER(x).sum(), len(x))}, "loss-without-graph"),
        ({"loss_fn": 5}, "loss-fn"),
        ({"model": nn.LazyLinear(3)}, "model-lazy"),
        ({"model": nn.Linear(3, 3, device="meta")}, "on-meta"),
        ({"batch": torch.randn(8, 3, device="meta")}, "on-meta"),
        ({"optimizer": 5}, "optimizer"),
        ({"batch": {}}, "batch-empty"),
        ({"lengths": [1, 2]}, "batch-lengths"),
    ],
)
def test_what_is_refused(change, slug):
    arguments = {"model": nn.Linear(3, 3), "loss_fn": loss_fn, "batch": torch.randn(8, 3)}
    arguments |= {"memory": "1GiB"} | change
    model, loss, batch = (arguments.pop(name) for name in ("model", "loss_fn", "batch"))
    with pytest.raises(InputError) as caught:
        ga.fit(model, loss, batch, **arguments)
    assert caught.value.slug == slug


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_real_limit_under_which_nothing_can_be_run():
    code = textwrap.dedent(
        """
        import resource, torch
        import gradaccum as ga
        model = torch.nn.Linear(4000, 4000, bias=False)
        loss_fn = lambda model, x: (model(x).square().sum(), len(x))
        ga.fit(torch.nn.Linear(2, 2), loss_fn, torch.randn(4, 2), memory="1GiB")
        lines = open("/proc/self/status").read().splitlines()
        used = next(int(l.split()[1]) * 1024 for l in lines if l.startswith("VmSize"))
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, -1))
        try:
            ga.fit(model, loss_fn, torch.randn(4, 4000), memory="1GiB")
        except ga.GradaccumError as error:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            assert error.slug == "memory-probe", error
            assert "Not even a single sample" in str(error)
            assert model.weight.grad is None
        else:
            raise SystemExit("nothing was refused")
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_error_of_ones_own_passes_through():
    def failing(model, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ga.fit(nn.Linear(3, 3), failing, torch.randn(8, 3), memory="1GiB")
    assert issubclass(PlanError, GradaccumError)
