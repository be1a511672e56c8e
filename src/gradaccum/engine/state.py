"""The open window as a file: plain types and tensors, read with `weights_only=True`."""

from __future__ import annotations

import random
from typing import Any

import torch

from gradaccum.engine.core import Core
from gradaccum.engine.grads import GradientSum
from gradaccum.engine.window import Usual, Window
from gradaccum.errors import StateError, shown

__all__ = ["VERSION", "load", "load_random", "save", "save_random"]

VERSION = 1
PARTS = {"version", "owner", "updates", "usual", "window", "gradients", "apart", "scaler"}
PARTS |= {"random", "stage"}


def save(core: Core, stage: str) -> dict[str, Any]:
    """Copy everything that a window half done consists of.

    Args:
        core: the open window and what surrounds it.
        stage: where the loop stands in its loader.
    """
    window = core.sound_window() if core.window is not None else None
    scaler = core.scaling.scaler
    return {
        "version": VERSION,
        "owner": _owner(core),
        "updates": core.updates,
        "usual": {name: list(usual) for name, usual in core.usual.items()},
        "window": None if window is None else window.as_dict(),
        "gradients": _copy(core.gradients.held()) if window and window.microbatches else None,
        "apart": {
            name: _copy(grads)
            for name, grads in (core.terms.apart | core.gradients.held_apart()).items()
        },
        "batchnorm": core.normalisation.as_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": save_random(),
        "stage": stage,
    }


def load(core: Core, state: dict[str, Any]) -> None:
    """Make the core what it was when `state` was saved; refuse a state that is not its own."""
    _refuse_foreign(core, state)
    scaler = core.scaling.scaler
    core.discard()
    core.updates = state["updates"]
    core.usual = {name: Usual(*usual) for name, usual in state["usual"].items()}
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    if state["window"] is not None:
        core.window = Window.from_dict(state["window"])
        if state["gradients"] is not None:
            apart = {n: _move(core, grads) for n, grads in state["apart"].items()}
            core.terms.apart = core.gradients.adopt(_move(core, state["gradients"]), apart)
            core.scaling.mark()
        core.normalisation.load(state.get("batchnorm", {}))  # states before 0.2 have none
    load_random(state["random"])


def save_random() -> dict[str, Any]:
    """The states of every random generator that a forward may draw from."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": devices, "python": random.getstate()}


def load_random(state: dict[str, Any]) -> None:
    """The inverse of `save_random`."""
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])


def _owner(core: Core) -> dict[str, Any]:
    parameters = zip(core.gradients.names(), core.gradients.parameters, strict=True)
    return {
        "optimizers": [type(optimizer).__name__ for optimizer in core.optimizers],
        "parameters": [
            [name, list(p.shape), str(p.dtype).removeprefix("torch.")] for name, p in parameters
        ],
        "scaler": core.scaling.scaler is not None,
        "accumulate_dtype": core.gradients.accumulate_dtype,
        "batchnorm": core.normalisation.choice,
    }


def _refuse_foreign(core: Core, state: dict[str, Any]) -> None:
    if not isinstance(state, dict) or "version" not in state or "owner" not in state:
        raise StateError(
            "state",
            "That is no state of an accumulator.",
            got=shown(state),
            expected="what acc.state_dict() returned",
            do='acc.load_state_dict(torch.load(path, weights_only=True)["accumulator"])',
        )
    if state["version"] != VERSION:
        raise _mismatch("version of the state", state["version"], VERSION)
    missing = sorted(PARTS - state.keys())
    if missing:
        raise StateError(
            "state",
            "The saved state is not whole.",
            got=f"no {', '.join(f'`{part}`' for part in missing)}",
            expected="all that acc.state_dict() returned",
            do="load the file as it was saved",
        )
    saved, own = state["owner"], _owner(core)
    for kind in ("optimizers", "scaler", "accumulate_dtype"):
        if saved.get(kind) != own[kind]:
            raise _mismatch(kind, saved.get(kind), own[kind])
    if state["window"] is not None and saved.get("batchnorm") != own["batchnorm"]:
        raise _mismatch("`batchnorm`", saved.get("batchnorm"), own["batchnorm"])
    for i, (theirs, ours) in enumerate(zip(saved["parameters"], own["parameters"], strict=False)):
        if list(theirs) != list(ours):
            raise _mismatch(f"parameter {i} (name, shape, dtype)", theirs, ours)
    if len(saved["parameters"]) != len(own["parameters"]):
        counts = len(saved["parameters"]), len(own["parameters"])
        raise _mismatch("number of parameters", *counts)


def _mismatch(what: str, saved: object, own: object) -> StateError:
    return StateError(
        "state",
        f"The saved state belongs to another accumulator: the {what} differs.",
        got=f"{saved}",
        expected=f"{own}",
        do="build the same model, optimizer and scaler as when it was saved, then load",
    )


def _copy(grads: GradientSum) -> GradientSum:
    return [None if grad is None else grad.detach().clone() for grad in grads]


def _move(core: Core, grads: GradientSum) -> GradientSum:
    own = core.gradients.parameters
    return [
        None if grad is None else grad.to(device=p.device, copy=True)
        for p, grad in zip(own, grads, strict=True)
    ]
