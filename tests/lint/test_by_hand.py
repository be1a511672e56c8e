"""Gradients that are cleared or scaled by helpers, hooks and code that we do not see."""

import pytest

from gradaccum.lint.files.program import Program
from gradaccum.lint.judge import judge

from .pairing import HEAD, MODEL, Pairs, codes, pair, twins

PAIRS: Pairs = {}

STEP = """
for x, y in loader:
    F.cross_entropy(net(x), y).backward()
    opt.step()
    @
"""

CLEARED = {
    "helper over a model": (
        "def wipe(m):\n    for p in m.parameters():\n        p.grad = None\n",
        "wipe(net)",
    ),
    "helper over parameters": (
        "def wipe(ps):\n    for p in ps:\n        p.grad.detach_()\n        p.grad.zero_()\n",
        "wipe(list(net.parameters()))",
    ),
    "helper over one gradient": (
        "def wipe(g):\n    g.zero_()\n",
        "[wipe(p.grad) for p in net.parameters()]",
    ),
    "helper over groups": (
        "def wipe(o):\n    for g in o.param_groups:\n        for p in g['params']:\n"
        "            p.grad = None\n",
        "wipe(opt)",
    ),
    "helper of a helper": (
        "def one(p):\n    del p.grad\ndef wipe(m):\n    for p in m.parameters():\n        one(p)\n",
        "wipe(net)",
    ),
    "method": (
        "class Tool:\n    def __init__(self, m):\n        self.m = m\n    def wipe(self):\n"
        "        for p in self.m.parameters():\n            p.grad = None\ntool = Tool(net)\n",
        "tool.wipe()",
    ),
    "lambda": ("wipe = lambda o: o.zero_grad()\n", "wipe(opt)"),
    "bound method": ("", "z = opt.zero_grad; z()"),
    "bound method kept outside": ("z = opt.zero_grad\n", "z()"),
    "method of the class": ("", "torch.optim.AdamW.zero_grad(opt)"),
    "method of the module class": ("", "nn.Module.zero_grad(net)"),
    "by name": ("", "getattr(opt, 'zero_grad')()"),
    "apply": ("", "net.apply(lambda part: part.zero_grad())"),
    "apply a helper": (
        "def wipe(part):\n    for p in part.parameters(recurse=False):\n        p.grad = None\n",
        "net.apply(wipe)",
    ),
    "del": ("", "for p in net.parameters(): del p.grad"),
    "setattr": ("", "for p in net.parameters(): setattr(p, 'grad', None)"),
    "fill_": ("", "for p in net.parameters(): p.grad.data.fill_(0)"),
    "times nothing": ("", "for p in net.parameters(): p.grad *= 0"),
    "mul_ by nothing": ("", "for p in net.parameters(): p.grad.mul_(0.0)"),
    "item of all": ("", "for p in net.parameters(): p.grad[...] = 0"),
    "copy_": ("", "for p in net.parameters(): p.grad.copy_(torch.zeros_like(p))"),
    "map": ("", "list(map(lambda p: p.grad.zero_(), net.parameters()))"),
    "foreach": ("", "torch._foreach_zero_([p.grad for p in net.parameters()])"),
    "hook": ("opt.register_step_post_hook(lambda o, a, k: o.zero_grad())\n", "pass"),
    "hook for all": (
        "from torch.optim.optimizer import register_optimizer_step_post_hook\n"
        "register_optimizer_step_post_hook(lambda o, a, k: o.zero_grad())\n",
        "pass",
    ),
    "unseen, given the model": ("from tools import begin_anew\n", "begin_anew(net)"),
    "unseen, given the optimizer": ("import tools\n", "tools.begin_anew(opt)"),
    "unseen, given parameters": ("from tools import begin_anew\n", "begin_anew(net.parameters())"),
    "unseen inside a helper": (
        "from tools import begin_anew\ndef after(m):\n    begin_anew(m)\n",
        "after(net)",
    ),
    "unseen method of a class of unseen make": ("", "opt.after_update()"),
}  # fmt: skip

NOT_CLEARED = {
    "helper that looks": (
        "def show(m):\n    print(sum(p.grad.norm() for p in m.parameters()))\n",
        "show(net)",
    ),
    "helper that only is called clear": (
        "def zero_grad_all(m):\n    print(m)\n",
        "zero_grad_all(net)",
    ),
    "hook that looks": ("opt.register_step_post_hook(lambda o, a, k: print(o))\n", "pass"),
    "bound method of something else": ("z = opt.state_dict\n", "z()"),
    "apply that looks": ("", "net.apply(lambda part: print(part))"),
    "unseen, after the loop": ("from tools import begin_anew\n", "pass\nbegin_anew(net)"),
    "torch's own": ("", "torch.save(net.state_dict(), 'a.pt')"),
    "numbers are no gradients": ("total = torch.zeros(1)\n", "total.zero_()"),
}


@pytest.mark.parametrize("name", list(CLEARED))
def test_what_clears_is_followed_wherever_it_stands(name):
    before, clears = CLEARED[name]
    assert "GA101" not in codes(MODEL + before + STEP.replace("@", clears))


@pytest.mark.parametrize("name", list(NOT_CLEARED))
def test_what_does_not_clear_is_no_excuse(name):
    before, beside = NOT_CLEARED[name]
    assert "GA101" in codes(MODEL + before + STEP.replace("@", beside))


WINDOW = """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if (i + 1) % args.every == 0 or i + 1 == len(loader):
        @
        opt.step()
        opt.zero_grad()
"""

SHARED = {
    "helper over a model": (
        "def halve(m, k):\n    for p in m.parameters():\n        p.grad.div_(k)\n",
        "halve(net, args.every)",
    ),
    "helper over parameters": (
        "def halve(ps, k):\n    for p in ps:\n        if p.grad is not None:\n"
        "            p.grad /= k\n",
        "halve(net.parameters(), args.every)",
    ),
    "helper over one gradient": (
        "def halve(g, k):\n    g.div_(k)\n",
        "for p in net.parameters(): halve(p.grad, args.every)",
    ),
    "list of gradients": (
        "",
        "grads = [p.grad for p in net.parameters()]\n        for g in grads: g.div_(args.every)",
    ),
    "foreach": ("", "torch._foreach_div_([p.grad for p in net.parameters()], args.every)"),
    "hook before the step": (
        "def halve(o, a, k):\n    for g in o.param_groups:\n        for p in g['params']:\n"
        "            p.grad /= args.every\nopt.register_step_pre_hook(halve)\n",
        "pass",
    ),
    "hook on gradients": (
        "for p in net.parameters():\n    p.register_hook(lambda g: g / args.every)\n",
        "pass",
    ),
    "unseen": ("from tools import finish\n", "finish(net)"),
    "unseen method": ("", "opt.finish(args.every)"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SHARED))
def test_what_divides_gradients_is_followed_wherever_it_stands(name):
    before, divides = SHARED[name]
    assert "GA201" not in codes(MODEL + before + WINDOW.replace("@", divides))


@pytest.mark.parametrize(
    ("before", "beside"),
    [
        ("def scale_grads(m, k):\n    print(m, k)\n", "scale_grads(net, args.every)"),
        ("opt.register_step_pre_hook(lambda o, a, k: print(o))\n", "pass"),
        ("for p in net.parameters():\n    p.register_hook(lambda g: None)\n", "pass"),
    ],
)
def test_no_name_divides(before, beside):
    assert "GA201" in codes(MODEL + before + WINDOW.replace("@", beside))


pair(
    PAIRS,
    "the weight that a backward begins with",
    "GA201",
    MODEL + WINDOW.replace("@", "pass").replace(".backward()", ".backward(@)"),
    "torch.ones_like(loss)",
    "torch.tensor(1 / args.every)",
)

pair(
    PAIRS,
    "a criterion that divides",
    "GA201",
    MODEL
    + """
class Share(nn.Module):
    def __init__(self, every):
        super().__init__()
        self.every = every
    def forward(self, out, y):
        value = F.cross_entropy(out, y)
        return value@
criterion = Share(args.every)
"""
    + WINDOW.replace("@", "pass").replace("F.cross_entropy(net(x), y)", "criterion(net(x), y)"),
    "",
    " / self.every",
)

SAM = """
class Sharp(torch.optim.Optimizer):
    def __init__(self, params, make, **rest):
        super().__init__(params, rest)
        self.inner = make(self.param_groups, **rest)
        self.param_groups = self.inner.param_groups
    @torch.no_grad()
    def climb(self, clear=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad)
        if clear:
            self.zero_grad()
    @torch.no_grad()
    def update(self, clear=False):
        self.inner.step()
        if clear:
            self.zero_grad()
    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.climb(clear=True)
        closure()
        self.update()
net = nn.Linear(8, 2)
opt = Sharp(net.parameters(), torch.optim.SGD, lr=0.1)
"""

pair(
    PAIRS,
    "an optimizer around another",
    "GA101",
    SAM
    + """
for x, y in loader:
    F.cross_entropy(net(x), y).backward()
    opt.climb(clear=@)
    F.cross_entropy(net(x), y).backward()
    opt.update(clear=@)
""",
    "False",
    "True",
)


@pytest.mark.parametrize(
    "made",
    [
        SAM,
        "from tools import Sharp\nnet = nn.Linear(8, 2)\nopt = Sharp(net.parameters(), 0.1)\n",
    ],
)
def test_a_step_of_ones_own_may_clear_before_it_calls_the_closure(made):
    text = """
for x, y in loader:
    def again():
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss
    F.cross_entropy(net(x), y).backward()
    opt.step(again)
    opt.zero_grad()
"""
    assert not codes(made + text) & {"GA101", "GA104", "GA503"}
    torch_made = "net = nn.Linear(8, 2)\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
    assert "GA104" in codes(torch_made + text)


pair(
    PAIRS,
    "a group of its own for what is unfrozen",
    "GA309",
    """
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
net[0].requires_grad_(False)
opt = torch.optim.AdamW(p for p in net.parameters() if p.requires_grad)
for epoch in range(2):
    if epoch == 1:
        net[0].requires_grad_(True)
        @
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
""",
    "pass",
    'opt.add_param_group({"params": net[0].parameters()})',
)

pair(
    PAIRS,
    "a new optimizer for what is unfrozen",
    "GA309",
    """
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
def fit(opt):
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
net[0].requires_grad_(False)
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
fit(opt)
net[0].requires_grad_(True)
@
fit(opt)
""",
    "pass",
    "opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])",
)

ANEW = {
    "weights of before": "net.load_state_dict(before)",
    "weights drawn anew": "for part in net.modules():\n"
    "        if hasattr(part, 'reset_parameters'):\n            part.reset_parameters()",
    "unseen": "begin(net)",
    "more parameters": "net[at].requires_grad_(True)",
}  # fmt: skip


@pytest.mark.parametrize("name", [*ANEW, ""])
def test_an_optimizer_may_be_new_where_the_weights_are(name):
    text = """
from tools import begin
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
before = net.state_dict()
for at in range(args.rounds):
    @
    opt = torch.optim.Adam(net.parameters())
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
"""
    found = codes(text.replace("@", ANEW.get(name, "pass")))
    assert ("GA304" in found) is (name not in ANEW)


@pytest.mark.parametrize("trained", [True, False])
def test_an_optimizer_without_gradients_only_shows_its_schedule(trained):
    text = """
net = nn.Linear(1, 1)
for warmup in args.warmups:
    opt = torch.optim.Adam(net.parameters(), lr=1.0)
    plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / warmup)
    rates = []
    for x, y in loader:
        rates.append(opt.param_groups[0]["lr"])
        opt.zero_grad()
        @
        opt.step()
        plan.step()
"""
    found = codes(text.replace("@", "F.mse_loss(net(x), y).backward()" if trained else "pass"))
    assert ("GA304" in found) is trained


def test_a_cached_property_is_made_once():
    text = """
from functools import cached_property
class Fit:
    def __init__(self):
        self.net = nn.Linear(8, 2)
    @cached_property
    def opt(self):
        return torch.optim.Adam(self.net.parameters())
    def run(self):
        for x, y in loader:
            F.cross_entropy(self.net(x), y).backward()
            self.opt.step()
"""
    assert codes(text) & {"GA101", "GA304"} == {"GA101"}
    assert codes(text.replace("cached_property", "property")) & {"GA304"} == {"GA304"}


pair(
    PAIRS,
    "losses that are thrown away now and then",
    "GA501",
    MODEL
    + """
kept = []
for x, y in loader:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    kept.append(loss)
    if len(kept) == 10:
        @
""",
    "print(len(kept))",
    "kept.clear()",
)

pair(
    PAIRS,
    "a counter spelled with a complement",
    "GA303",
    MODEL
    + """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(net(x), y) / args.every
    loss.backward()
    if @i % args.every == 0:
        opt.step()
        opt.zero_grad()
""",
    "",
    "-~",
)

pair(
    PAIRS,
    "representations that are kept, and differentiated with the whole batch's gradient",
    "GA702",
    MODEL
    + """
for x, _ in loader:
    pieces = x.split(args.size)
    opt.zero_grad()
    @
    opt.step()
""",
    """for piece in pieces:
        out = net(piece)
        loss = F.cross_entropy(out @ out.T, torch.arange(len(out))) / len(pieces)
        loss.backward()""",
    """with torch.no_grad():
        kept = [net(piece) for piece in pieces]
    kept = torch.cat(kept).requires_grad_()
    loss = F.cross_entropy(kept @ kept.T, torch.arange(len(kept)))
    loss.backward()
    for piece, grad in zip(pieces, kept.grad.split(args.size)):
        net(piece).backward(grad)""",
)

TAIL = (
    MODEL
    + """
loader = torch.utils.data.DataLoader(files, batch_size=2)
@
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y) / WINDOW
        loss.backward()
        if (i + 1) % WINDOW == 0:
            opt.step()
            opt.zero_grad()
"""
)
WHOLE = {
    "assert": "assert len(loader) % WINDOW == 0",
    "assert with a word": "assert not len(loader) % WINDOW, 'whole windows only'",
    "assert, turned": "assert 0 == len(loader) % WINDOW",
    "raise": "if len(loader) % WINDOW != 0:\n    raise ValueError('whole windows only')",
    "cut": "whole = len(files) // (2 * WINDOW) * (2 * WINDOW)\n"
    "loader = torch.utils.data.DataLoader(torch.utils.data.Subset(files, range(whole)), 2)",
}


@pytest.mark.parametrize("window", ["args.every", "4"])
@pytest.mark.parametrize("name", [*WHOLE, "", "logs"])
def test_no_tail_where_the_script_has_whole_windows_only(name, window):
    other = "assert args.log % WINDOW == 0" if name else "assert len(loader) > WINDOW"
    before = WHOLE.get(name, other)
    found = codes(TAIL.replace("@", before).replace("WINDOW", window))
    assert ("GA302" in found) is (name not in WHOLE)


UNSAID = {
    "GA302": (TAIL.replace("@", ""), "is then longer than all others"),
    "GA303": (
        TAIL.replace("@", "").replace("(i + 1) %", "i %"),
        "after 1 micro-batch, all others after a full window",
    ),
    "GA102": (
        TAIL.replace("@", "").replace("        loss =", "        opt.zero_grad()\n        loss ="),
        "some of its micro-batches",
    ),
}


@pytest.mark.parametrize("code", list(UNSAID))
def test_a_message_states_no_number_that_the_script_does_not(code):
    text, said = UNSAID[code]
    program = Program({"train.py": HEAD + text.replace("WINDOW", "args.every")})
    module = program.load("train.py")
    assert module is not None
    messages = [one.message for one in judge(program, module) if one.code == code]
    assert [said in message for message in messages[:1]] == [True], messages


test_one_is_blamed_and_its_twin_is_not = twins(PAIRS)
