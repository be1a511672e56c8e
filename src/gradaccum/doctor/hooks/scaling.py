"""Scalers and clips."""

from __future__ import annotations

from types import FrameType
from typing import Any

from gradaccum.doctor.hooks.deep import Deep
from gradaccum.doctor.hooks.guard import guarded, guarded_after
from gradaccum.doctor.touch import Patches
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["install"]


class _Scaler:
    def __init__(self, recorder: Recorder, deep: Deep) -> None:
        self.recorder = recorder
        self.deep = deep

    def before_scale(self, _: Any, frame: FrameType) -> Any:
        """`scaler.scale(loss)`."""
        self.recorder.event("scale", self.recorder.find(frame), self.recorder.now())
        return None

    def before_unscale(self, scaler: Any, frame: FrameType) -> Any:
        """`scaler.unscale_(optimizer)`, also the one that `scaler.step` calls."""
        recorder = self.recorder
        place = recorder.find(frame)
        recorder.settle(place)
        recorder.inside += 1
        return scaler, _stages(scaler), place, recorder.now()

    def after_unscale(self, note: Any) -> None:
        """Gradients are unscaled, or it has refused."""
        scaler, stages, place, begun = note
        recorder = self.recorder
        recorder.inside -= 1
        touched = recorder.indexes(recorder.leaves.look().grads)
        index = self._newly(scaler, stages, 1)
        recorder.event(
            "unscale", place, begun, optimizer=index, touched=touched,
            enabled=bool(getattr(scaler, "_enabled", True)),
            failed=index is None and bool(getattr(scaler, "_enabled", True)),
        )  # fmt: skip

    def before_step(self, scaler: Any, frame: FrameType) -> Any:
        """`scaler.step(optimizer)`."""
        recorder = self.recorder
        place = recorder.find(frame)
        recorder.settle(place)
        recorder.scaling = True
        return scaler, _stages(scaler), place, recorder.now(), recorder.totals["step"]

    def after_step(self, note: Any) -> None:
        """The optimizer has stepped, or was not let."""
        scaler, stages, place, begun, steps = note
        recorder = self.recorder
        recorder.scaling = False
        stepped = recorder.totals["step"] > steps
        index = self._newly(scaler, stages, 2)
        if stepped:
            return
        recorder.event(
            "scaler_step", place, begun, optimizer=index, stepped=False, failed=index is None
        )
        recorder.segments.close()

    def before_update(self, scaler: Any, frame: FrameType) -> Any:
        """`scaler.update()`."""
        place, begun = self.recorder.find(frame), self.recorder.now()
        states = getattr(scaler, "_per_optimizer_states", {}).values()
        looked = any(state.get("found_inf_per_device") for state in list(states))
        refused = bool(getattr(scaler, "_enabled", True)) and not looked
        return scaler, self._scale(scaler), place, begun, refused

    def after_update(self, note: Any) -> None:
        """The scale has been adapted."""
        scaler, before, place, begun, refused = note
        after = self._scale(scaler)
        self.recorder.event(
            "scaler_update", place, begun, scale_before=before, scale=after,
            failed=refused and after == before,
        )  # fmt: skip

    def _scale(self, scaler: Any) -> float | None:
        scale = getattr(scaler, "_scale", None)
        cheap = scale is not None and scale.device.type == "cpu"
        if scale is None or not (cheap or self.recorder.segments.deep) or not self.deep.possible():
            return None
        return float(scale.item())

    def _newly(self, scaler: Any, before: dict[int, int], stage: int) -> int | None:
        for number, now in _stages(scaler).items():
            if now == stage and before.get(number) != stage:
                for record in self.recorder.optimizers:
                    optimizer = record.reference()
                    if optimizer is not None and id(optimizer) == number:
                        return record.index
        return None


def _stages(scaler: Any) -> dict[int, int]:
    states = getattr(scaler, "_per_optimizer_states", {})
    return {number: state["stage"].value for number, state in list(states.items())}


class _Clip:
    def __init__(self, recorder: Recorder, deep: Deep) -> None:
        self.recorder = recorder
        self.deep = deep
        self.notes: list[dict[str, Any]] = []
        self.home = vars(recorder.torch.nn.utils.clip_grad)

    def before(self, via: str) -> Any:
        """A clip begins."""

        def begin(_: Any, frame: FrameType) -> Any:
            recorder = self.recorder
            if self.notes and frame.f_globals is self.home:
                return None  # one clip calls the other
            place = recorder.find(frame)
            recorder.settle(place)
            recorder.inside += 1
            note = {"via": via, "place": place, "begun": recorder.now()}
            self.notes.append(note)
            return note

        return begin

    def argument(self, _: Any, frame: FrameType) -> Any:
        """A helper of the clip runs: its caller's frame has the arguments."""
        if not self.notes:
            return None
        note, given = self.notes[-1], frame.f_locals
        for name in ("max_norm", "clip_value"):
            if isinstance(given.get(name), float | int):
                note["max"] = float(given[name])
        if frame.f_code.co_name.startswith("clip_grad"):
            self._whose(note, given)
        total = given.get("total_norm")
        note["measured"] = total is not None
        if total is not None and self.deep.possible():
            cheap = total.device.type == "cpu"
            if cheap or self.recorder.segments.deep:
                note["norm"] = self.deep.value(total)
        return None

    def _whose(self, note: dict[str, Any], given: dict[str, Any]) -> None:
        """Whose gradients were handed over: an iterator that is used up hands over none."""
        parameters, gradients = given.get("parameters"), given.get("grads")
        if isinstance(gradients, list | tuple):
            note["given"] = len(gradients)
            if any(one.layout is self.recorder.torch.sparse_coo for one in gradients):
                note["sparse"] = True
        if isinstance(parameters, list | tuple):
            leaves = [self.recorder.leaves.get(p) for p in parameters]
            indexes = [leaf.index for leaf in leaves if leaf is not None]
            note["params"] = indexes
            note["duplicates"] = len(parameters) - len({id(p) for p in parameters})

    def after(self, note: dict[str, Any]) -> None:
        """The clip is over."""
        recorder = self.recorder
        self.notes.remove(note)
        recorder.inside -= 1
        touched = recorder.indexes(recorder.leaves.look().grads)
        place, begun = note.pop("place"), note.pop("begun")
        if not note.pop("measured", False) and note.get("sparse"):
            note["failed"] = True
        recorder.event("clip", place, begun, (note["via"], bool(touched)), touched=touched, **note)


def install(recorder: Recorder, deep: Deep, patches: Patches) -> None:
    """Listen to scalers and clips."""
    torch = recorder.torch
    scaler = _Scaler(recorder, deep)
    kind = torch.amp.GradScaler
    for name, before, after in (
        ("scale", scaler.before_scale, None),
        ("unscale_", scaler.before_unscale, scaler.after_unscale),
        ("step", scaler.before_step, scaler.after_step),
        ("update", scaler.before_update, scaler.after_update),
    ):
        over = None if after is None else guarded_after(recorder, after)
        patches.graft(vars(kind)[name], guarded(recorder, before), over)
    clip = _Clip(recorder, deep)
    home = torch.nn.utils.clip_grad
    over = guarded_after(recorder, clip.after)
    for name, via in (("clip_grad_norm_", "norm"), ("clip_grad_value_", "value"),
                      ("clip_grads_with_norm_", "norm")):  # fmt: skip
        original = getattr(torch.nn.utils, name, None)
        if original is not None:
            patches.graft(original, guarded(recorder, clip.before(via)), over)
    argument = guarded(recorder, clip.argument)
    for name in ("_get_total_norm", "_clip_grads_with_norm_", "_group_tensors_by_device_and_dtype"):
        original = getattr(home, name, None)
        if original is not None:
            patches.graft(original, argument)
