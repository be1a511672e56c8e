"""Optimizers: made, stepped, zeroed; and schedulers."""

from __future__ import annotations

import math
import sys
import time
import weakref
from types import FrameType
from typing import Any

from gradaccum.doctor.hooks.deep import Deep, distance
from gradaccum.doctor.hooks.guard import guarded, guarded_after, uncompiled
from gradaccum.doctor.touch import Patches
from gradaccum.doctor.trace.recorder import Recorder
from gradaccum.doctor.trace.tracked import Optimizer, groups

__all__ = ["install"]

_clock = time.perf_counter


class _Watch:
    def __init__(self, recorder: Recorder, deep: Deep) -> None:
        self.recorder = recorder
        self.deep = deep
        self._notes: list[dict[str, Any]] = []
        self._schedulers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next_scheduler = 0

    # -- made ------------------------------------------------------------------------------------

    def make(self, optimizer: Any, frame: FrameType) -> Any:
        """Its constructor begins; where the user called it."""
        return optimizer, self.recorder.find(frame), self.recorder.now()

    def made(self, note: Any) -> None:
        """Its constructor is over."""
        optimizer, place, begun = note
        if not getattr(optimizer, "param_groups", None):
            return
        record = self.recorder.optimizer(optimizer)
        record.at, record.user = place
        self.recorder.own(record, optimizer)
        record.lr = _lr(optimizer)
        self.recorder.event(
            "optimizer", place, begun, optimizer=record.index, kind=record.kind,
            params=self.recorder.indexes(record.leaves),
            groups=[len(group["params"]) for group in optimizer.param_groups],
        )  # fmt: skip

    # -- stepped ---------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, frame: FrameType) -> Any:
        """What the step will use."""
        recorder = self.recorder
        recorder.step_code = frame.f_code
        if recorder.stepping:
            recorder.check_stepping(frame.f_back)
        place = recorder.find(frame)
        recorder.settle(place)
        record = recorder.optimizer(optimizer, frame)
        recorder.own(record, optimizer)
        note: dict[str, Any] = {"record": record, "place": place, "begun": recorder.now()}
        note["used"] = groups(record.leaves)
        note["idle"] = [leaf.index for leaf in record.leaves if not leaf.grad]
        if recorder.segments.deep and self.deep.possible():
            spent = _clock()
            with self.deep.quiet():
                norm = note["norm"] = self.deep.norm(record.leaves)
                note["nonfinite"] = norm is not None and not math.isfinite(norm)
                note["graph"] = self.deep.recorded(record.leaves)
                note["values"] = self.deep.sample(record.leaves, gradient=False)
            recorder.segments.spent += _clock() - spent
        note["backwards"] = recorder.backwards
        if not recorder.leaves.several:
            del self._notes[len(recorder.stepping) :]
        self._notes.append(note)
        recorder.stepping.append(record)
        recorder.inside += 1
        return None

    def after_step(self, optimizer: Any, _: FrameType) -> None:
        """What it changed."""
        recorder = self.recorder
        mine = [note for note in self._notes if note["record"].reference() is optimizer]
        if not mine or mine[-1]["record"] not in recorder.stepping:
            return
        note = mine[-1]
        record: Optimizer = note["record"]
        self._notes = [other for other in self._notes if other is not note]
        recorder.stepping.remove(record)
        recorder.inside -= 1
        closure = recorder.backwards > note["backwards"]
        seen = recorder.leaves.look()
        recorder.marks = []
        for leaf in seen.values:
            leaf.changes += 1
        change = None
        if note.get("values") is not None and self.deep.possible():
            spent = _clock()
            with self.deep.quiet():
                after = self.deep.sample(record.leaves, gradient=False)
            change = distance(note["values"], after)
            recorder.segments.spent += _clock() - spent
        record.steps += 1
        if record.steps == 1:
            recorder.ask_rank()
        record.lr = _lr(optimizer)
        recorder.event(
            "step", note["place"], note["begun"], record.index, optimizer=record.index,
            used=groups(record.leaves) if closure else note["used"], idle=note["idle"],
            changed=recorder.indexes(seen.values), lr=record.lr, closure=closure,
            norm=note.get("norm"), change=change, scaler=recorder.scaling,
            nonfinite=note.get("nonfinite"), graph=note.get("graph"),
        )  # fmt: skip
        if seen.cleared:
            recorder.cleared_inside(seen.cleared, note["place"])
        recorder.segments.close()

    # -- zeroed, scheduled -----------------------------------------------------------------------

    def before_zero(self, optimizer: Any, frame: FrameType) -> Any:
        """`zero_grad` begins."""
        recorder = self.recorder
        if recorder.stepping:
            recorder.check_stepping(frame)
        place = recorder.find(frame)
        if recorder.marks or recorder.segments.events:
            recorder.settle(place)
        # else nothing was noticed since the step, and the look that follows sees what there was
        recorder.inside += 1
        return optimizer, place, recorder.now()

    def after_zero(self, note: Any) -> None:
        """`zero_grad` is over."""
        optimizer, place, begun = note
        recorder = self.recorder
        recorder.inside -= 1
        record = recorder.optimizer(optimizer)
        recorder.own(record, optimizer, closely=False)
        recorder.clear("optimizer.zero_grad", place, begun, record.leaves, optimizer=record.index)

    def before_save(self, optimizer: Any, frame: FrameType) -> Any:
        """`state_dict()`."""
        self._told("save", optimizer, frame)
        return None

    def before_load(self, optimizer: Any, frame: FrameType) -> Any:
        """`load_state_dict()`."""
        self._told("load", optimizer, frame)
        return None

    def _told(self, kind: str, optimizer: Any, frame: FrameType) -> None:
        recorder = self.recorder
        index = recorder.optimizer(optimizer, frame).index
        recorder.event(kind, recorder.find(frame), recorder.now(), optimizer=index)

    def make_scheduler(self, scheduler: Any, frame: FrameType) -> Any:
        """A scheduler's constructor begins; not those that schedulers call themselves."""
        if frame.f_globals.get("__name__") != "torch.optim.lr_scheduler":
            return scheduler, self.recorder.find(frame), self.recorder.now()
        if frame.f_locals.get("self") is scheduler and frame.f_code.co_name == "__init__":
            return scheduler, self.recorder.find(frame), self.recorder.now()
        return None

    def made_scheduler(self, note: Any) -> None:
        """A scheduler's constructor is over."""
        scheduler, place, begun = note
        index, lr = self._optimizer_of(scheduler)
        total = _length(scheduler)
        rates = getattr(scheduler, "base_lrs", None) or [None]
        self.recorder.event(
            "scheduler", place, begun, scheduler=self._scheduler(scheduler), optimizer=index, lr=lr,
            kind=type(scheduler).__name__, total=total,
            base=float(rates[0]) if isinstance(rates[0], float | int) else None,
        )  # fmt: skip

    def _scheduler(self, scheduler: Any) -> int:
        number = self._schedulers.get(scheduler)
        if number is None:
            number = self._schedulers[scheduler] = self._next_scheduler
            self._next_scheduler += 1
        return number

    def _optimizer_of(self, scheduler: Any) -> tuple[int | None, float | None]:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            inner = getattr(scheduler, "_schedulers", None) or [None]
            optimizer = getattr(inner[0], "optimizer", None)
        if optimizer is None or not hasattr(optimizer, "param_groups"):
            return None, None
        return self.recorder.optimizer(optimizer).index, _lr(optimizer)

    def before_schedule(self, scheduler: Any, frame: FrameType) -> Any:
        """A scheduler's step begins; not those that schedulers call themselves."""
        if frame.f_globals.get("__name__") == "torch.optim.lr_scheduler":
            return None
        lr = self._optimizer_of(scheduler)[1]
        return scheduler, lr, _position(scheduler), self.recorder.find(frame), self.recorder.now()

    def after_schedule(self, note: Any) -> None:
        """A scheduler's step is over."""
        scheduler, before, position, place, begun = note
        index, lr = self._optimizer_of(scheduler)
        self.recorder.event(
            "schedule", place, begun, kind=type(scheduler).__name__, optimizer=index, lr=lr,
            lr_before=before, scheduler=self._scheduler(scheduler),
            failed=position is not None and position == _position(scheduler),
        )  # fmt: skip


def _length(scheduler: Any) -> int | None:
    """The number of steps that a scheduler was planned for, where it says so."""
    found = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")]
    rates = getattr(scheduler, "lr_lambdas", None) or ()  # those of transformers are partials
    found += [(getattr(one, "keywords", None) or {}).get("num_training_steps") for one in rates]
    return next((one for one in found if type(one) is int and one > 0), None)


def _position(scheduler: Any) -> Any:
    """What every step moves on, so that one that raised is known."""
    return getattr(scheduler, "last_epoch", None)


def _lr(optimizer: Any) -> float | None:
    lr = optimizer.param_groups[0].get("lr")
    if isinstance(lr, float | int):
        return float(lr)
    return float(lr.item()) if hasattr(lr, "item") and lr.device.type == "cpu" else None


def install(recorder: Recorder, deep: Deep, patches: Patches) -> list[Any]:
    """Listen to optimizers and schedulers; returns handles to remove."""
    torch = recorder.torch
    watch = _Watch(recorder, deep)
    kind = torch.optim.Optimizer
    for name, before, after in (
        ("__init__", watch.make, watch.made),
        ("zero_grad", watch.before_zero, watch.after_zero),
        ("state_dict", watch.before_save, None),
        ("load_state_dict", watch.before_load, None),
    ):
        over = None if after is None else guarded_after(recorder, after)
        patches.graft(vars(kind)[name], guarded(recorder, before), over)
    schedulers = torch.optim.lr_scheduler
    making = guarded(recorder, watch.make_scheduler)
    made = guarded_after(recorder, watch.made_scheduler)
    patches.graft(vars(schedulers.LRScheduler)["__init__"], making, made)
    before = guarded(recorder, watch.before_schedule)
    after = guarded_after(recorder, watch.after_schedule)
    for scheduler in list(vars(schedulers).values()):
        if (
            isinstance(scheduler, type)
            and issubclass(scheduler, schedulers.LRScheduler)
            and ("step" in vars(scheduler))
        ):
            patches.graft(vars(scheduler)["step"], before, after)
    before_step = guarded(recorder, watch.before_step)
    after_step = guarded(recorder, watch.after_step)

    def pre(optimizer: Any, _: Any, __: Any) -> None:
        before_step(optimizer, sys._getframe(1))

    def post(optimizer: Any, _: Any, __: Any) -> None:
        after_step(optimizer, sys._getframe(1))

    uncompiled(torch, pre, post)
    module = sys.modules["torch.optim.optimizer"]  # torch.optim forgets its name
    return [
        module.register_optimizer_step_pre_hook(pre),
        module.register_optimizer_step_post_hook(post),
    ]
