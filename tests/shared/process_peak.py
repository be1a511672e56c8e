"""One forward and backward: the counter's bytes, and what the process took by its own account.

`resident` is the high-water mark of pages that hold something, `mapped` that of the address space,
which counts what was asked for and never written to as well.
"""

import ctypes
import gc
import json
import sys

import torch
from torch import nn

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from gradaccum.planner.meter import meter_for
from memory_models import Tagger


def build(name):
    """Large enough that what a process does besides hardly shows: about 300 MB."""
    if name == "mlp":
        layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(16384, 256)
    if name == "cnn":
        layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        layers += [nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU()]
        return nn.Sequential(*layers), torch.randn(64, 3, 96, 96)
    body, shape = nn.Linear(32, 128), (256, 1024)
    words, width, out = 20_000, 32, 128
    if name == "transformer":
        words, width, out, shape = 300, 128, 128, (16, 256)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    elif name == "lstm":
        words, width, out, shape = 300, 128, 256, (48, 256)
        body = nn.LSTM(128, 256, 2, batch_first=True)
    return Tagger(words, width, body, out), torch.randint(1, 300, shape)


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch = build(sys.argv[1])

    def step(batch):
        model(batch).square().sum().backward()

    step(batch[:2])
    model.zero_grad(set_to_none=False)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")
    before = status("VmRSS"), status("VmSize")
    step(batch)
    resident, mapped = status("VmHWM") - before[0], status("VmPeak") - before[1]
    model.zero_grad(set_to_none=False)
    with meter_for("cpu").peak() as peak:
        step(batch)
    found = {"counted": peak.bytes, "resident": resident, "mapped": mapped}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
