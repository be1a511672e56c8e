"""How far wide sums are from float64's sum of the same gradients, and what they hold meanwhile."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga
from counting import count
from gradaccum.engine.packed import pack, unpack
from gradaccum.errors import InputError, InterferenceError, StaleGradientError, StateError
from gradaccum.planner.meter import meter_for
from refusals import refused

NUMBERS = [8, 64, 512, 2048]
WIDE: list[Any] = [torch.float32, "compensated"]


def build(dtype: torch.dtype = torch.bfloat16, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).to(dtype)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2**-8, **options)


def batches(number: int, dtype: torch.dtype = torch.bfloat16, width: int = 32) -> list[Tensor]:
    """Micro-batches whose gradients have a mean that is smaller than their spread."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, width, generator=generator).to(dtype) for _ in range(number)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().sum()


def open_window(acc: ga.Accumulator, model: nn.Module, micros: list[Tensor]) -> Any:
    """Add all but the last micro-batch; return the loop that waits for it."""
    loop = acc.microbatches(micros)
    for _ in range(len(micros) - 1):
        micro = next(loop)
        micro.backward(loss_of(model, micro.batch), len(micro.batch))
    return loop


def distance(sums: list[Tensor], exact: list[Tensor]) -> float:
    """Relative distance in the L2 norm, over all parameters."""
    far = sum(float((s.double() - e).square().sum()) for s, e in zip(sums, exact, strict=True))
    return math.sqrt(far / sum(float(e.square().sum()) for e in exact))


def errors_of(number: int, accumulate: Any) -> tuple[float, float]:
    """Of the sum before the update, and of the gradient that the optimizer gets.

    The micro-batches' own gradients are what lands in `.grad` while wide sums stand elsewhere; a
    twin with wide sums, which no step has moved, tells those of a loop that sums in `.grad`.
    """
    model, twin = build(), build()
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]

    def note(parameter: Tensor) -> None:
        exact[indices[id(parameter)]] += parameter.grad.double()

    indices = {id(parameter): i for i, parameter in enumerate(twin.parameters())}
    for parameter in twin.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    optimizer = sgd(model)
    stepped: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: stepped.extend(p.grad.clone() for p in model.parameters())
    )
    acc = ga.Accumulator(model, optimizer, every=number + 1, accumulate_dtype=accumulate)
    other = ga.Accumulator(twin, sgd(twin), every=number + 1, accumulate_dtype=torch.float64)
    micros = [*batches(number), torch.empty(0)]
    loops = [open_window(a, m, micros) for a, m in ((acc, model), (other, twin))]
    before = distance(acc.state_dict()["gradients"], exact)
    next(loops[0]).skip()  # the update of what is there: its last factor is counts of numbers
    other.discard()
    denominator = 2 ** math.ceil(math.log2(2 * (number + 1)))
    exact = [e * denominator / (2 * number) for e in exact]
    return before, distance(stepped, exact)


@pytest.mark.parametrize("number", NUMBERS)
def test_sums_in_float32_are_those_of_float64(number: int) -> None:
    before, after = errors_of(number, torch.float32)
    assert before <= 1e-6
    assert after <= 2**-8  # half of the last place of a bfloat16, once


@pytest.mark.parametrize("number", NUMBERS)
def test_compensated_sums_do_not_get_worse_than_one_rounding(number: int) -> None:
    before, after = errors_of(number, "compensated")
    # each of `number` additions is off by 2⁻¹⁶ at most of a sum that is at most a few times the
    # last; they do not all point the same way
    assert before <= 2**-16 * 4 * math.sqrt(number)
    assert after <= 2**-8 + before


def test_sums_in_grad_lose_what_wide_ones_keep() -> None:
    assert errors_of(2048, None)[0] > 0.02
    assert errors_of(2048, torch.float32)[0] < 1e-6


@pytest.mark.parametrize("sign", [1, -1])
def test_compensated_sums_do_not_drift(sign: int) -> None:
    """A thousand equal gradients, whose sums in bfloat16 stop at 256."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    acc = ga.Accumulator(model, sgd(model), every=4096, accumulate_dtype="compensated")
    loop = acc.microbatches([torch.tensor([[sign * 1.0]], dtype=torch.bfloat16)] * 4096)
    for _ in range(1000):
        micro = next(loop)
        micro.backward(model(micro.batch).sum(), 1)
    assert acc.state_dict()["gradients"][0].item() == sign * 1000 / 4096
    acc.discard()


# --- what is held ---------------------------------------------------------------------------------


def held_bytes(accumulate: Any) -> float:
    """Bytes for each parameter between micro-batches, counted over all tensors alive."""
    model = nn.Linear(512, 512, bias=False).bfloat16()
    acc = ga.Accumulator(model, sgd(model), every=8, accumulate_dtype=accumulate)
    micros = [torch.ones(1, 512, dtype=torch.bfloat16)] * 4

    def alive() -> int:
        gc.collect()
        found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
        found += [p.grad for p in model.parameters() if p.grad is not None]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
        return sum(size for size in sizes.values() if size >= model.weight.numel())

    before = alive()
    loop = open_window(acc, model, micros)
    after = alive()
    acc.discard()
    loop.close()
    return (after - before) / model.weight.numel()


@pytest.mark.parametrize(
    ("accumulate", "expected"), [(None, 2), (torch.float32, 4), (torch.float64, 8)], ids=str
)
def test_a_wide_sum_takes_the_place_of_the_gradient(accumulate: Any, expected: int) -> None:
    assert held_bytes(accumulate) == expected


@pytest.mark.parametrize(
    ("accumulate", "restore", "most"),
    [(torch.float32, None, 4), (torch.float32, True, 6), ("compensated", None, 4)],
    ids=str,
)
def test_a_gradient_is_dropped_as_soon_as_it_is_in_its_sum(
    accumulate: Any, restore: bool | None, most: float
) -> None:
    layers = 32
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(layers)]).bfloat16()
    optimizer = sgd(model, foreach=False)
    acc = ga.Accumulator(model, optimizer, every=3, accumulate_dtype=accumulate, restore=restore)
    micros = [torch.ones(1, 256, dtype=torch.bfloat16)] * 3
    with meter_for("cpu").peak(marks=False) as peak:
        for micro in acc.microbatches(micros):
            micro.backward(model(micro.batch).square().sum(), 1)
    found = peak.bytes / sum(p.numel() for p in model.parameters())
    # beside the sums one layer's own gradient, and room to work in: three of its size in float32
    assert most <= found <= most + (2 + 3 * 4) / layers


def test_a_compensated_sum_takes_three_bytes() -> None:
    assert held_bytes("compensated") == 3


@pytest.mark.parametrize("accumulate", WIDE, ids=str)
def test_only_narrower_parameters_are_widened(accumulate: Any) -> None:
    model = build()
    model.get_submodule("2").float()
    model.get_submodule("2").register_forward_pre_hook(lambda _, args: args[0].float())
    acc = ga.Accumulator(model, sgd(model), every=4, accumulate_dtype=accumulate)
    loop = open_window(acc, model, batches(4))
    assert [grad.dtype for grad in acc.state_dict()["gradients"]] == [torch.float32] * 4
    assert all(p.grad is None for p in model.parameters())
    kept = acc._core.gradients._outside.sums
    assert [isinstance(total, Tensor) for total in kept] == [
        accumulate != "compensated",
        accumulate != "compensated",
        True,
        True,
    ]
    micro = next(loop)
    micro.backward(loss_of(model, micro.batch), 2)
    assert micro.update is not None


def test_a_model_without_narrow_parameters_sums_in_grad() -> None:
    model = build(torch.float32)
    acc = ga.Accumulator(model, sgd(model), every=4, accumulate_dtype=torch.float32)
    loop = open_window(acc, model, batches(4, torch.float32))
    assert all(p.grad is not None for p in model.parameters())
    acc.discard()
    loop.close()


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1.0}, {"clip_value": 0.1}], ids=str)
@pytest.mark.parametrize("accumulate", [*WIDE, torch.float64], ids=str)
def test_no_wait_for_a_device(accumulate: Any, clip: Any) -> None:
    model = build()
    options = {"accumulate_dtype": accumulate, **clip}
    acc = ga.Accumulator(model, sgd(model, momentum=0.5), every=4, **options)

    def run() -> None:
        for micro in acc.microbatches(batches(4)):
            micro.backward(loss_of(model, micro.batch), torch.ones(2).sum())

    assert count(model.parameters(), run).waits == 0


# --- who else touches what ------------------------------------------------------------------------


def test_a_gradient_that_appears_in_mid_window_is_refused_or_dropped() -> None:
    for on_stale in ("raise", "zero"):
        model = build()
        options: Any = {"accumulate_dtype": torch.float32, "on_stale": on_stale}
        acc = ga.Accumulator(model, sgd(model), every=4, **options)
        loop = open_window(acc, model, batches(3))
        before = acc.state_dict()["gradients"]
        loss_of(model, batches(1)[0]).backward()
        micro = next(loop)
        if on_stale == "raise":
            error = refused(
                lambda m=micro, net=model: m.backward(loss_of(net, m.batch), 2),
                InterferenceError,
                "gradients-changed",
                "Gradients changed in the middle of a window",
            )
            assert "appeared" in error.got
            model.zero_grad()
        micro.backward(loss_of(model, micro.batch), 2)
        assert micro.update is not None
        assert any(grad.any() for grad in before)


def test_a_stale_gradient_is_refused() -> None:
    model = build()
    acc = ga.Accumulator(model, sgd(model), every=2, accumulate_dtype=torch.float32)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(StaleGradientError):
        acc.step(batches(1)[0], lambda net, x: (loss_of(net, x), 2))


def test_a_zero_grad_in_mid_window_takes_nothing_away() -> None:
    weights = []
    for zeroed in (False, True):
        model = build()
        acc = ga.Accumulator(model, sgd(model), every=4, accumulate_dtype=torch.float32)
        for micro in acc.microbatches(batches(4)):
            micro.backward(loss_of(model, micro.batch), 2)
            if zeroed:
                model.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


# --- a scaler -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["in a micro-batch", "in the rounding"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("accumulate", WIDE, ids=str)
def test_an_infinite_gradient_skips_the_update(accumulate: Any, several: bool, place: str) -> None:
    """A mean that float32 holds and float16 does not is infinite only once it is rounded."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)]).half()
    groups = [[p] for p in model.parameters()] if several else [list(model.parameters())]
    optimizers = [torch.optim.SGD(group, lr=1.0) for group in groups]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100)
    options: Any = {"scaler": scaler, "accumulate_dtype": accumulate}
    acc = ga.Accumulator(model, optimizers, every=2, **options)
    before = [p.detach().clone() for p in model.parameters()]
    sizes = [math.inf, 1.0] if place == "in a micro-batch" else [60000.0, 60000.0]
    for micro in acc.microbatches(sizes):
        x = torch.tensor([[micro.batch]]).half()
        # the denominator is 1 from the start, and two of them make the sum
        loss = (model[0].weight * x).sum() + model[1].weight.sum() * 0
        micro.backward({"one": (loss.float(), 1 if micro.index == 0 else 0)})
    assert micro.update is not None
    assert micro.update.skipped
    assert all(map(torch.equal, before, model.parameters()))
    assert scaler.get_scale() == 0.5


def test_a_scaler_that_was_unscaled_by_somebody_else_says_so() -> None:
    model = build(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = sgd(model)
    options: Any = {"scaler": scaler, "accumulate_dtype": torch.float64}
    acc = ga.Accumulator(model, optimizer, every=2, **options)
    loop = open_window(acc, model, batches(2, torch.float32))
    scaler.unscale_(optimizer)
    micro = next(loop)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        micro.backward(loss_of(model, micro.batch), 2)
    acc.discard()
    loop.close()


# --- arguments and states -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        torch.bfloat16,
        torch.float16,
        torch.int32,
        torch.complex64,
        "float32",
        "kahan",
        32,
        float,
        [],
    ],
    ids=str,
)
def test_what_cannot_be_summed_in_is_refused(value: Any) -> None:
    model = build()
    error = refused(
        lambda: ga.Accumulator(model, sgd(model), accumulate_dtype=value),
        InputError,
        "accumulate-dtype",
        "Gradients cannot be accumulated in that.",
    )
    assert "torch.float32" in error.expected


def test_a_state_of_other_sums_is_refused() -> None:
    states = []
    for accumulate in (torch.float32, None):
        model = build()
        acc = ga.Accumulator(model, sgd(model), every=4, accumulate_dtype=accumulate)
        loop = open_window(acc, model, batches(3))
        states.append(acc.state_dict())
        acc.discard()
        loop.close()
    with pytest.raises(StateError, match="accumulate_dtype differs"):
        acc.load_state_dict(states[0])


# --- 24 bits --------------------------------------------------------------------------------------


def bits_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_packed_numbers_are_off_by_half_of_their_last_place_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (1,), (0,), (7, 3), (300_001,), (2, 3, 4, 5)):
        values = torch.randn(shape, generator=generator).mul(12).exp()
        values = values * torch.randn(shape, generator=generator).sign()
        if len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        packed = pack(values)
        again = unpack(packed)
        assert again.stride() == values.stride()
        assert ((again - values).abs() <= values.abs() * 2**-16).all()
        twice = pack(again)  # what was rounded once is kept: a saved window is resumed to the bit
        assert torch.equal(twice.sum, packed.sum)
        assert torch.equal(twice.rest, packed.rest)
        assert packed.sum.element_size() + packed.rest.element_size() == 3


def test_all_numbers_of_24_bits_are_kept_and_ties_go_to_the_even_one() -> None:
    steps = torch.arange(0x3F7F0000, 0x3F820000, 0x80, dtype=torch.int64).to(torch.int32)
    again = unpack(pack(steps.view(torch.float32))).view(torch.int32)
    assert torch.equal(again[::2], steps[::2])
    assert ((again[1::2] - steps[1::2]).abs() == 0x80).all()
    assert ((again >> 8) % 2 == 0)[1::2].all()


def test_infinities_and_zeros_stay_and_what_is_no_number_stays_none() -> None:
    values = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    assert torch.equal(unpack(pack(values)), values)
    assert unpack(pack(values))[3].signbit()
    # those of processors, of devices, and of torch's own roundings
    strange = bits_of(0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFC00000, 0xFFFF0000)
    assert not unpack(pack(strange.repeat(9))).isfinite().any()


def test_a_sum_of_24_bits_that_overflows_is_infinite() -> None:
    assert unpack(pack(bits_of(0x7F7FFFFF))).isinf().all()
