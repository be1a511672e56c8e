"""GA5xx, GA7xx and GA8xx: graphs, what a batch is coupled by, precision."""

from __future__ import annotations

from gradaccum.faults.entry import Fault

__all__ = ["FAULTS"]

_CHECKPOINT = """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
batch = torch.ones(2, 1, requires_grad=True)
"""

FAULTS = (
    Fault(
        code="GA501",
        title="a running loss keeps the graph",
        severity="warning",
        what="`total += loss`, or a list of losses, holds tensors that still carry their graph.",
        why="Every batch's graph stays alive: the chain behind the total is {bad} nodes long after "
        "four batches instead of {good}; memory grows until it is full.",
        mend="Add `loss.item()` or `loss.detach()`.",
        bad="""\
total = 0.0
for x, y in data:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss
node, figure = total.grad_fn, 0
while node is not None:
    figure += 1
    node = node.next_functions[0][0] if len(node.next_functions) > 1 else None
""",
        good="""\
total = 0.0
for x, y in data:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss.item()
figure = 0
""",
        figures=(6.0, 0.0),
    ),
    Fault(
        code="GA502",
        title="`retain_graph` hides a mistake",
        severity="warning",
        what="`retain_graph=True` (or `create_graph=True`) although nothing uses the graph again, "
        "or because a running total is differentiated each time.",
        why="Differentiating a running total counts earlier losses again: the first loss weighs "
        "{bad} instead of {good}.",
        mend="Remove it; differentiate each loss once.",
        bad="""\
weight = torch.zeros(4, requires_grad=True)
total = 0.0
for i in range(4):
    total = total + weight[i]
    total.backward(retain_graph=True)
figure = weight.grad[0].item()
""",
        good="""\
weight = torch.zeros(4, requires_grad=True)
for i in range(4):
    weight[i].backward()
figure = weight.grad[0].item()
""",
        figures=(4.0, 1.0),
    ),
    Fault(
        code="GA503",
        title="the loss has no graph",
        severity="error",
        what="The loss was detached, made under `no_grad` or `inference_mode`, or made a leaf by "
        "`requires_grad_()`.",
        why="No parameter gets a gradient, and `requires_grad_()` silences the error that would "
        "say so: the weight stays at {bad} instead of {good}.",
        mend="Compute the loss from the model's output without detaching it.",
        bad="""\
for x, y in data[:1]:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).detach(), y)
    loss.requires_grad = True
    loss.backward()
    optimizer.step()
figure = model.weight.item()
""",
        good="""\
for x, y in data[:1]:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
figure = model.weight.item()
""",
        figures=(0.0, 2.0),
    ),
    Fault(
        code="GA701",
        title="BatchNorm in training mode",
        severity="note",
        what="BatchNorm normalises each micro-batch by its own statistics.",
        why="No accumulation equals the whole batch; the running statistics move {bad} times an "
        "update instead of {good}.",
        mend='Pick a policy: `batchnorm="pooled" | "frozen" | "microbatch"` of gradaccum.',
        bad="""\
norm = nn.BatchNorm1d(1)
for x in torch.randn(4, 8, 1):
    (norm(x).pow(2).mean() / every).backward()
figure = norm.num_batches_tracked.item()
""",
        good="""\
norm = nn.BatchNorm1d(1)
norm(torch.randn(32, 1)).pow(2).mean().backward()
figure = norm.num_batches_tracked.item()
""",
        figures=(4.0, 1.0),
        usual=False,
    ),
    Fault(
        code="GA702",
        title="the loss couples samples",
        severity="note",
        what="A contrastive loss compares each sample with all others of its batch.",
        why="Split into micro-batches of one there is nothing to compare with: the loss is {bad} "
        "where the whole batch gives {good}.",
        mend="Use gradient caching: `ga.cached(...)`.",
        bad="""\
encoder = nn.Linear(4, 4, bias=False)
nn.init.eye_(encoder.weight)
batch, figure = torch.eye(4), 0.0
for i in range(4):
    part = encoder(batch[i : i + 1])
    loss = nn.functional.cross_entropy(part @ part.T, torch.arange(1)) / 4
    loss.backward()
    figure += loss.item()
figure = round(figure, 3)
""",
        good="""\
encoder = nn.Linear(4, 4, bias=False)
nn.init.eye_(encoder.weight)
batch = torch.eye(4)
whole = encoder(batch)
loss = nn.functional.cross_entropy(whole @ whole.T, torch.arange(4))
loss.backward()
figure = round(loss.item(), 3)
""",
        figures=(0.0, 0.744),
    ),
    Fault(
        code="GA703",
        title="the model is left in eval mode",
        severity="warning",
        what="`model.eval()` runs inside the training loop and no `model.train()` follows.",
        why="From then on dropout is off and BatchNorm statistics are frozen: {bad} of four "
        "micro-batches train in training mode instead of {good}.",
        mend="Call `model.train()` after the evaluation.",
        bad="""\
def evaluate():
    model.eval()
    with torch.no_grad():
        return model(data[0][0]).mean()


figure = 0
model.train()
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    figure += int(model.training)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if i == 1:
        evaluate()
""",
        good="""\
def evaluate():
    model.eval()
    with torch.no_grad():
        value = model(data[0][0]).mean()
    model.train()
    return value


figure = 0
model.train()
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    figure += int(model.training)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if i == 1:
        evaluate()
""",
        figures=(2.0, 4.0),
    ),
    Fault(
        code="GA801",
        title="many micro-batches are summed in 16 bit",
        severity="note",
        what="Gradients of bfloat16 or float16 parameters are summed in that type.",
        why="bfloat16 keeps 8 bits: adding 1 to 256 changes nothing, so the sum over 512 "
        "micro-batches stops at {bad} instead of {good}.",
        mend="Accumulate in float32: `accumulate_dtype=torch.float32` of gradaccum.",
        bad="""\
weight = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
for _ in range(512):
    loss = weight.sum()
    loss.backward()
figure = weight.grad.item()
""",
        good="""\
weight = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
total = torch.zeros(1)
for _ in range(512):
    loss = weight.sum()
    loss.backward()
    total += weight.grad.float()
    weight.grad = None
figure = total.item()
""",
        figures=(256.0, 512.0),
    ),
    Fault(
        code="GA802",
        title="a running loss is summed in 16 bit",
        severity="note",
        what="The losses of many batches are added up, for the log, in one bfloat16 or float16 "
        "number.",
        why="bfloat16 keeps 8 bits: a sum of ones stops at 256, so the mean that is logged for 512 "
        "batches is {bad} instead of {good}. Training is unaffected.",
        mend="Add `loss.item()` to a Python number, or keep the total in float32.",
        bad="""\
weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
running = torch.zeros((), dtype=torch.bfloat16)
for _ in range(512):
    loss = weight.mean()
    loss.backward()
    weight.grad = None
    running += loss.detach()
figure = running.item() / 512
""",
        good="""\
weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
running = torch.zeros(())
for _ in range(512):
    loss = weight.mean()
    loss.backward()
    weight.grad = None
    running += loss.detach()
figure = running.item() / 512
""",
        figures=(0.5, 1.0),
        static=False,
    ),
    Fault(
        code="GA803",
        title="steps too small for 16-bit parameters",
        severity="warning",
        what="The optimizer steps on bfloat16 or float16 parameters, and each change is less than "
        "half of a parameter's last bit.",
        why="The change is rounded away: after four steps of 0.001 the weight is {bad} instead of "
        "{good}.",
        mend="Keep the parameters in float32 and compute under `torch.autocast`, or use an "
        "optimizer with float32 master weights or stochastic rounding.",
        bad="""\
weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
tuner = torch.optim.SGD([weight], lr=0.001)
for _ in range(4):
    tuner.zero_grad()
    (-weight).mean().backward()
    tuner.step()
figure = round(weight.item(), 4)
""",
        good="""\
weight = nn.Parameter(torch.ones(1))
tuner = torch.optim.SGD([weight], lr=0.001)
for _ in range(4):
    tuner.zero_grad()
    (-weight).mean().backward()
    tuner.step()
figure = round(weight.item(), 4)
""",
        figures=(1.0, 1.004),
        static=False,
    ),
    Fault(
        code="GA504",
        title="a checkpointed module counts twice",
        severity="warning",
        what="A module under activation checkpointing collects or counts on `self` in its forward, "
        "which the backward runs once more.",
        why="The gradients are right, the bookkeeping is not: {bad} entries after four "
        "micro-batches instead of {good}.",
        mend="Return the value from the forward, and collect it outside the checkpoint.",
        bad="""\
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(1, 1), []

    def forward(self, x):
        self.seen.append(1)
        return self.linear(x)


block = Block()
for _ in range(4):
    checkpoint(block, batch, use_reentrant=True).mean().backward()
figure = len(block.seen)
""",
        good="""\
block, seen = nn.Linear(1, 1), []
for _ in range(4):
    checkpoint(block, batch, use_reentrant=True).mean().backward()
    seen.append(1)
figure = len(seen)
""",
        figures=(8.0, 4.0),
        prelude=_CHECKPOINT,
    ),
    Fault(
        code="GA505",
        title="a checkpoint draws other dropout masks",
        severity="error",
        what="`checkpoint(..., preserve_rng_state=False)` around a module with dropout.",
        why="The backward recomputes the forward with other masks than the loss was computed with: "
        "{bad} of two gradients of one seed agree instead of {good}.",
        mend="Leave `preserve_rng_state` at its default.",
        bad="""\
block = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5), nn.Linear(64, 1))
torch.manual_seed(0)
plain = torch.autograd.grad(block(batch).mean(), block[2].weight)[0]
torch.manual_seed(0)
out = checkpoint(block, batch, use_reentrant=False, preserve_rng_state=False)
out.mean().backward()
figure = 2 if torch.equal(plain, block[2].weight.grad) else 0
""",
        good="""\
block = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5), nn.Linear(64, 1))
torch.manual_seed(0)
plain = torch.autograd.grad(block(batch).mean(), block[2].weight)[0]
torch.manual_seed(0)
out = checkpoint(block, batch, use_reentrant=False)
out.mean().backward()
figure = 2 if torch.equal(plain, block[2].weight.grad) else 0
""",
        figures=(0.0, 2.0),
        prelude=_CHECKPOINT,
    ),
)
