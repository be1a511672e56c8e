"""A probe leaves no trace: every bit of the model and of the random states is as it was."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import gradaccum as ga
from gradaccum.engine.memory.untouched import untouched
from memory_models import padded


class Busy(nn.Module):
    """Changes whatever a forward can change."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(300, 8, max_norm=0.1)  # writes to its own weight
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("later", None)
        self.calls = 0
        self.cache = None
        self.memory = torch.zeros(3)

    def forward(self, tokens):
        self.calls += 1
        self.cache = self.table(tokens).mean(1)
        self.seen = self.seen + 1
        self.later = torch.ones(1)
        self.memory.add_(random.random() + np.random.rand())
        self.found = self.cache.sum()
        self.drop.p = 0.4
        self.eval() if self.calls > 5 else self.train()
        return self.spectral(self.drop(self.norm(self.cache)))


def loss_fn(model, tokens):
    return model(tokens).square().sum(), len(tokens)


def upcoming():
    """The numbers that torch would draw next."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return torch.rand(700, generator=generator), torch.randn(9, generator=generator)


def everything(model):
    numpy = np.random.get_state()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {name: value.detach().clone() for name, value in tensors.items()},
        "same": {name: id(value) for name, value in tensors.items()},
        "grads": [id(p.grad) for p in model.parameters()],
        "grad": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "plain": (model.calls, model.cache, model.memory.clone(), model.drop.p),
        "later": model.later,
        "modes": [module.training for module in model.modules()],
        "names": [sorted(vars(module)) for module in model.modules()],
        "random": (upcoming(), random.getstate(), numpy[1].tolist(), numpy[2:]),
    }


def same(one, two):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


def busy():
    torch.manual_seed(0)
    model = Busy()
    loss_fn(model, padded([3, 4]))[0].backward()  # gradients of somebody else
    return model


def test_fit_leaves_no_trace():
    model = busy()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    optimizer.step()
    state = {key: value.copy() for key, value in optimizer.state.items()}
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    lengths = [4] * 8 + [9] * 4
    batch = padded(lengths)
    before = everything(model)
    ga.fit(model, loss_fn, batch, optimizer=optimizer, lengths=lengths)
    after = everything(model)
    assert {key: same(before[key], after[key]) for key in before} == dict.fromkeys(before, True)
    assert {k: v.keys() for k, v in optimizer.state.items()} == {
        k: v.keys() for k, v in state.items()
    }
    for parameter, values in state.items():
        assert optimizer.state[parameter].keys() == values.keys()
        assert all(optimizer.state[parameter][key] is value for key, value in values.items())
    assert optimizer.param_groups == groups


def test_the_comparison_can_fail():
    model = busy()
    before = everything(model)
    loss_fn(model, padded([3, 4]))[0].backward()
    after = everything(model)
    changed = {key for key in before if not same(before[key], after[key])}
    assert changed >= {"tensors", "grad", "plain", "random"}


def test_the_next_update_is_what_it_would_have_been():
    def update(probed):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        batch = torch.randn(16, 6)
        if probed:
            ga.fit(model, loss_fn, batch, optimizer=optimizer)
        acc = ga.Accumulator(model, optimizer, every=4, batchnorm="microbatch")
        acc.step(batch, loss_fn)
        return model.state_dict()

    assert same(dict(update(True)), dict(update(False)))


def test_an_error_inside_leaves_no_trace_either():
    model, batch = busy(), padded([4] * 8)
    before = everything(model)

    def failing(model, tokens):
        loss_fn(model, tokens)[0].backward()
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        ga.fit(model, failing, batch)
    after = everything(model)
    assert {key: same(before[key], after[key]) for key in before} == dict.fromkeys(before, True)


def test_a_weight_that_no_forward_writes_to_is_not_copied():
    model = nn.Linear(100, 100)
    from gradaccum.planner.live import LiveBytes

    with LiveBytes() as live, untouched(model):
        pass
    assert live.peak == 0
