"""Modules: train and eval, cleared, called; and what ranks synchronise."""

from __future__ import annotations

from types import FrameType
from typing import Any

from gradaccum.doctor.hooks.guard import guarded, guarded_after
from gradaccum.doctor.touch import Patches
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["install"]


class _Watch:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.train = vars(recorder.torch.nn.Module)["train"]
        self.running = False

    def before_train(self, module: Any, frame: FrameType) -> Any:
        """`train` or, through it, `eval` begins on an outermost module."""
        self.recorder.turned = True
        if frame.f_code is self.train.__code__:
            return None
        return module, self.recorder.find(frame), self.recorder.now()

    def after_train(self, note: Any) -> None:
        """It is over."""
        module, place, begun = note
        train = bool(module.training)
        recorder = self.recorder
        recorder.turned = True
        recorder.event(
            "mode", place, begun, train, module=type(module).__name__, train=train,
            index=recorder.module(module),
        )  # fmt: skip

    def before_zero(self, module: Any, frame: FrameType) -> Any:
        """`module.zero_grad` begins."""
        place = self.recorder.find(frame)
        self.recorder.settle(place)
        self.recorder.inside += 1
        return module, place, self.recorder.now()

    def after_zero(self, note: Any) -> None:
        """It is over."""
        module, place, begun = note
        self.recorder.inside -= 1
        tensors = (self.recorder.leaves.get(p) for p in module.parameters())
        owned = [leaf for leaf in tensors if leaf is not None]
        self.recorder.clear("module.zero_grad", place, begun, owned)

    def before_parallel(self, module: Any, frame: FrameType) -> Any:
        """DDP's forward: it decides here whether the backward will synchronise."""
        recorder = self.recorder
        recorder.parallel.add(module)
        recorder.ranks = True
        recorder.event(
            "ddp_forward", recorder.find(frame), recorder.now(),
            sync=bool(module.require_backward_grad_sync), training=bool(module.training),
            nograd=not recorder.torch.is_grad_enabled(),
        )  # fmt: skip
        return None

    def before_no_sync(self, module: Any, frame: FrameType) -> Any:
        """`no_sync()`."""
        recorder = self.recorder
        recorder.event(
            "no_sync", recorder.find(frame), recorder.now(), module=type(module).__name__
        )
        return None

    def before_average(self, _: Any, frame: FrameType) -> Any:
        """An `AveragedModel` is about to write its parameters, by functions that do not tell."""
        self.recorder.mark("param", frame, "update_parameters")
        return None

    def make_parallel(self, module: Any, frame: FrameType) -> Any:
        """A DDP module is being made."""
        return module, self.recorder.find(frame), self.recorder.now()

    def made_parallel(self, note: Any) -> None:
        """It is made: whose gradients it will exchange."""
        module, place, begun = note
        recorder = self.recorder
        leaves = [recorder.leaves.track(p) for p in module.parameters() if p.requires_grad]
        indexes = recorder.indexes([leaf for leaf in leaves if leaf is not None])
        recorder.event("parallel", place, begun, params=indexes)

    def before_call(self, module: Any, frame: FrameType) -> Any:
        """A module is called: outermost calls are noted."""
        if self.running or self.recorder.torch._C._current_graph_task_id() != -1:
            return None  # inside another, or recomputed by a checkpoint
        self.running = True
        recorder = self.recorder
        return (
            type(module).__name__, bool(module.training), not recorder.torch.is_grad_enabled(),
            recorder.torch.is_inference_mode_enabled(), recorder.find(frame), recorder.now(),
        )  # fmt: skip

    def after_call(self, note: Any) -> None:
        """It is over."""
        self.running = False
        kind, training, nograd, inference, place, begun = note
        more = {"inference": True} if inference else {}
        self.recorder.event(
            "forward", place, begun, module=kind, training=training, nograd=nograd, **more
        )


def install(recorder: Recorder, patches: Patches) -> None:
    """Listen to modules."""
    torch = recorder.torch
    watch = _Watch(recorder)
    module = vars(torch.nn.Module)
    for name, before, after in (
        ("train", watch.before_train, watch.after_train),
        ("zero_grad", watch.before_zero, watch.after_zero),
    ):
        patches.graft(module[name], guarded(recorder, before), guarded_after(recorder, after))
    parallel = vars(torch.nn.parallel.DistributedDataParallel)
    making, made = (
        guarded(recorder, watch.make_parallel),
        guarded_after(recorder, watch.made_parallel),
    )
    patches.graft(parallel["__init__"], making, made)
    patches.graft(parallel["forward"], guarded(recorder, watch.before_parallel))
    patches.graft(parallel["no_sync"], guarded(recorder, watch.before_no_sync))
    averaged = vars(torch.optim.swa_utils.AveragedModel)
    patches.graft(averaged["update_parameters"], guarded(recorder, watch.before_average))
    swap = patches.graft(
        module["__call__"],
        guarded(recorder, watch.before_call),
        guarded_after(recorder, watch.after_call),
    )
    if swap is not None:
        # In windows that are looked at closely; in all others modules are called at no cost.
        recorder.look_closely(swap.turn)
