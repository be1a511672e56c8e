"""Training scripts whose every output must be the same under the doctor as under plain Python."""

from __future__ import annotations

START = """\
import torch
from torch import nn
import random
random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)
inner = nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU()
model = nn.Sequential(nn.Linear(4, 8), *inner, nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
END = """
import hashlib, io, random, sys
def show(*tensors):
    for t in tensors:
        print(hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest()[:16])
show(*model.state_dict().values(), torch.get_rng_state())
print(random.random(), hash('x'), [p.grad is None for p in model.parameters()])
print(sorted(m for m in sys.modules if not m.startswith(('gradaccum', 'torch', 'mpmath', 'sympy'))
             and m in ('json', 'numpy', 'rich', 'typer', 'jinja2', 'pytest')))
"""

SCRIPTS = {
    "accumulation": """
for i in range(24):
    x = torch.randn(5, 4)
    loss = model(x).square().mean() / 4
    loss.backward()
    print(loss.item())
    if i % 4 == 3:
        print(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
""",
    "raises in backward twice": """
loss = model(torch.randn(5, 4)).square().mean()
loss.backward()
import traceback
try:
    loss.backward()
except RuntimeError:
    print(traceback.format_exc())
loss.backward()
""",
    "raises in forward": """
class Broken(nn.Module):
    def forward(self, x):
        return self.inner(x)
model.append(Broken())
model(torch.randn(5, 4)).sum().backward()
""",
    "raises in an optimizer": """
def closure():
    optimizer.zero_grad()
    return model(torch.randn(3, 5)).sum()
import traceback
try:
    optimizer.step(closure)
except RuntimeError:
    traceback.print_exc()
optimizer.step(lambda: 1 / 0)
""",
    "raises in a hook": """
model[0].weight.register_hook(lambda g: 1 / 0)
model(torch.randn(5, 4)).sum().backward()
""",
    "warnings": """
import warnings
warnings.simplefilter('always')
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scheduler.step()
optimizer.step()
scheduler.step(3)
loss = model(torch.randn(5, 4)).square().mean()
loss.backward(create_graph=True)
nn.utils.clip_grad_norm_((p for p in []), 1.0)
print(loss.grad)
(loss * 2).grad
model[0].register_full_backward_hook(lambda *a: None)
model(torch.randn(5, 4)).sum().backward()
""",
    "scaler": """
import traceback
scaler = torch.amp.GradScaler('cpu', init_scale=2.0**40, growth_interval=2)
for i in range(8):
    loss = model(torch.randn(5, 4)).square().mean()
    scaler.scale(loss * (1e30 if i == 3 else 1)).backward()
    scaler.unscale_(optimizer)
    if i == 5:
        try:
            scaler.unscale_(optimizer)
        except RuntimeError:
            traceback.print_exc()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=bool(i % 2))
    print(scaler.get_scale())
scaler.step(optimizer)
""",
    "writes of every kind": """
for i in range(6):
    model(torch.randn(5, 4)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.data.mul_(0.99)
            p.grad[..., 0] = 0
            p.grad *= 0.5
            p.grad.data.add_(1e-3)
            p.data = p.data - 0.01 * p.grad
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
    optimizer.step()
    if i % 3 == 0:
        for p in model.parameters(): p.grad = None
    elif i % 3 == 1:
        for p in model.parameters(): p.grad.zero_()
    else:
        model.zero_grad()
try:
    model[0].weight.grad = torch.ones(1)
except RuntimeError as error:
    print(error)
try:
    model[0].weight.add_(1)
except RuntimeError as error:
    print(error)
""",
    "what inspect says": """
import copy, inspect, pickle, types
print(inspect.signature(optimizer.zero_grad), inspect.signature(torch.optim.SGD))
print(inspect.signature(nn.utils.clip_grad_norm_), nn.utils.clip_grad_norm_.__name__)
print(inspect.ismethod(optimizer.zero_grad), callable(optimizer.zero_grad))
print(optimizer.zero_grad.__self__ is optimizer, optimizer.zero_grad.__name__)
print(torch.Tensor.add_ is torch._C.TensorBase.add_, torch.Tensor.zero_.__name__)
print(type(model).__call__ is nn.Module.__call__, nn.Module.train.__qualname__)
print(torch.optim.Optimizer.zero_grad.__qualname__, torch.optim.Optimizer.__init__.__qualname__)
print(sorted(vars(optimizer)), sorted(vars(model)), type(model[0].weight).__mro__)
print(model[0].weight._backward_hooks, model[0].weight.grad, len(optimizer.state))
model(torch.randn(5, 4)).sum().backward()
print(model[0].weight._backward_hooks, model[0]._forward_hooks, optimizer._optimizer_step_pre_hooks)
twin = copy.deepcopy(model)
again = pickle.loads(pickle.dumps((model, optimizer)))[1]
again.step(); again.zero_grad()
print(pickle.loads(pickle.dumps(nn.utils.clip_grad_norm_)) is nn.utils.clip_grad_norm_)
buffer = io.BytesIO() if 'io' in globals() else __import__('io').BytesIO()
torch.save({'m': model.state_dict(), 'o': optimizer.state_dict()}, buffer)
print(len(buffer.getvalue()))
""",
    "who lives how long": """
import gc, weakref
gc.disable()
class Batch:
    pass
for i in range(6):
    batch = Batch(); batch.x = torch.randn(5, 4)
    out = model(batch.x)
    loss = out.square().mean()
    seen = [weakref.ref(batch), weakref.ref(batch.x), weakref.ref(out), weakref.ref(loss)]
    node = loss.grad_fn
    loss.backward()
    old = weakref.ref(model[0].weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    del batch, out, loss, node
    print([s() is None for s in seen], old() is None)
other = nn.Linear(2, 2); o2 = torch.optim.SGD(other.parameters(), lr=1)
other(torch.ones(1, 2)).sum().backward(); o2.step()
seen = [weakref.ref(p) for p in other.parameters()] + [weakref.ref(o2)]
del other, o2
print([s() is None for s in seen])
gc.collect()
print([s() is None for s in seen])
""",
    "modes and subclasses": """
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
class Names(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        print('f', getattr(func, '__name__', func))
        return func(*args, **(kwargs or {}))
class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print('d', func)
        return func(*args, **(kwargs or {}))
class Mine(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        print('m', getattr(func, '__name__', func))
        return super().__torch_function__(func, types, args, kwargs or {})
for mode in (Names, Ops):
    with mode():
        model(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters(): p.grad = None
x = torch.ones(5, 4).as_subclass(Mine)
(model(x).sum() / 2).backward()
optimizer.step()
""",
    "anomaly, checkpoint, grad, vmap": """
from torch.utils.checkpoint import checkpoint
for reentrant in (True, False):
    x = torch.randn(5, 4, requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    print(x.grad.sum())
with torch.autograd.detect_anomaly(check_nan=False):
    model(torch.randn(5, 4)).sum().backward()
g = torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)
sum(t.square().sum() for t in g).backward()
model.eval()
from torch.func import functional_call, grad, vmap
f = lambda p, x: functional_call(model, p, (x[None],)).sum()
params = {k: v.detach() for k, v in model.named_parameters()}
print(vmap(grad(f), (None, 0))(params, torch.randn(3, 4))['0.weight'].sum())
""",
    "profiler": """
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CPU]) as prof:
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
print(sorted((e.key, e.count) for e in prof.key_averages()))
""",
    "many optimizers and schedulers": """
nets = [nn.Linear(4, 4) for _ in range(6)]
makers = [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad,
          torch.optim.LBFGS, torch.optim.NAdam]
for net, make in zip(nets, makers):
    o = make(net.parameters(), lr=0.01)
    s = torch.optim.lr_scheduler.SequentialLR(o, [torch.optim.lr_scheduler.LinearLR(o),
        torch.optim.lr_scheduler.CosineAnnealingLR(o, 4)], [2])
    for i in range(5):
        def closure():
            o.zero_grad()
            loss = net(torch.ones(2, 4)).square().mean()
            loss.backward()
            return loss
        print(float(o.step(closure)))
        s.step()
    print(s.get_last_lr())
    show_later = [p.sum().item() for p in net.parameters()]
    print(show_later)
p = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for m in (1.0, 2.0, 3.0): p.step(m)
print(optimizer.param_groups[0]['lr'])
""",
    "threads": """
import threading
results = {}
def train(k):
    torch_model = nn.Linear(3, 1)
    with torch.no_grad():
        for p in torch_model.parameters(): p.fill_(k)
    o = torch.optim.SGD(torch_model.parameters(), lr=0.1)
    for i in range(40):
        (torch_model(torch.full((2, 3), float(i))).tanh().mean() / 2).backward()
        if i % 2: o.step(); o.zero_grad()
    results[k] = [p.tolist() for p in torch_model.parameters()]
threads = [threading.Thread(target=train, args=(k,)) for k in range(4)]
for t in threads: t.start()
for t in threads: t.join()
print(sorted(results.items()))
""",
    "leaves by the back door": """
import os, sys
model(torch.randn(5, 4)).square().mean().backward()
optimizer.step()
print('done'); sys.stdout.flush()
os._exit(4)
""",
    "interrupted": """
model(torch.randn(5, 4)).square().mean().backward()
optimizer.step()
import signal
signal.raise_signal(signal.SIGINT)
""",
    "killed": """
model(torch.randn(5, 4)).square().mean().backward()
optimizer.step()
import os, signal
print('so far', flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
    "hash seeds and order": """
import random
random.seed(1)
names = {n for n, _ in model.named_parameters()}
for n in names: print(n, hash(n))
for i in range(4):
    loss = sum(p.square().sum() for n, p in model.named_parameters() if n in names)
    loss.backward()
    print(random.random(), torch.rand(1), loss.item())
    optimizer.step(); optimizer.zero_grad()
""",
    "numpy, init and load": """
nn.init.orthogonal_(model[0].weight)
state = {k: v.clone() for k, v in model.state_dict().items()}
for i in range(3):
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    model.load_state_dict(state)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9,
                                  model.parameters())
    model[0].weight.detach().numpy()[0, 0] = 3.0
model.to(torch.float64).to(torch.float32)
""",
    "swapped printing": """
class Loud(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        print('zero', set_to_none)
        super().zero_grad(set_to_none)
    def step(self, closure=None):
        print('step')
        return super().step(closure)
o = Loud(model.parameters(), lr=0.1, momentum=0.9)
zero = o.zero_grad
for i in range(3):
    zero()
    model(torch.randn(5, 4)).square().mean().backward()
    o.step()
print(repr(o), o)
""",
    "bound methods": """
import inspect, pickle, types, weakref
from functools import partial
from torch.optim.lr_scheduler import StepLR
scheduler = StepLR(optimizer, 2)
x = torch.ones(2, 4)
for owner, names in ((model, ('__call__', 'train', 'eval', 'zero_grad')), (x, ('backward',)),
                     (optimizer, ('step', 'zero_grad')), (scheduler, ('step',))):
    for name in names:
        method = getattr(owner, name)
        known = [method]
        known.remove(getattr(owner, name))
        again = types.MethodType(method.__func__, owner)
        print(name, type(method), inspect.ismethod(method), method.__self__ is owner, known,
              method == again, hash(method) == hash(again), method.__qualname__,
              inspect.signature(method), partial(method).func == method,
              weakref.WeakMethod(method)() == method, len(inspect.getsource(method)))
print(types.MethodType(type(model).__call__, model)(x).shape)
print(pickle.loads(pickle.dumps(nn.Linear(2, 1).zero_grad)).__name__)
""",
    "functions of torch": """
import inspect, pickle
functions = (nn.utils.clip_grad_norm_, nn.Module.train, nn.Module.zero_grad,
             nn.utils.clip_grad_value_, torch.Tensor.backward, torch.optim.SGD.step,
             torch.optim.Optimizer.zero_grad, torch.autograd.backward, torch.autograd.grad)
for f in functions:
    class Held: held = f
    print(f.__name__, type(f), inspect.isfunction(f), callable(f), inspect.getsourcelines(f)[1],
          inspect.signature(f), f.__defaults__, f.__code__.co_name, f.__code__.co_varnames[:2],
          inspect.ismethod(Held().held), pickle.loads(pickle.dumps(f)) is f)
print(type(inspect.getattr_static(nn.Module, 'eval')), type(vars(nn.Module)['train']))
print(torch.Tensor.add_, callable(torch.Tensor.add_), inspect.isroutine(torch.Tensor.add_))
""",
    "replaced and put back": """
from unittest import mock
for owner, name in ((nn.Module, 'train'), (nn.Module, 'zero_grad'), (torch.Tensor, 'backward'),
                    (torch.optim.Optimizer, 'zero_grad'), (torch.optim.AdamW, 'step'),
                    (nn.utils, 'clip_grad_norm_')):
    for spec in ({}, {'autospec': True}):
        was = vars(owner).get(name)
        with mock.patch.object(owner, name, **spec) as stand_in:
            getattr(owner, name)(model)
            print(name, spec, stand_in.called)
        print(vars(owner).get(name) is was)
real = torch.optim.AdamW.step
def loud(self, closure=None):
    print('loud')
    return real(self, closure)
torch.optim.AdamW.step = loud
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
torch.optim.AdamW.step = real
optimizer.step()
""",
    "a tensor class that listens": """
class Listens(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        print(getattr(function, '__name__', function))
        return super().__torch_function__(function, types, args, kwargs or {})
x = torch.ones(3).as_subclass(Listens).requires_grad_()
o = torch.optim.SGD([x], 0.1)
for i in range(3):
    (x * 2).sum().backward()
    o.step()
    o.zero_grad()
    x.data.add_(1)
""",
    "computed again where it is looked at": """
from torch.utils.checkpoint import checkpoint
ran = []
def block(h):
    ran.append('forward')
    return model(h).square()
pack = lambda t: (ran.append('pack'), t)[1]
unpack = lambda t: (ran.append('unpack'), t)[1]
for way in ('none', 'checkpoint', 'hooks', 'none'):
    for i in range(3):
        x, total = torch.randn(5, 4), torch.zeros(5, 4)
        if way == 'checkpoint':
            out = checkpoint(block, x, use_reentrant=False)
        elif way == 'hooks':
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = block(x)
        else:
            out = block(x)
        loss = out.mean() / 2
        total.add_(1)  # a plain tensor: its place is compared with what the graph saved
        x.data.mul_(0.5)
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        print(way, i, ran, loss.item())
        ran.clear()
""",
    "a tracer of its own": """
import sys
seen = []
def tracer(frame, event, argument):
    seen.append((frame.f_code.co_name, event, frame.f_lineno))
    return tracer
def train():
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
train()
before = sys.gettrace()
sys.settrace(tracer)
train()
print(sys.gettrace() is tracer)
sys.settrace(before)
own = [one for one in seen if one[0] == 'train']
theirs = [one for one in seen if one[0] in ('backward', 'wrapper', 'zero_grad', 'adamw')]
print(own, [one for one in theirs if one[1] in ('call', 'return')])
""",
}

ENDS = (
    "raises in an optimizer",
    "scaler",
    "leaves by the back door",
    "interrupted",
    "killed",
    "computed again where it is looked at",
)
"""Those that end their process, or must meet the first windows, which are looked at closely: each
has a process of its own."""


WATCHED = "whether a doctor is there"
"""The last of those that share a process: the one thing that must differ."""


def together() -> str:
    """The other scripts as one: each in a namespace of its own, so that torch is loaded once."""
    whole = {name: START + body + END for name, body in SCRIPTS.items() if name not in ENDS}
    return (
        f"SCRIPTS = {whole!r}\n"
        "import sys, traceback\n"
        "for name, source in SCRIPTS.items():\n"
        "    print('#', name, flush=True); print('#', name, file=sys.stderr, flush=True)\n"
        "    try:\n"
        "        exec(compile(source, name, 'exec'), {'__name__': name})\n"
        "    except Exception:\n"
        "        traceback.print_exc()\n"
        f"print('#', {WATCHED!r})\n"
        "print('gradaccum.doctor' in sys.modules)\n"
    )
