"""Parts of the benchmarks for one device, each a few seconds long; `benchmarks/gpu.sh` runs them.

    python benchmarks/on_device.py {memory,oom,bf16} [--device cuda|cpu] [--out DIR]

memory  predicted peaks beside measured ones, four times the samples and the width that were run
oom     a batch that does not fit, in what the device was told to give: planned, run, held against
        the limit and against the gradient of the whole batch
bf16    gradients of many micro-batches summed in bf16 and in fp32, against float64
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum as ga
from common import Table
from gradaccum.demo.data import collate, length
from gradaccum.demo.model import Decoder, DecoderConfig
from gradaccum.demo.model import loss_fn as decoder_loss
from gradaccum.engine.memory.probe import probe
from gradaccum.planner.meter import meter_for
from gradaccum.planner.split import gather
from gradaccum.planner.within import plan_within
from memory_models import cases, loss_fn, padded

NARROW = 24


def measured(model: nn.Module, batch: Tensor, device: str) -> int:
    """Peak of a micro-batch in mid-window beyond what stays, once all is warm."""
    found = 0
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        with meter_for(device).peak(marks=False) as peak:
            loss, _ = loss_fn(model, batch.to(device))
            loss.backward()
            del loss
        found = peak.bytes
    return found


def memory(device: str, table: Table) -> bool:
    """Prediction beside measurement."""
    good = True
    for name, make in cases().items():
        torch.manual_seed(0)
        case = make()
        case.model.to(device)
        lengths = [NARROW // 4] * 4 + [NARROW // 2] * 2 + [NARROW] * 4
        if not case.ragged:
            samples = gather([case.batch(4, 0)])
        else:
            samples = gather([padded(lengths)], lengths=lengths)
        optimizer = torch.optim.AdamW(case.model.parameters())
        found = probe(case.model, loss_fn, samples, meter=meter_for(device), optimizers=[optimizer])
        width = 4 * NARROW if case.ragged else 1
        batch = case.batch(16, width)
        # The plan keeps a second batch on an accelerator, which is on its way meanwhile.
        beside = 0 if device == "cpu" else batch.nbytes
        stays = found.resident.total
        real = stays + measured(case.model, batch, device) + beside
        predicted = found.memory.bytes(16, width)
        ratio = predicted / real
        good &= 0.9 <= ratio <= 1.1
        table.add(model=name, predicted=predicted, measured=real, ratio=round(ratio, 4))
    return good


def gradients(model: nn.Module) -> list[Tensor]:
    """What stands in the parameters, as float64 on the host."""
    return [p.grad.detach().double().cpu() for p in model.parameters() if p.grad is not None]


def distance(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Relative, over all as one vector."""
    off = sum(float((a - b).square().sum()) for a, b in zip(found, truth, strict=True))
    return (off / sum(float(b.square().sum()) for b in truth)) ** 0.5


def oom(device: str, table: Table) -> bool:
    """A third of what the whole batch needs has to do."""
    torch.manual_seed(0)
    longest = 128 if device == "cpu" else 512
    model = Decoder(DecoderConfig(512, longest))
    sizes = torch.randint(8, longest + 1, (64,)).tolist()
    batch = [torch.randint(5, 512, (1 + size,)) for size in sizes]
    truth = in_float64(model, batch)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    samples = gather([batch], lengths=length, collate=collate)
    meter = meter_for(device)
    loose = probe(model, decoder_loss, samples, meter=meter, optimizers=[optimizer])
    whole = loose.memory.bytes(len(batch), max(sizes))
    limit = loose.memory.floor + (whole - loose.memory.floor) // 3
    plan = plan_within(sizes, loose.memory, limit)
    refused = "not tried: on the CPU the limit is only counted here"
    if device != "cpu":
        refused = refuse_whole(model, collate(batch).to(device), limit)
    found: list[list[Tensor]] = []
    hook = optimizer.register_step_pre_hook(lambda *_: found.append(gradients(model)))
    acc = ga.Accumulator(model, optimizer, every=len(plan))
    stays = meter.used([*model.parameters()])
    with meter.peak(marks=False) as peak:
        groups = (samples.microbatch(micro.indices, micro.width) for micro in plan)
        for micro in acc.microbatches(one.to(device) for one in groups):
            micro.backward(*decoder_loss(model, micro.batch))
    hook.remove()
    took = stays + peak.bytes
    off = distance(found[0], truth)
    table.add(
        whole_batch=refused,
        whole_bytes=whole,
        limit=limit,
        microbatches=len(plan),
        peak=took,
        of_limit=round(took / limit, 3),
        distance_from_float64=f"{off:.1e}",
    )
    return took <= 1.05 * limit and off < 1e-4 and refused != "was not refused"


def refuse_whole(model: nn.Module, batch: Tensor, limit: int) -> str:
    """Let the device's own allocator refuse what is beyond the limit, and try the whole batch."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    # Room for what the allocator rounds up and cannot give back.
    torch.cuda.set_per_process_memory_fraction(min(1.0, 1.25 * limit / total))
    try:
        decoder_loss(model, batch)[0].backward()
    except torch.OutOfMemoryError:
        return "refused"
    finally:
        model.zero_grad()
        torch.cuda.empty_cache()
    return "was not refused"


def in_float64(model: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the undivided batch in float64, on the host."""
    twin = copy.deepcopy(model).double()
    loss, count = decoder_loss(twin, collate(batch))
    (loss / count).backward()
    return gradients(twin)


def bf16(device: str, table: Table) -> bool:
    """Sums of bf16 micro-gradients, against the float64 sum of the same ones."""
    offered = "accumulate_dtype" in inspect.signature(ga.Accumulator).parameters
    good = True
    for number in (8, 64, 512, 2048):
        errors: dict[str, Any] = {}
        for name, options in (("in .grad", {}), ("fp32", {"accumulate_dtype": torch.float32})):
            if options and not offered:
                errors[name] = "not offered by this version"
                continue
            torch.manual_seed(0)
            model = nn.Linear(64, 64, bias=False, device=device, dtype=torch.bfloat16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            acc = ga.Accumulator(model, optimizer, every=number + 1, **options)
            inputs = torch.randn(number, 4, 64, device=device, dtype=torch.bfloat16)
            truth = torch.zeros(64, 64, dtype=torch.float64)
            for x in inputs:
                (grad,) = torch.autograd.grad(model(x).square().sum() / 4, [model.weight])
                truth += grad.double().cpu() / number
            # The window's sum is read before the step's gradient is rounded.
            loop = acc.microbatches(chain(inputs, [None]))
            for micro in islice(loop, number):
                micro.backward(model(micro.batch).square().sum(), 4)
            state = acc.state_dict()
            over = float(state["window"]["terms"][""]["provisional"])
            found = [grad.double().cpu() * over / 4 / number for grad in state["gradients"]]
            acc.discard()
            errors[name] = f"{distance(found, [truth]):.1e}"
        # In the parameter's own type a long sum loses its last terms; that is what is shown.
        table.add(microbatches=number, **errors)
        good &= not offered or float(errors["fp32"]) <= 1e-6
    return good


PARTS: dict[str, Callable[[str, Table], bool]] = {"memory": memory, "oom": oom, "bf16": bf16}


def main() -> None:
    """Run one part; exit with 1 if what it shows is not as promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = Table(f"{options.part} on {options.device}")
    good = PARTS[options.part](options.device, table)
    table.show(options.out, f"{options.part}_{options.device}")
    print("as promised" if good else "NOT as promised")
    sys.exit(not good)


if __name__ == "__main__":
    main()
