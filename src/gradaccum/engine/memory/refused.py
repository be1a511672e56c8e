"""What cannot be run for a measurement, refused before anything runs, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradaccum.errors import InputError, shown
from gradaccum.planner.pytree import flatten
from gradaccum.planner.split import hollow_batch, listed

__all__ = ["batch_tensors", "no_terms", "refuse_hollow", "refuse_unrunnable", "unreached"]


def refuse_unrunnable(model: nn.Module, loss_fn: object, batch: Any) -> None:
    """Refuse a loss function that is none, and tensors in which there is nothing yet.

    Args:
        model: must have all its parameters, with data.
        loss_fn: what the user gave for it.
        batch: as the user gave it; what cannot be taken apart is not looked into.

    Raises:
        InputError: with what is missing.
    """
    if not callable(loss_fn):
        raise InputError(
            "loss-fn",
            "`loss_fn` is not a function.",
            got=shown(loss_fn),
            expected="a function of the model and a micro-batch",
            do="def loss_fn(model, batch): ...; return loss_sum, count",
        )
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise InputError(
            "model-lazy",
            "The model has parameters that get their shape in its first forward, and that has not "
            "run.",
            got=f"{listed(lazy)} without a shape",
            expected="a model of which all parameters are there",
            do="model(x) once, before the optimizer is built",
        )
    refuse_hollow(model, model.parameters())
    hollow = [path for path, tensor in batch_tensors(batch) if tensor.is_meta]
    if hollow:
        raise hollow_batch(hollow)


def refuse_hollow(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Refuse parameters that have a shape and no numbers.

    Args:
        model: knows their names.
        parameters: those that must be there.
    """
    hollow = {id(parameter) for parameter in parameters if parameter.is_meta}
    if hollow:
        raise InputError(
            "on-meta",
            "The model has parameters on the meta device: there are no numbers in them.",
            got=listed([name for name, p in model.named_parameters() if id(p) in hollow]),
            expected="parameters on a device that computes",
            do='model.to_empty(device="cpu") and load or initialise them; then the optimizer',
        )


def batch_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a batch by path, also of one that is a list of samples."""
    try:
        tree = flatten(batch)
    except InputError:
        return []
    found = []
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        inner = leaf if isinstance(leaf, list | tuple) else ()
        found += [(path, leaf)] if isinstance(leaf, Tensor) else []
        found += [pair for one in inner if not isinstance(one, str) for pair in _of(path, one)]
    return found


def no_terms(microbatches: int) -> InputError:
    """The refusal of a batch in which nothing is counted."""
    return InputError(
        "window-without-count",
        "The window holds no loss term, so its mean is undefined.",
        got=f"a total count of 0 over {microbatches} micro-batches",
        expected="at least one term that is not ignored",
        do="return how many terms are in the loss as the count; look for ignored labels",
    )


def unreached(parameters: Iterable[Tensor]) -> InputError:
    """The refusal of a loss that no parameter of the model has a gradient from."""
    number = len(list(parameters))
    return InputError(
        "loss-without-graph",
        "The loss depends on none of the model's parameters, so training would not change it.",
        got=f"{number} parameters, and a gradient for 0 of them",
        expected="a loss that is computed with the model that was passed",
        do="use the `model` that loss_fn is given; look for another model, and for frozen "
        "parameters",
    )


def _of(path: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    return batch_tensors(value) if isinstance(value, dict | list | tuple) else []
