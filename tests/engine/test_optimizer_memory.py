"""What an optimizer's state will take, foretold without a step; held against a real one."""

import pytest
import torch
from torch import nn

from gradaccum.engine.memory.resident import foretell, state_tensors
from gradaccum.planner.live import LiveBytes, storages

NAMES = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


def parameters(name):
    shapes = [(60, 50), (40, 50)] if name == "Muon" else [(60, 50), (200,), (40, 50)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def measured(optimizer):
    """State and the step's own peak of a real optimizer, in its second step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    return sum(storages(state_tensors([optimizer]), "cpu").values()), live.peak


@pytest.mark.parametrize("lists", [False, True, "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_of_torch(name, lists):
    owned = parameters(name)
    options = {"fused": True} if lists == "fused" else {"foreach": lists}
    try:
        optimizer = getattr(torch.optim, name)(owned, lr=1e-3, **options)
    except (TypeError, RuntimeError):
        if lists is not False:
            pytest.skip("has no such way")
        optimizer = getattr(torch.optim, name)(owned, lr=1e-3)
    before = dict(optimizer.state)
    found = foretell([optimizer], owned)
    assert dict(optimizer.state) == before
    state, step = measured(optimizer)
    assert found.state == state
    assert not found.assumed
    if name in ("ASGD", "Adafactor"):  # these read values in their step, of which there are none
        assert found.step >= step
    else:
        assert found.step == pytest.approx(step, abs=16)


@pytest.mark.parametrize(
    ("kind", "options", "copies"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.SGD, {}, 0),
        (torch.optim.Adam, {"amsgrad": True}, 3),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, 3),
    ],
)
def test_options_that_need_state(kind, options, copies):
    owned = [nn.Parameter(torch.randn(10, 10))]
    found = foretell([kind(owned, lr=1e-3, **options)], owned).state
    assert found in (copies * 400, copies * 400 + 4)  # a counter of steps beside


def test_an_optimizer_that_has_stepped_and_one_that_another_wrote():
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    kept = self.state[p].setdefault("three", torch.zeros(3, *p.shape))
                    kept.add_(p.grad)

    owned = [nn.Parameter(torch.randn(10, 10))]
    optimizer = Own(owned)
    assert foretell([optimizer], owned).state == 1200
    measured(optimizer)
    kept = optimizer.state[owned[0]]["three"].clone()
    assert foretell([optimizer], owned).state == 1200
    assert torch.equal(optimizer.state[owned[0]]["three"], kept)


def test_one_that_cannot_be_asked_is_taken_for_adam_and_said_to_be():
    table = nn.Embedding(50, 4, sparse=True)
    found = foretell([torch.optim.SparseAdam(table.parameters())], table.parameters())
    assert found.assumed
    assert found.state == 2 * 50 * 4 * 4


def test_hooks_and_schedulers_are_not_called():
    owned = [nn.Parameter(torch.randn(4))]
    optimizer = torch.optim.SGD(owned, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    count = getattr(optimizer, "_opt_called", None), scheduler.last_epoch
    foretell([optimizer], owned)
    assert called == []
    assert (getattr(optimizer, "_opt_called", None), scheduler.last_epoch) == count


def test_parameters_without_a_gradient_get_no_state():
    owned = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(8))]
    assert foretell([torch.optim.Adam(owned)], owned[:1]).state == 2 * 16 + 4
