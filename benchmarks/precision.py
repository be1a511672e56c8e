"""What is left of many bfloat16 micro-batches' gradients, and what it costs to keep it.

The demo's decoder in bfloat16 on the functions of Python's standard library.

1. Distance: one function to a micro-batch, 2,048 of them. Its gradients are computed once, and
   every loop is given the same ones, through a loss of which they are the gradients to the bit.
   float64 knows their sum.
2. Optimizers: what SGD and AdamW are handed, for-loop, foreach and fused.
3. Bytes for each parameter, on a model whose activations are next to nothing.
4. Time: batches of 64 functions in 8 micro-batches, the loops taking turns update by update, for
   two minutes or three rounds, whichever is longer. `--rounds 0` leaves it out.

    python benchmarks/precision.py [--out DIR] [--rounds N]
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, product, repeat
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import gradaccum as ga
from common import Table, arguments, interleaved
from gradaccum.demo.data import Corpus, collate, load
from gradaccum.demo.measure import peak_memory
from gradaccum.demo.model import Decoder, DecoderConfig, loss_fn

NUMBERS = (8, 64, 512, 2048)
SHORT, LONG, BATCH, EVERY, ROUNDS = 48, 512, 64, 8, 9
STEPS = 1 << 12
SECONDS = 120.0
BAR = 1e-6
"""The farthest that float32's sums may be from float64's."""

Grads = list[Tensor]
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")  # torch 2.13 has it, 2.6 not


def decoder(corpus: Corpus, longest: int) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(len(corpus.tokenizer.words), longest)).bfloat16()


# --- 1. distance ----------------------------------------------------------------------------------


def with_gradient(model: nn.Module, grads: Grads) -> Tensor:
    """A loss whose gradients these are: every product with 1, or a power of two, is exact."""
    pairs = zip(model.parameters(), grads, strict=True)
    return torch.stack([(p * grad).sum() for p, grad in pairs]).sum()


class InGrad:
    """`loss.backward()` again and again: what torch, Accelerate and Fabric do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)

    def add(self, micro_gradient: Grads) -> None:
        with_gradient(self.model, micro_gradient).backward()

    def sums(self) -> Grads:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


class ThroughAccelerate(InGrad):
    """`accelerator.accumulate`, in the bfloat16 that its model is in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def add(self, micro_gradient: Grads) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(with_gradient(self.model, micro_gradient))

    def sums(self) -> Grads:
        # It has divided by the steps, a power of two, which rounds nothing.
        return [grad.double() * STEPS for grad in super().sums()]


class GradDtype(InGrad):
    """`Tensor.grad_dtype`: autograd itself widens what it adds to `.grad`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for parameter in self.model.parameters():
            parameter.grad_dtype = torch.float32


class RunningMean:
    """The rule of optax.MultiSteps, in torch: `mean += (gradient - mean) / n`, in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        self.means = [torch.zeros_like(p) for p in model.parameters()]
        self.number = 0

    def add(self, micro_gradient: Grads) -> None:
        self.number += 1
        for mean, grad in zip(self.means, micro_gradient, strict=True):
            mean += (grad - mean) / self.number

    def sums(self) -> Grads:
        return [mean.double() * self.number for mean in self.means]


class Optax:
    """`optax.MultiSteps` itself, fed the same micro-gradients."""

    def __init__(self, model: nn.Module) -> None:
        import jax.numpy as jnp  # noqa: PLC0415 - an extra that this row alone needs
        import optax  # noqa: PLC0415 - as above

        self.jnp, self.number = jnp, 0
        self.steps = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=10**6)
        self.state = self.steps.init([self.array(p.detach()) for p in model.parameters()])
        self.parameters = [self.array(p.detach()) for p in model.parameters()]

    def array(self, tensor: Tensor) -> Any:
        return self.jnp.asarray(tensor.float().numpy(), dtype=self.jnp.bfloat16)

    def add(self, micro_gradient: Grads) -> None:
        self.number += 1
        grads = [self.array(grad) for grad in micro_gradient]
        self.state = self.steps.update(grads, self.state, self.parameters)[1]

    def sums(self) -> Grads:
        means = [torch.tensor(a.astype("float32").tolist()) for a in self.state.acc_grads]
        return [mean.double() * self.number for mean in means]


class Kahan:
    """Kahan's summation with a bfloat16 compensation: 4 bytes for each parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.totals = [torch.zeros_like(p) for p in model.parameters()]
        self.rests = [torch.zeros_like(p) for p in model.parameters()]

    def add(self, micro_gradient: Grads) -> None:
        for i, grad in enumerate(micro_gradient):
            more = grad - self.rests[i]
            total = self.totals[i] + more
            self.rests[i] = (total - self.totals[i]) - more
            self.totals[i] = total

    def sums(self) -> Grads:
        return self.totals


class Ours:
    """`accumulate_dtype`."""

    def __init__(self, model: nn.Module, accumulate: Any) -> None:
        self.model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        every = max(NUMBERS) + 1
        self.acc = ga.Accumulator(self.model, optimizer, every=every, accumulate_dtype=accumulate)
        self.loop = self.acc.microbatches(repeat(None))

    def add(self, micro_gradient: Grads) -> None:
        next(self.loop).backward(with_gradient(self.model, micro_gradient), 1)

    def sums(self) -> Grads:
        state = self.acc.state_dict()
        over = state["window"]["terms"][""]["provisional"]
        return [grad.double() * float(over) for grad in state["gradients"]]


def distances(corpus: Corpus) -> tuple[Table, dict[str, list[float]]]:
    """Relative L2 distance of every loop's sum from float64's."""
    model = decoder(corpus, SHORT)
    loops: dict[str, Any] = {
        "`.grad` (torch)": InGrad(model),
        "Accelerate": ThroughAccelerate(model),
        "running mean in bfloat16 (optax's rule)": RunningMean(model),
        "Kahan, bfloat16 + bfloat16": Kahan(model),
        'gradaccum "compensated"': Ours(model, "compensated"),
        "gradaccum torch.float32": Ours(model, torch.float32),
    }
    if HAS_GRAD_DTYPE:
        loops["Tensor.grad_dtype float32"] = GradDtype(model)
    if importlib.util.find_spec("optax"):
        loops["optax.MultiSteps"] = Optax(model)
    found: dict[str, list[float]] = {name: [] for name in loops}
    found["float64's own, rounded once"] = []
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for i, sample in enumerate(corpus.samples[: max(NUMBERS)]):
        tokens = collate([sample])
        loss, _ = loss_fn(model, tokens)
        micro_gradient = list(torch.autograd.grad(loss, list(model.parameters())))
        for total, grad in zip(exact, micro_gradient, strict=True):
            total += grad
        for loop in loops.values():
            loop.add(micro_gradient)
        if i + 1 in NUMBERS:
            for name, loop in loops.items():
                found[name].append(distance(loop.sums(), exact))
            found["float64's own, rounded once"].append(
                distance([e.bfloat16() for e in exact], exact)
            )
    table = Table(
        "Relative distance of the sum from float64's sum of the same bfloat16 micro-gradients, by "
        "the number of micro-batches"
    )
    for name, values in found.items():
        table.add(loop=name, **{f"{n:,}": f"{v:.1e}" for n, v in zip(NUMBERS, values, strict=True)})
    for loop in loops.values():
        if isinstance(loop, Ours):
            loop.acc.discard()
    return table, found


def distance(sums: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    far = sum(float((s.double() - e).square().sum()) for s, e in zip(sums, exact, strict=True))
    return math.sqrt(far / sum(float(e.square().sum()) for e in exact))


# --- 2. optimizers -------------------------------------------------------------------------------

WAYS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def handed() -> tuple[Table, bool]:
    """What optimizers are handed of a small net's micro-gradients, and the sum that it is of."""
    table = Table(
        "Farthest of 8, 64, 512 and 2,048 micro-batches, by optimizer: the sum's distance from "
        "float64's, and elements of the gradient that are not float64's sum rounded once"
    )
    good = True
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).bfloat16()
    inputs = torch.randn(max(NUMBERS), 2, 32).bfloat16()
    losses = ((start(x).float() - 1).square().sum() for x in inputs)
    micros = [list(torch.autograd.grad(loss, list(start.parameters()))) for loss in losses]
    for kind, (way, options) in product((torch.optim.SGD, torch.optim.AdamW), WAYS.items()):
        for accumulate in (torch.float32, "compensated"):
            rows = [_handed(start, micros[:n], kind, options, accumulate) for n in NUMBERS]
            farthest, unlike = max(row[0] for row in rows), max(row[1] for row in rows)
            good &= accumulate != torch.float32 or farthest <= BAR
            table.add(
                optimizer=f"{kind.__name__}, {way}",
                accumulate_dtype=str(accumulate),
                sum=f"{farthest:.1e}",
                gradient_unlike=f"{unlike:.2%}",
            )
    return table, good


def _handed(
    start: nn.Module, micros: list[Grads], kind: Any, options: dict[str, Any], accumulate: Any
) -> tuple[float, float]:
    model, number = copy.deepcopy(start), len(micros)
    optimizer = kind(model.parameters(), lr=2**-8, **options)
    got: list[Tensor] = []

    def note(*_: Any) -> None:
        # a fused optimizer divides while it steps: by a power of two here, which rounds nothing
        scale = getattr(optimizer, "grad_scale", None)
        got.extend(
            (p.grad / (1 if scale is None else scale)).bfloat16() for p in model.parameters()
        )

    optimizer.register_step_pre_hook(note)
    acc = ga.Accumulator(model, optimizer, every=number + 1, accumulate_dtype=accumulate)
    loop = acc.microbatches(repeat(None))
    for grads in micros:
        next(loop).backward(with_gradient(model, grads), 1)
    exact = [torch.stack(g).double().sum(0) for g in zip(*micros, strict=True)]
    state = acc.state_dict()
    over = float(state["window"]["terms"][""]["provisional"])
    far = distance([grad.double() * over for grad in state["gradients"]], exact)
    acc.flush()
    means = [(total / number).bfloat16() for total in exact]
    unlike = sum(int((g != m).sum()) for g, m in zip(got, means, strict=True))
    return far, unlike / sum(m.numel() for m in means)


# --- 4. time --------------------------------------------------------------------------------------

Loss = Callable[[nn.Module, Tensor], tuple[Tensor, Any]]
Steps = Iterator[None]
Update = Callable[[Sequence[Tensor]], Steps]
"""An update that pauses after each micro-batch."""


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Update:
    """Sums in `.grad`."""

    def update(micros: Sequence[Tensor]) -> Steps:
        for x in micros:
            (loss(model, x)[0] / 2**12).backward()
            yield
        optimizer.step()
        optimizer.zero_grad()

    return update


def hooked(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Update:
    """Sums in float32: each gradient added as it arrives, and dropped."""
    sums: dict[Tensor, Tensor] = {}

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter in sums:
            sums[parameter] += parameter.grad
        else:
            sums[parameter] = parameter.grad.float()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(add)

    def update(micros: Sequence[Tensor]) -> Steps:
        for x in micros:
            (loss(model, x)[0] / 2**12).backward()
            yield
        for parameter in model.parameters():
            parameter.grad = sums.pop(parameter).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()

    return update


def with_grad_dtype(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Update:
    """Sums in a float32 `.grad`, rounded for the step."""

    def update(micros: Sequence[Tensor]) -> Steps:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        for x in micros:
            (loss(model, x)[0] / 2**12).backward()
            yield
        for parameter in model.parameters():
            assert parameter.grad is not None
            narrow, parameter.grad = parameter.grad.to(parameter.dtype), None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = narrow
        optimizer.step()
        optimizer.zero_grad()

    return update


def ours(
    accumulate: Any, **options: Any
) -> Callable[[nn.Module, torch.optim.Optimizer, Loss], Update]:
    """`accumulate_dtype`."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Update:
        acc = ga.Accumulator(model, optimizer, every=EVERY, accumulate_dtype=accumulate, **options)

        def update(micros: Sequence[Tensor]) -> Steps:
            for micro in acc.microbatches(micros):
                micro.backward(*loss(model, micro.batch))
                yield

        return update

    return build


PLAIN = "gradaccum, sums in `.grad`"
LOOPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Loss], Update]] = {
    PLAIN: ours(None),
    "gradaccum torch.float32": ours(torch.float32),
    "gradaccum torch.float32, restore": ours(torch.float32, restore=True),
    'gradaccum "compensated"': ours("compensated"),
    'gradaccum "compensated", restore': ours("compensated", restore=True),
    "by hand, sums in `.grad`": usual,
    "by hand, float32 in a hook": hooked,
}
if HAS_GRAD_DTYPE:
    LOOPS["by hand, Tensor.grad_dtype"] = with_grad_dtype


def timed(corpus: Corpus, rounds: int) -> Table:
    """Seconds of an update, the loops taking turns."""
    start = decoder(corpus, LONG)
    size = BATCH // EVERY
    batches = [
        [collate(batch[k : k + size]) for k in range(0, BATCH, size)]
        for batch in corpus.batches(BATCH, 3, seed=0)
    ]

    def fed(update: Update) -> Callable[[], None]:
        coming = chain(batches[:1], cycle(batches))  # the first one also warms up
        return lambda: deque(update(next(coming)), maxlen=0)

    calls: dict[str, Callable[[], object]] = {}
    for name, make in LOOPS.items():
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        calls[name] = fed(make(model, optimizer, loss_fn))
    began, seconds = time.monotonic(), interleaved(calls, rounds=3, clock=time.process_time)
    while time.monotonic() - began < SECONDS and len(seconds[PLAIN]) < rounds:
        more = interleaved(calls, rounds=1, clock=time.process_time, warm=False)
        seconds = {name: [*values, *more[name]] for name, values in seconds.items()}
    table = Table(
        f"Processor seconds per update of {BATCH} functions cut at {LONG} tokens, bfloat16, AdamW"
    )
    table.add_timings(seconds, base=PLAIN, unit="s")
    return table


# --- 3. bytes -------------------------------------------------------------------------------------


def bytes_held() -> Table:
    """Bytes for each parameter, on layers that see one row at a time."""
    table = Table("Bytes for each parameter, beyond parameters and optimizer state")
    for name, make in LOOPS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(32)]).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
        update = make(model, optimizer, lambda net, x: (net(x).float().square().sum(), 1))
        micros = [torch.ones(1, 512, dtype=torch.bfloat16)] * EVERY
        size = sum(p.numel() for p in model.parameters())
        deque(update(micros), maxlen=0)
        before = alive(model)
        with peak_memory(torch.device("cpu")) as whole:
            steps = update(micros)
            for _ in range(EVERY - 1):
                next(steps)
            between = alive(model) - before
            deque(steps, maxlen=0)
        table.add(
            loop=name,
            between_microbatches=round(between / size, 2),
            peak_of_update=round(whole.value / size, 2),
        )
    return table


def alive(model: nn.Module) -> int:
    """Bytes of all tensors that Python knows of, and of gradients."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


# --- the picture ----------------------------------------------------------------------------------

# Okabe and Ito's palette: told apart by every kind of colour vision, and in grey.
COLOURS = ("#5b6470", "#a9b0b8", "#e69f00", "#cc79a7", "#56b4e9", "#0072b2", "#009e73", "#d55e00")


def draw(found: dict[str, list[float]], folder: Path) -> Path:
    """Distance over the number of micro-batches, both in powers of ten."""
    figure = Figure(figsize=(9, 5.4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, values), colour in zip(found.items(), COLOURS * 2, strict=False):
        style = {"linewidth": 2.5} if name.startswith("gradaccum") else {"linestyle": "--"}
        axes.loglog(NUMBERS, values, marker="o", color=colour, label=name, **style)
    axes.set_xticks(NUMBERS, [f"{n:,}" for n in NUMBERS])
    axes.minorticks_off()
    axes.set_xlabel("micro-batches in the window")
    axes.set_ylabel("relative distance from float64's sum")
    axes.set_title("Many bfloat16 micro-batches in one update", loc="left", weight="bold")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right", frameon=False, fontsize=9)
    path = folder / "precision.png"
    figure.savefig(path, dpi=150)
    return path


def main() -> None:
    """Measure, print and draw; exit with 1 if float32's sums are beyond the bar."""
    options = arguments(__doc__)
    # One thread, and the processor's time: whatever else the machine does is not measured.
    torch.set_num_threads(1)
    table, found = distances(load(SHORT))
    table.show(options.out, "precision")
    if options.out is not None:
        print(draw(found, options.out))
    optimizers, good = handed()
    optimizers.show(options.out, "precision-optimizers")
    bytes_held().show(options.out, "precision-bytes")
    if options.rounds != 0:
        timed(load(LONG), options.rounds or ROUNDS).show(options.out, "precision-time")
    good &= max(found["gradaccum torch.float32"]) <= BAR
    print(f"float32's sums are {'within' if good else 'BEYOND'} {BAR} of float64's")
    sys.exit(not good)


if __name__ == "__main__":
    main()
