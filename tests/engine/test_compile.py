"""`torch.compile`: a compiled model equals its whole batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradaccum as ga
from cases import CASES, Case, owned, whole
from models import mlp
from ways import WAYS


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(backend: str) -> Case:
    return Case(lambda: torch.compile(mlp(), backend=backend, dynamic=backend != "inductor"))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("way_name", ["largest first", "two terms, counts known ahead"])
def test_a_compiled_model_equals_its_whole_batch(
    way_name: str, differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    _assert_compiled_equals("aot_eager", way_name, differences, snap)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::gradaccum.errors.OpenWindowWarning")
def test_several_terms_of_unknown_counts_on_a_compiled_graph_work_or_say_what_to_do(
    differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    """They need one backward each, and a compiled graph may be gone after the first.

    Whether it is (donated buffers) depends on torch and on what its caches hold.
    """
    told = None
    try:
        _assert_compiled_equals("aot_eager", "two terms", differences, snap)
    except ga.GradaccumError as error:
        told = error
    assert told is None or (told.slug == "terms-compiled" and "`counts=`" in told.do)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_model_compiled_by_inductor_equals_its_whole_batch(
    differences: Callable[..., list[str]], snap: Callable[[Any], None]
) -> None:
    _assert_compiled_equals("inductor", "even tails", differences, snap)


def _assert_compiled_equals(
    backend: str,
    way_name: str,
    differences: Callable[..., list[str]],
    snap: Callable[[Any], None],
) -> None:
    reference, reference_optimizers, losses = whole(CASES["mlp"], snap)
    case = compiled(backend)
    run, options = WAYS[way_name]
    model = case.model()
    optimizers = case.optimizers(model)
    acc = ga.Accumulator(
        model, optimizers, on_update=lambda update: snap(owned(optimizers)), **options
    )
    updates = list(run(acc, model, case))
    assert differences((model._orig_mod, optimizers), (reference, reference_optimizers)) == []
    assert [float(update.loss) for update in updates] == losses
