"""What wrong loops and their right twins are made of."""

from collections.abc import Callable

import pytest

from gradaccum.lint.files.program import Program
from gradaccum.lint.judge import judge

HEAD = """
import argparse, itertools, math
from contextlib import nullcontext
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from accelerate import Accelerator
from tqdm import tqdm
from data import loader, files, lengths
parser = argparse.ArgumentParser()
args = parser.parse_args()
"""

MODEL = """
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
"""

Pairs = dict[str, tuple[str, str, tuple[str, str]]]
"""Name to code, text with `@` where the two differ, and the wrong and the right text there."""


def pair(pairs: Pairs, name: str, code: str, text: str, bad: str, good: str) -> None:
    pairs[name] = code, text, (bad, good)


def codes(text: str) -> set[str]:
    program = Program({"train.py": HEAD + text})
    module = program.load("train.py")
    assert module is not None, text
    return {one.code for one in judge(program, module)}


def twins(pairs: Pairs) -> Callable[[str], None]:
    """The test that each wrong text of `pairs` is blamed for its code and its right twin is not."""

    @pytest.mark.parametrize("name", list(pairs))
    def check(name: str) -> None:
        code, text, (bad, good) = pairs[name]
        assert code in codes(text.replace("@", bad))
        assert code not in codes(text.replace("@", good))

    return check
