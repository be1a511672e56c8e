"""Modules: train and eval, cleared, called; and what ranks synchronise."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from gradaccum.doctor.hooks.guard import guarded, guarded_after, uncompiled
from gradaccum.doctor.touch import MethodTouch, Patches, Then
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["install"]


class _Watch:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.train_code = vars(recorder.torch.nn.Module)["train"].__code__
        self.running: dict[int, int] = {}

    def before_train(self, module: Any, frame: FrameType) -> Any:
        """`train` or, through it, `eval` begins on an outermost module."""
        self.recorder.turned = True
        if frame.f_code is self.train_code:
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


def install(recorder: Recorder, patches: Patches) -> None:
    """Listen to modules."""
    torch = recorder.torch
    uncompiled(torch, _Called.__get__)
    watch = _Watch(recorder)
    module = torch.nn.Module
    for name, before, after in (
        ("train", watch.before_train, watch.after_train),
        ("zero_grad", watch.before_zero, watch.after_zero),
    ):
        touch = MethodTouch(
            vars(module)[name], guarded(recorder, before), guarded_after(recorder, after)
        )
        patches.put(module, name, touch)
    parallel = torch.nn.parallel.DistributedDataParallel
    no_sync = guarded(recorder, watch.before_no_sync)
    forward = guarded(recorder, watch.before_parallel)
    patches.put(parallel, "forward", MethodTouch(vars(parallel)["forward"], forward, None))
    patches.put(parallel, "no_sync", MethodTouch(vars(parallel)["no_sync"], no_sync, None))
    patches.put(module, "__call__", _Called(recorder))


class _Called:
    """Stands as `Module.__call__`: outermost calls are noted in windows looked at closely."""

    def __init__(self, recorder: Recorder) -> None:
        self._original = vars(recorder.torch.nn.Module)["__call__"]
        self._recorder = recorder
        self._bind = self._original.__get__
        self._running = False
        self._before = guarded(recorder, self._begin)
        self._after = guarded_after(recorder, self._end)

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:
            return self._original
        call = self._bind(module, kind)
        if self._running or not self._recorder.segments.deep or self._recorder.closed:
            return call
        note = self._before(module, sys._getframe(1))
        if note is None:
            return call
        then = Then(call)
        then.after, then.note = self._after, note
        return then

    def _begin(self, module: Any, frame: FrameType) -> Any:
        if self._recorder.torch._C._current_graph_task_id() != -1:
            return None  # recomputed by a checkpoint
        self._running = True
        recorder = self._recorder
        return (
            type(module).__name__, bool(module.training), not recorder.torch.is_grad_enabled(),
            recorder.torch.is_inference_mode_enabled(), recorder.find(frame), recorder.now(),
        )  # fmt: skip

    def _end(self, note: Any) -> None:
        self._running = False
        kind, training, nograd, inference, place, begun = note
        more = {"inference": True} if inference else {}
        self._recorder.event(
            "forward", place, begun, module=kind, training=training, nograd=nograd, **more
        )
