from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

import pytest
import torch

import gradaccum as ga
from gradaccum.demo.data import (
    BOS,
    PAD,
    UNK,
    Corpus,
    Tokenizer,
    collate,
    functions,
    length,
    load,
)
from gradaccum.errors import InputError

SOURCE = '''
import os

@decorated
def outer(x):
    """Text
at the margin."""
    def inner():
        return x
    return inner

class Thing:
    async def method(self):
        if os:
            return 1

if os:
    def conditional(): pass
else:
    try:
        pass
    except OSError:
        def handler(): pass

short = (lambda: 1) if os else None
'''


def test_only_outermost_functions_and_methods_are_samples(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    found = functions(tmp_path)
    assert [text.split("(")[0] for text in found] == [
        "def outer",
        "async def method",
        "def conditional",
        "def handler",
    ]
    assert found[0].endswith("    return inner")
    assert found[1] == "async def method(self):\n    if os:\n        return 1"


def test_files_that_cannot_be_read_and_tests_are_left_out(tmp_path: Path) -> None:
    for folder in ("test", "pkg/tests", "site-packages/x", "pkg"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "a.py").write_text(f"def {folder[-1]}(): pass")
    (tmp_path / "syntax.py").write_text("def broken(:")
    (tmp_path / "null.py").write_bytes(b"def null(): pass\0")
    (tmp_path / "cookie.py").write_bytes("# coding: latin-1\ndef é(): pass".encode("latin-1"))
    (tmp_path / "wrong.py").write_bytes("def é(): pass".encode("latin-1"))
    (tmp_path / "warns.py").write_text('def warns(): return "\\d" is "\\d"')
    assert functions(tmp_path) == [
        "def é(): pass",
        'def warns(): return "\\d" is "\\d"',
        "def g(): pass",
    ]


def test_the_standard_library_gives_the_same_functions_every_time(corpus: Corpus) -> None:
    again = load(1024)
    assert again.tokenizer == corpus.tokenizer
    assert len(again.samples) > 1000
    assert all(map(torch.equal, again.samples, corpus.samples))
    for sample in corpus.samples[::500]:
        text = corpus.tokenizer.decode(sample[1:].tolist())
        assert text.startswith(("def ", "async def "))
        if length(sample) < 1024 and "<unk>" not in text:
            ast.parse(text)


def test_lengths_are_ragged_as_published(corpus: Corpus) -> None:
    usual, ours = [], []
    for batch in corpus.batches(64, 40, seed=1):
        lengths = [length(sample) for sample in batch]
        usual.append(sum(8 * max(lengths[i : i + 8]) for i in range(0, 64, 8)) / sum(lengths))
        ours.append(ga.plan(lengths, budget=2048).waste)
    assert 2.7 < median(usual) < 3.7
    assert median(ours) <= 1.16


def test_samples_are_cut_and_begin_with_bos(corpus: Corpus) -> None:
    lengths = [length(sample) for sample in corpus.samples]
    assert min(lengths) >= 1
    assert max(lengths) == 1024
    assert {int(sample[0]) for sample in corpus.samples} == {BOS}
    assert all(int(sample[1:].min()) > BOS for sample in corpus.samples)


def test_each_sample_comes_once_an_epoch(corpus: Corpus) -> None:
    small = Corpus(corpus.samples[:10], corpus.tokenizer)
    first, second, third = small.batches(5, 3, seed=3)
    assert sorted(map(id, first + second)) == sorted(map(id, small.samples))
    assert len(third) == 5
    again = small.batches(5, 3, seed=3)
    assert [list(map(id, b)) for b in again] == [list(map(id, b)) for b in (first, second, third)]
    assert list(map(id, small.batches(5, 1, seed=4)[0])) != list(map(id, first))


def test_a_batch_larger_than_the_data_is_refused(corpus: Corpus) -> None:
    with pytest.raises(InputError, match="--batch 11"):
        Corpus(corpus.samples[:10], corpus.tokenizer).batches(11, 1, seed=0)


def test_text_comes_back_from_its_tokens() -> None:
    text = 'def f(self, aValue_2):\n    return HTTPServer["x"]\n\n\tpass  # done'
    for size in (0, 40, 1000):
        tokenizer = Tokenizer.learn([text], size)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_rare_words_are_spelled_and_strange_characters_unknown() -> None:
    tokenizer = Tokenizer.learn(["def\ndef\ndef\nrare"], size=3 + 6 + 1)
    assert tokenizer.words[-1] == "def"
    assert len(tokenizer.encode("def")) == 1
    assert len(tokenizer.encode("rare")) == 4
    assert tokenizer.encode("Ω") == [UNK]


def test_encoding_stops_at_the_limit() -> None:
    tokenizer = Tokenizer.learn(["abc abc rare"], size=11)
    assert tokenizer.encode("rare", 3) == tokenizer.encode("rare")[:3]
    assert tokenizer.encode("rare", 0) == []


def test_micro_batches_are_padded_on_the_right() -> None:
    tokens = collate([torch.tensor([BOS, 5]), torch.tensor([BOS, 6, 7, 8])])
    assert tokens.tolist() == [[BOS, 5, PAD, PAD], [BOS, 6, 7, 8]]
