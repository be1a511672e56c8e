from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradaccum.demo.measure import distance, gradients_of, peak_memory, stopwatch

CPU = torch.device("cpu")


def test_peak_counts_what_lives_at_once_and_only_storage_made_inside() -> None:
    before = torch.ones(1000)
    with peak_memory(CPU) as peak:
        first = torch.zeros(1000)
        view = first.view(10, 100)[:, :50]
        view.add_(1)
        before.mul_(2)
        del first, view
        second = torch.zeros(500)
        third = second + 1
        del second, third
    assert peak.value == 4000


def test_peak_sees_gradients_and_what_backward_needs() -> None:
    weight = nn.Parameter(torch.ones(1000))
    with peak_memory(CPU) as peak:
        kept = (weight * 2).exp()  # exp keeps its own result; the product is gone by then
        kept.sum().backward()
    # The result, and while backward runs the gradient of the product and of the weight.
    assert 3 * 4000 <= peak.value <= 4 * 4000 + 64


def test_peak_is_what_the_allocator_reports() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(100, 64)

    def step() -> None:
        # A square's gradient lies in memory as it is: no operator has to copy it for itself.
        model(x).square().sum().backward()
        model.zero_grad()

    step()
    with peak_memory(CPU) as peak:
        step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    assert peak.value == pytest.approx(_peak(profile), rel=0.001)


def _peak(profile: torch.profiler.profile) -> int:
    events = profile.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = peak = 0
    for _, size in sorted(sizes, key=lambda pair: pair[0]):
        now += size
        peak = max(peak, now)
    return peak


def test_the_counter_is_gone_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), peak_memory(CPU):
        raise ZeroDivisionError
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_gradients_are_copied_before_the_step_and_the_hook_is_removed() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with gradients_of(optimizer) as seen:
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert [g.tolist() for g in seen] == [[2.0, 4.0]]


def test_distance_is_relative_over_all_as_one_vector() -> None:
    truth = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    off = [torch.tensor([3.0]), torch.tensor([[4.5]])]
    assert math.isclose(distance(off, truth), 0.1)
    assert distance(truth, truth) == 0.0
    with pytest.raises(ValueError, match="argument 2"):
        distance(off, truth[:1])


def test_the_stopwatch_reads_when_it_is_left() -> None:
    with stopwatch(CPU) as watch:
        assert watch.value == 0.0
    assert 0.0 < watch.value < 60.0
