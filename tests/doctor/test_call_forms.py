"""Whatever is listened to takes what the original takes, however it is called."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import diagnose

from doctor_harness import both
from gradaccum.doctor.graft import graftable
from gradaccum.doctor.touch import Patches
from gradaccum.doctor.trace.model import Trace
from gradaccum.doctor.watch import watch


def signature(function: object) -> str:
    """What `inspect` says of it, or that it says nothing."""
    try:
        return str(inspect.signature(function))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        return type(error).__name__


def taken(function: Callable[..., Any]) -> tuple[object, ...]:
    """What a call is bound by: names, kinds and defaults of the parameters, and those captured."""
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    kinds = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR)
    numbers = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, kinds
    defaults = function.__defaults__, function.__kwdefaults__
    return *numbers, code.co_varnames[:count], defaults, code.co_freevars, signature(function)


def test_everything_that_is_replaced_takes_what_the_original_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions: dict[Callable[..., Any], tuple[tuple[object, ...], object]] = {}
    holders: list[tuple[Any, str, object, str]] = []
    graft, put = Patches.graft, Patches.put

    def grafting(self: Patches, function: Callable[..., Any], *rest: Any, **more: Any) -> Any:
        inner = graftable(function)
        assert inner is not None, function
        functions.setdefault(inner, (taken(inner), inner.__code__))
        return graft(self, function, *rest, **more)

    def putting(self: Patches, holder: Any, name: str, new: Any) -> None:
        holders.append((holder, name, getattr(holder, name), signature(getattr(holder, name))))
        put(self, holder, name, new)

    monkeypatch.setattr(Patches, "graft", grafting)
    monkeypatch.setattr(Patches, "put", putting)
    with watch():
        assert len(functions) > 25
        assert len(holders) > 100
        for function, (before, code) in functions.items():
            assert function.__code__ is not code, function
            assert taken(function) == before, function
        for holder, name, original, told in holders:
            now = getattr(holder, name)
            assert now == original or repr(now) == repr(original), name
            assert signature(now) == told, name
            assert signature(vars(holder)[name]) in (told, "TypeError", "ValueError"), name
    assert all(function.__code__ is code for function, (_, code) in functions.items())


def test_that_a_lost_parameter_would_be_seen() -> None:
    def original(first: int, /, second: int = 2, *rest: int, third: int, **more: int) -> None: ...

    def lacks(first: int, /, second: int = 2, *rest: int, third: int) -> None: ...

    assert taken(original) == taken(original)
    assert taken(original) != taken(lacks)


START = """\
import copy
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x, *more, scale=1.0, **rest):
        return self.inner(x) * scale + len(rest) + len(more)

net = Scaled()
P = list(net.parameters())
adam = torch.optim.AdamW(P, lr=0.1)
average = AveragedModel(net)
schedule = torch.optim.lr_scheduler.StepLR(adam, 2)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam)
x = torch.ones(2, 3)
none = None
"""
FORMS = {
    "a module": ("net(x, 1, scale=2.0, a=3)", "net.__call__(*(x, 1), **{'scale': 2.0, 'a': 3})"),
    "a module by its parameters' names": ("net(x)", "net(x=x)"),
    "a loss": ("net(x).sum().backward(none, False)", "net(x).sum().backward(retain_graph=False)"),
    "a loss and what it is for": (
        "net(x).sum().backward(none, none, False, P)",
        "torch.Tensor.backward(net(x).sum(), inputs=P, create_graph=False)",
    ),
    "autograd's own": (
        "torch.autograd.backward(net(x).sum(), none, none)",
        "torch.autograd.backward(tensors=net(x).sum(), grad_tensors=None, retain_graph=None)",
    ),
    "a gradient that is asked for": (
        "torch.autograd.grad(net(x).sum(), P, none, False, False, True)",
        "torch.autograd.grad(outputs=net(x).sum(), inputs=P, allow_unused=True)",
    ),
    "an optimizer": (
        "torch.optim.SGD(P, 0.1, 0.9)",
        "torch.optim.SGD(params=P, lr=0.1, momentum=0.9)",
    ),
    "a step": (
        "net(x).sum().backward(); adam.step(none)",
        "net(x=x).sum().backward(); adam.step(closure=None)",
    ),
    "a clearing": ("adam.zero_grad(False)", "adam.zero_grad(set_to_none=False)"),
    "a module's clearing": ("net.zero_grad(True)", "net.zero_grad(set_to_none=True)"),
    "a state": (
        "adam.load_state_dict(adam.state_dict())",
        "adam.load_state_dict(state_dict=torch.optim.Optimizer.state_dict(self=adam))",
    ),
    "a mode": ("net.train(False)", "net.train(mode=False)"),
    "a scaled step": (
        "scaler.scale(net(x).sum()).backward(); scaler.unscale_(adam); scaler.step(adam); "
        "scaler.update(4.0)",
        "scaler.scale(outputs=net(x).sum()).backward(); scaler.unscale_(optimizer=adam); "
        "scaler.step(optimizer=adam); scaler.update(new_scale=4.0)",
    ),
    "a schedule": ("schedule.step(none)", "schedule.step(epoch=None)"),
    "a schedule by a figure": ("plateau.step(1.0)", "plateau.step(metrics=1.0)"),
    "a schedule that is made": (
        "torch.optim.lr_scheduler.LambdaLR(adam, lambda s: 1.0, -1)",
        "torch.optim.lr_scheduler.LambdaLR(optimizer=adam, lr_lambda=lambda s: 1.0)",
    ),
    "an average": ("average.update_parameters(net)", "average.update_parameters(model=net)"),
    "a clip by norm": (
        "net(x).sum().backward(); nn.utils.clip_grad_norm_(P, 1.0, 2.0, False)",
        "net(x).sum().backward(); nn.utils.clip_grad_norm_(max_norm=1.0, parameters=P)",
    ),
    "a clip by value": (
        "net(x).sum().backward(); nn.utils.clip_grad_value_(P, 0.5)",
        "net(x).sum().backward(); nn.utils.clip_grad_value_(clip_value=0.5, parameters=P)",
    ),
    "a checkpoint": (
        "checkpoint(net, x, use_reentrant=False, scale=3.0).sum().backward()",
        "checkpoint(function=net, use_reentrant=False, x=x, scale=3.0).sum().backward()",
    ),
    "writes": (
        "w = net.inner.weight.detach(); w.add_(x[:1], alpha=0.1); w.clamp_(-1, 1); w.mul_(2)",
        "w = net.inner.weight.detach(); w.add_(other=x[:1], alpha=0.1); w.clamp_(max=1, min=-1); "
        "torch.Tensor.mul_(w, other=2)",
    ),
    "what asks for gradients": (
        "P[0].requires_grad_(False); P[0].requires_grad_(True)",
        "P[0].requires_grad_(requires_grad=False); P[0].requires_grad_(requires_grad=True)",
    ),
    "hooks": (
        "P[0].register_hook(lambda g: 2 * g); net(x).sum().backward()",
        "P[0].register_hook(hook=lambda g: 2 * g); net(x).sum().backward()",
    ),
}
AFTER = """
net.train()
net(x).sum().backward()
adam.step()
"""
"""What makes the doctor look at what was written."""
END = """
print([p.tolist() for p in P], [p.grad if p.grad is None else p.grad.tolist() for p in P])
print([p.tolist() for p in average.parameters()], adam.param_groups[0]["lr"], scaler.get_scale())
"""


def scripts(which: int) -> str:
    """Every form of one kind, each on a model of its own."""
    return "".join(
        f"print({name!r})\n{START}{forms[which]}\n{END}" for name, forms in FORMS.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["by place", "by name"])
def test_every_form_of_a_call_does_what_it_does_without_us(which: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(scripts(which))
    plain, under = both(["script.py"], tmp_path)
    assert plain.code == 0, plain.stderr.decode()[-2000:]
    assert under.stdout.decode() == plain.stdout.decode()
    assert under.stderr.decode() == plain.stderr.decode()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_call_by_name_is_heard_as_one_by_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Counter[str]] = []
    parse = Trace.parse

    def parsing(*given: Any) -> Trace:
        trace = parse(*given)
        heard.append(Counter(f"{e.kind} {e.get('touched')}" for e in trace.events))
        return trace

    monkeypatch.setattr(Trace, "parse", parsing)
    for which in (0, 1):
        seen = diagnose(START + FORMS[name][which] + AFTER, tmp_path)
        assert seen.run.error == ""
    assert heard[0]["backward None"] >= 1
    assert heard[0] == heard[1]
