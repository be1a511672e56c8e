"""The counter of live bytes: exact where it can be, and beside what the process itself took."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from allocated import allocated
from gradaccum.errors import InputError
from gradaccum.planner.live import LiveBytes, storages
from gradaccum.planner.meter import Allocator, AllocatorMeter, allocator_of, meter_for

SCRIPT = Path(__file__).parents[1] / "shared" / "process_peak.py"


def peak_of(run):
    with meter_for("cpu").peak() as peak:
        run()
    return peak.bytes


def test_every_byte_of_what_is_alive_at_once():
    def run():
        a = torch.zeros(1000)
        b = a + 1  # two at once
        del a
        c = b * 2  # still two
        del b, c
        torch.zeros(1500)

    assert peak_of(run) == 8000


def test_views_results_in_place_and_older_tensors_take_nothing():
    old = torch.zeros(1000)

    def run():
        old.view(10, 100).t().add_(1)
        torch.add(old, 1, out=old)
        old[5:7]

    assert peak_of(run) == 0


def test_tensors_that_grow():
    def run():
        out = torch.empty(0)
        torch.add(torch.zeros(100), 1, out=out)

    assert peak_of(run) == 800


def test_what_autograd_keeps_counts_until_the_backward_frees_it():
    x = torch.zeros(1000, requires_grad=True)

    def run():
        y = x.exp().sin()
        del y

    assert peak_of(run) == 8000
    with meter_for("cpu").peak() as peak:
        y = x.exp().sin().sum()
        peak.turn()
        y.backward()
    assert peak.turned < len(peak.marks)
    assert max(peak.marks) == peak.bytes
    assert peak.marks[-1] <= 4004 + 4


def test_sparse_tensors_count_their_indices_and_values():
    table = nn.Embedding(100, 4, sparse=True)
    tokens = torch.tensor([3, 4, 5])
    table(tokens).sum().backward()
    table.weight.grad = None
    with meter_for("cpu").peak(marks=False) as peak:
        table(tokens).sum().backward()
    grad = table.weight.grad
    size = grad._values().nbytes + grad._indices().nbytes
    assert sum(storages([grad], "cpu").values()) == size
    assert peak.bytes >= size


def test_tensors_on_no_device_count_for_none():
    with LiveBytes("meta") as live:
        torch.zeros(1000, device="meta")
        torch.zeros(7)
    assert live.peak == 4000
    assert peak_of(lambda: torch.zeros(1000, device="meta")) == 0


def test_memory_that_tensors_share_counts_once():
    x = torch.zeros(100)
    assert meter_for("cpu").used([x, x[5:], x.view(10, 10), torch.zeros(1)]) == 404


def test_a_counter_that_is_gone_is_not_asked_when_its_tensors_go():
    with LiveBytes() as live:
        x = torch.zeros(10)
    del live, x


@pytest.mark.skipif(sys.platform != "linux", reason="the process's own peak is read from /proc")
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "lstm", "embedding"])
@pytest.mark.slow
def test_agrees_with_the_peak_of_the_process_itself(name):
    # glibc keeps freed blocks for itself up to a size that it learns; here it hands back all.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, str(SCRIPT), name]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found = json.loads(result.stdout)
    # What is mapped is what was asked for. The work space of oneDNN's LSTM is not seen, and torch
    # 2.6 maps more of it than it ever writes to.
    lstm = 0.6 if torch.__version__.startswith("2.6.") else 0.85
    least, most = {"cnn": (0.95, 1.05), "lstm": (lstm, 1.0)}.get(name, (0.98, 1.02))
    assert least <= found["counted"] / found["mapped"] <= most, found


CONVOLUTIONS = {
    "residual": lambda: [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1)],
    "channels that fill no block": lambda: [nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 20, 3)],
    "few channels at the end": lambda: [nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 4, 1)],
    "up again": lambda: [
        nn.Conv2d(3, 16, 3, 2),
        nn.ConvTranspose2d(16, 8, 4, 2),
        nn.Conv2d(8, 4, 1),
    ],
    "strided": lambda: [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 64, 3, 2)],
    "depthwise": lambda: [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32)],
    "channels last": lambda: [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)],
    "eight channels": lambda: [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()],
    "one channel": lambda: [nn.Conv2d(3, 1, 3), nn.Tanh(), nn.Conv2d(1, 6, 5), nn.Tanh()],
    "points": lambda: [nn.Conv2d(3, 4, 1), nn.GELU(), nn.Conv2d(4, 24, 1), nn.GELU()],
    "large weights": lambda: [nn.Conv2d(3, 128, 3, 8), nn.ReLU(), nn.Conv2d(128, 256, 3, 1, 1)],
    "up by a lot": lambda: [nn.ConvTranspose2d(3, 16, 4, 2, 1), nn.ConvTranspose2d(16, 8, 4, 2, 1)],
    "a volume": lambda: [nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 8, 3, padding=1), nn.ReLU()],
    "depthwise in a volume": lambda: [nn.Unflatten(1, (3, 1)), nn.Conv3d(3, 6, 1, groups=3)],
    "a sequence": lambda: [nn.Flatten(2), nn.Conv1d(3, 16, 9, 4), nn.Conv1d(16, 32, 5, 2)],
}
ROOMY = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float32": torch.float32}
NARROWER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the work space is oneDNN's")
@pytest.mark.parametrize("dtype", ROOMY)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_take_the_copies_that_they_are_charged_for(name, dtype):
    layout = torch.channels_last if name == "channels last" else torch.contiguous_format
    if name == "channels last" and dtype != "float32":
        pytest.skip("charged for as in float32, where less is taken or more")
    model = nn.Sequential(*CONVOLUTIONS[name]()).to(ROOMY[dtype], memory_format=layout)
    x = torch.randn(32, 3, 24, 24).to(ROOMY[dtype], memory_format=layout)
    # Of fewer than 16 samples it takes another way.

    def run():
        model(x).square().sum().backward()

    run()
    run()  # with gradients to add to
    assert 0.95 <= peak_of(run) / allocated(run) <= 1.05  # what is off is oneDNN's own scratch pads


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the work space is oneDNN's")
def test_convolutions_of_narrower_vectors_are_charged_for_as_well():
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "copies_that_they"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **NARROWER}, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


class Fake(Allocator):
    """An allocator as a device has it: `now` moves with what operators make."""

    keeps_peak = True

    def __init__(self, steps):
        self.steps, self.allocated, self.top, self.reserve = steps, 100, 100, 0

    def now(self):
        return self.allocated

    def highest(self):
        if self.steps:
            work, left = self.steps.pop(0)
            self.top = max(self.top, self.allocated + work)
            self.allocated += left
        return max(self.top, self.allocated)

    def restart(self):
        self.top = self.allocated

    def free(self):
        return 1600


def test_an_allocators_peaks_operator_by_operator():
    fake = Fake([(50, 10), (0, 0), (200, -10)])
    with AllocatorMeter(torch.device("meta"), fake).peak() as peak:
        x = torch.zeros(2)
        peak.turn()
        x.add_(1)
        x.mul_(2)
    assert peak.marks == [50, 10, 210]
    assert peak.bytes == 210
    assert peak.turned == 1


def test_an_allocators_peak_alone():
    fake = Fake([])
    with AllocatorMeter(torch.device("meta"), fake).peak(marks=False) as peak:
        fake.top = 900
    assert (peak.bytes, peak.marks) == (800, [])
    meter = AllocatorMeter(torch.device("meta"), fake)
    assert meter.used([torch.zeros(5)]) == 100
    assert meter.free() == 1500


def test_an_allocator_without_peaks_is_read_after_every_operator():
    fake = Fake([(0, 10), (0, 30), (0, -40)])
    fake.keeps_peak = False
    with AllocatorMeter(torch.device("meta"), fake).peak(marks=False) as peak:
        x = torch.zeros(2)
        x.add_(1)
        x.mul_(2)
    assert (peak.bytes, peak.marks) == (40, [])


def test_a_device_that_keeps_no_count():
    with pytest.raises(InputError, match="keeps no statistics") as caught:
        allocator_of(torch.device("meta"))
    assert caught.value.slug == "memory-device"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_itself():
    meter = meter_for("cuda")
    with meter.peak() as peak:
        torch.zeros(2**20, device="cuda").add(1)
    assert peak.bytes == 8 * 2**20
    assert 0 < meter.free() < torch.cuda.mem_get_info()[1]
