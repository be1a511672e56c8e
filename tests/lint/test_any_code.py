"""No program makes the linter fail: made-up ones, deep ones, long ones, every syntax."""

import ast
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradaccum.lint.engine import lint_source
from gradaccum.lint.files.program import Program
from gradaccum.lint.files.sources import Source
from gradaccum.lint.judge import judge
from gradaccum.lint.settings import load

from .good_loops import HEAD, LOOPS

NAMES = st.sampled_from(["a", "loss", "model", "opt", "scaler", "i", "k", "x", "self", "sched"])
CALLS = st.sampled_from(
    ["backward", "step", "zero_grad", "unscale_", "update", "scale", "append", "item", "detach",
     "train", "eval", "parameters", "no_sync", "accumulate", "prepare", "clip_grad_norm_", "to"]
)  # fmt: skip
MADE = st.sampled_from(
    ["torch.optim.Adam(model.parameters())", "torch.optim.SGD([a], lr=1)", "nn.Linear(1, 1)",
     "torch.amp.GradScaler()", "Accelerator(gradient_accumulation_steps=k)", "range(k)", "None",
     "torch.zeros(1, requires_grad=True)", "enumerate(x)", "len(x)", "[]", "{}", "3", "0",
     "nn.parallel.DistributedDataParallel(model)", "filter(None, model.parameters())", "sum(x)"]
)  # fmt: skip


def expressions(depth: int) -> st.SearchStrategy[str]:
    if depth == 0:
        return st.one_of(NAMES, MADE, st.integers(-2, 9).map(str))
    inner = expressions(depth - 1)
    return st.one_of(
        inner,
        st.builds("{}.{}({})".format, NAMES, CALLS, st.one_of(st.just(""), inner)),
        st.builds("({} {} {})".format, inner, st.sampled_from([*"+-*/%", "//", "**", "@"]), inner),
        st.builds(
            "({} {} {})".format, inner, st.sampled_from(["==", "<", ">=", "is", "in"]), inner
        ),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("[{} for {} in {}]".format, inner, NAMES, inner),
        st.builds("{}[{}]".format, NAMES, inner),
        st.builds("{}({})".format, NAMES, inner),
        st.builds("(lambda {}: {})".format, NAMES, inner),
    )


def blocks(depth: int) -> st.SearchStrategy[str]:
    value = expressions(2)
    simple = st.one_of(
        value,
        st.builds("{} = {}".format, NAMES, value),
        st.builds("{} {}= {}".format, NAMES, st.sampled_from(list("+-*/%")), value),
        st.builds("{}.{} = {}".format, NAMES, st.sampled_from(["grad", "data", "opt", "x"]), value),
        st.builds("{}, {} = {}".format, NAMES, NAMES, value),
        st.sampled_from(["pass", "loss.backward()", "opt.step()", "opt.zero_grad()", "i += 1"]),
    )
    if depth == 0:
        return st.lists(simple, min_size=1, max_size=4).map("\n".join)
    body = blocks(depth - 1).map(lambda text: "\n".join("    " + line for line in text.split("\n")))
    nested = st.one_of(
        st.builds("for {} in {}:\n{}".format, NAMES, value, body),
        st.builds("while {}:\n{}".format, value, body),
        st.builds("if {}:\n{}\nelse:\n{}".format, value, body, body),
        st.builds("with {} as {}:\n{}".format, value, NAMES, body),
        st.builds("try:\n{}\nfinally:\n{}".format, body, body),
        st.builds("def {}({}, {}_):\n{}".format, NAMES, NAMES, NAMES, body),
        st.builds("class {}:\n{}".format, NAMES, body),
        st.builds("match {}:\n    case 0:\n        pass\n    case _:\n        pass".format, value),
    )
    return st.lists(st.one_of(simple, nested), min_size=1, max_size=4).map("\n".join)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(blocks(3))
def test_made_up_programs(text):
    try:
        ast.parse(text)
    except SyntaxError:
        return
    program = Program({"made.py": "import torch\nfrom torch import nn\n" + text})
    module = program.load("made.py")
    assert module is not None
    judge(program, module)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(LOOPS)), st.data())
def test_right_loops_with_a_line_gone(name, data):
    lines = (HEAD + LOOPS[name]).splitlines()
    gone = data.draw(st.integers(0, len(lines) - 1))
    text = "\n".join(lines[:gone] + lines[gone + 1 :])
    program = Program({"made.py": text})
    module = program.load("made.py")
    if module is not None:
        judge(program, module)


def findings(text: str):
    return lint_source(Source("made.py", text.encode()), Program(), load([], []))


def test_deep_nesting():
    deep = "x = loss.backward()\n" + "y = " + "(" * 150 + "x" + ")" * 150 + "\n"
    deep += "z = " + "+".join(["loss"] * 3000) + "\nloss.backward()\nopt.step()\n"
    chain = "if a == 0:\n    opt.step()\n" + "".join(
        f"elif a == {i}:\n    loss.backward()\n" for i in range(400)
    )
    for text in (deep, chain, "f" + "(f" * 80 + ")" * 80 + ".backward()\n"):
        assert all(item.code != "GA000" for item in findings(text))


def test_a_file_of_fifty_thousand_lines():
    start = time.process_time()
    other = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(12_500))
    body = "".join(f"    v{i} = model(x)\n    loss = v{i} / 2\n" for i in range(12_500))
    loop = "for x in data:\n    loss = model(x)\n    loss.backward()\n    opt.step()\n"
    assert [item.code for item in findings(other + loop)] == ["GA101"]
    long = f"for x in data:\n{body}    loss.backward()\n    opt.step()\n"
    assert {item.code for item in findings(other + long)} <= {"GA101"}
    assert time.process_time() - start < 60


def test_names_of_values_do_not_grow_without_bound():
    lines = "\n".join(f"            mean = mean * {i} + mean / (mean + i)" for i in range(9))
    loop = f"""
mean = dataset.mean
model = nn.Linear(8, 2)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        for j in range(9):
{lines}
        loss = criterion(model(x), y) * mean
        loss.backward()
        opt.step()
        opt.zero_grad()
"""
    assert not findings(HEAD + loop)


SYNTAX = {
    (3, 8): "def f(a, /, b):\n    if (n := len(a)) > 1:\n        b.step()\n    return f'{n=}'\n",
    (3, 9): "with (open('a') as a, open('b') as b):\n    a.step()\n",
    (3, 10): "match p:\n    case {'a': [1, *r], **k} | None if k:\n        p.step()\n",
    (3, 11): "try:\n    p.step()\nexcept* ValueError:\n    p.backward()\n",
    (3, 12): "type A[T] = list[T]\ndef f[T](p: T) -> T:\n    p.step()\n    return f'{'a'}'\n",
    (3, 13): "class A[T = int]:\n    def f(self):\n        self.step()\n",
    (
        3,
        14,
    ): "def f(p):\n    try:\n        p.step()\n    except ValueError, TypeError:\n        pass\n",
}


@pytest.mark.parametrize("version", SYNTAX, ids=str)
def test_every_syntax_of_the_python_that_runs(version):
    wanted = [] if sys.version_info >= version else ["GA001"]
    assert [item.code for item in findings(SYNTAX[version])] == wanted


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"\xef\xbb\xbf", b"# -*- coding: nothing -*-\nx.step()\n"]
)
def test_odd_files(data):
    codes = {item.code for item in lint_source(Source("odd.py", data), Program(), load([], []))}
    assert codes <= {"GA001"}
