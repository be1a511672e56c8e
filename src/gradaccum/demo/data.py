"""Text of real, ragged lengths that every machine has: the functions of Python's own library."""

from __future__ import annotations

import ast
import gc
import os
import random
import re
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradaccum.errors import InputError

__all__ = ["BOS", "PAD", "UNK", "Corpus", "Tokenizer", "collate", "functions", "length", "load"]

PAD, BOS, UNK = 0, 1, 2
_SPECIAL = ("<pad>", "<bos>", "<unk>")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

# A run of letters in one case, with the blank before it; a digit; a line break with its indent; a
# mark with the blank before it; else one character.
_PIECE = re.compile(r" ?[A-Z]?[a-z]+| ?[A-Z]+|[0-9]|\n *| ?[^\w\s]|.", re.DOTALL)


def functions(root: Path | None = None) -> list[str]:
    """Source of every outermost function and method below `root`, in the order of the paths.

    Functions inside functions belong to the outer one. Tests, installed packages and files that
    this Python cannot parse are left out.

    Args:
        root: a folder of Python files; the standard library of the running Python by default.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    with _no_collection():
        return [source for path in _python_files(root) for source in _functions_of(path)]


@contextmanager
def _no_collection() -> Generator[None]:
    # Syntax trees are many small objects, and freed at once: looking for cycles among them doubles
    # the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _functions_of(path: Path) -> Iterator[str]:
    try:
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():
            # What an old file of the library deserves is no news to somebody running a demo.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    lines = source.split("\n")
    for node in _outermost(tree.body):
        indent = node.col_offset
        yield "\n".join(
            line[indent:] if line[:indent].isspace() else line
            for line in lines[node.lineno - 1 : node.end_lineno]
        )


def _outermost(body: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        else:
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                children = getattr(node, name, ())
                # The body of a lambda or of a conditional expression is one node, not a list.
                if isinstance(children, list):
                    yield from _outermost(children)


@dataclass(frozen=True)
class Tokenizer:
    """The commonest pieces of a text, one number each; other pieces are spelled by character.

    Args:
        words: every token's text by its number; the first three are `<pad>`, `<bos>`, `<unk>`.
    """

    words: tuple[str, ...]
    _ids: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first = len(_SPECIAL)
        numbers = {word: (first + i,) for i, word in enumerate(self.words[first:])}
        object.__setattr__(self, "_ids", numbers)

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> Tokenizer:
        """Keep all ASCII characters of `texts` and, up to `size` words, their commonest pieces."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(_PIECE.findall(text))
        characters = sorted({c for piece in counts for c in piece if c.isascii()})
        known = set(characters)
        ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
        pieces = [piece for piece in ranked if piece not in known]
        room = max(0, size - len(_SPECIAL) - len(characters))
        return cls((*_SPECIAL, *characters, *pieces[:room]))

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Numbers of the tokens of `text`, at most `limit` of them."""
        known = self._ids
        numbers: list[int] = []
        for piece in _PIECE.findall(text):
            spelled = known.get(piece)
            if spelled is None:
                spelled = tuple(known.get(c, (UNK,))[0] for c in piece)
                known[piece] = spelled
            numbers.extend(spelled)
            if limit is not None and len(numbers) >= limit:
                return numbers[:limit]
        return numbers

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of these tokens."""
        return "".join(self.words[number] for number in numbers)


@dataclass(frozen=True)
class Corpus:
    """Samples to train on: each is `<bos>` and then its tokens, int64, shape `(1 + length,)`."""

    samples: tuple[Tensor, ...]
    tokenizer: Tokenizer

    def batches(self, size: int, number: int, seed: int) -> list[list[Tensor]]:
        """`number` batches of `size` samples, uniformly at random, each sample once an epoch."""
        if size > len(self.samples):
            raise InputError(
                "demo-options",
                "the batch is larger than the data.",
                got=f"--batch {size}",
                expected=f"at most {len(self.samples)}, the functions of this standard library",
                do=f"gradaccum demo --batch {len(self.samples)}",
            )
        chance = random.Random(seed)
        batches: list[list[Tensor]] = []
        order: list[int] = []
        for _ in range(number):
            if len(order) < size:
                order = chance.sample(range(len(self.samples)), len(self.samples))
            batches.append([self.samples[i] for i in order[:size]])
            order = order[size:]
        return batches


def load(max_length: int, words: int = 2048) -> Corpus:
    """The functions of the standard library as samples, each cut at `max_length` tokens."""
    texts = functions()
    if not texts:
        raise InputError(
            "demo-no-library",
            "this Python's standard library has no source files to train on.",
            got=f"no function in {sysconfig.get_path('stdlib')}",
            expected="a Python installed with its .py files",
            do="run the demo with another Python",
        )
    tokenizer = Tokenizer.learn(texts, words)
    samples = tuple(torch.tensor([BOS, *tokenizer.encode(text, max_length)]) for text in texts)
    return Corpus(samples, tokenizer)


def length(sample: Tensor) -> int:
    """Tokens to predict in a sample: the positions it takes in the model."""
    return len(sample) - 1


def collate(samples: Sequence[Tensor]) -> Tensor:
    """One micro-batch, padded on the right to its longest; shape `(samples, 1 + width)`."""
    return pad_sequence(list(samples), batch_first=True, padding_value=PAD)
