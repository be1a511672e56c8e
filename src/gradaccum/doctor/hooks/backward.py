"""Every backward, noticed where Python hands it to the engine."""

from __future__ import annotations

import sys
import time
import weakref
from _thread import get_ident
from collections import deque
from types import FrameType
from typing import Any

from gradaccum.doctor.hooks.behind import Behind
from gradaccum.doctor.hooks.deep import Deep
from gradaccum.doctor.hooks.guard import guarded, guarded_after
from gradaccum.doctor.hooks.older import Older
from gradaccum.doctor.hooks.summands import constants
from gradaccum.doctor.saved import tells
from gradaccum.doctor.touch import Patches
from gradaccum.doctor.trace.recorder import Recorder
from gradaccum.doctor.trace.tracked import arrive

__all__ = ["install"]

_clock = time.perf_counter
_PACKED = (
    "saved-tensor hooks were set, as by activation checkpointing, which this torch does not show"
)
_FACTORS = ("MulBackward0", "DivBackward0")


class _Token:
    """Lies in a graph's node, whose life it shares: autograd's nodes take no weak references."""

    __slots__ = ("__weakref__",)

    @staticmethod
    def put(node: Any) -> weakref.ref[_Token]:
        """Leave one in a node, below the factors that only this backward may have put on it."""
        while type(node).__name__ in _FACTORS and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        token = _Token()
        node.metadata["gradaccum"] = token
        return weakref.ref(token)

    @staticmethod
    def put_first(nodes: list[Any]) -> weakref.ref[_Token]:
        """Leave one in the first nodes of a pass: it lives as long as anything that they led to."""
        token = _Token()
        for node in nodes:
            node.metadata["gradaccum.first"] = token
        return weakref.ref(token)


class _Watch:
    """What is done before and after each backward."""

    def __init__(self, recorder: Recorder, deep: Deep, behind: Behind) -> None:
        self.recorder = recorder
        self.behind = behind
        self.older = Older(recorder)
        self.packed = False
        """Whether saved tensors may run the script's code, where they do not tell themselves."""
        self.deep = deep
        self._plain = recorder.torch.Tensor
        self._kept: deque[weakref.ref[_Token]] = deque(maxlen=64)
        self._begun: deque[weakref.ref[_Token]] = deque(maxlen=64)

    def begin(self, given: tuple[Any, Any, Any], frame: FrameType) -> Any:
        """A backward begins."""
        leaves = self.recorder.leaves
        outermost = leaves.begin(get_ident())
        try:
            return outermost, self.before(*given, frame)
        except BaseException:
            if outermost:
                leaves.running.discard(get_ident())
            raise

    def end(self, held: tuple[bool, dict[str, Any] | None]) -> None:
        """It is over."""
        outermost, note = held
        try:
            if note is not None:
                self.after(note)
        finally:
            if outermost:
                self.recorder.leaves.running.discard(get_ident())

    def before(self, outputs: Any, rest: Any, more: Any, frame: FrameType) -> Any:
        """Note the loss while its graph is there."""
        recorder = self.recorder
        place = recorder.find(frame)
        if not more.get("accumulate_grad", True):
            if recorder.torch._C._len_torch_dispatch_stack():
                return None  # a compiler traces
            if recorder.torch._C._current_graph_task_id() == -1:
                recorder.settle(place)  # what was written since the last one is told before this
            recorder.event("grad", place, recorder.now(), create=bool(rest[2]))
            return None
        nested = recorder.torch._C._current_graph_task_id() != -1
        if not nested:
            if recorder.stepping:
                recorder.check_stepping(frame)
            recorder.settle(place)
        begun = recorder.now()
        outputs = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
        note = self._note(outputs, rest, place, nested)
        recorder.backwards += 1
        note["thread"] = get_ident()
        if recorder.leaves.several and not nested:
            recorder.leaves.find(outputs)  # whose leaves these are
        if recorder.segments.reading and not nested:
            spent = _clock()
            self._look(note, outputs, rest[0], frame)
            recorder.segments.spent += _clock() - spent
        recorder.active.append(note)
        recorder.inside += 1
        note["begun"], note["error"] = begun, sys.exc_info()[1]
        return note

    def _note(
        self, outputs: Any, rest: Any, place: tuple[int, int], nested: bool
    ) -> dict[str, Any]:
        """What is said of every backward; what is usual is left out."""
        recorder = self.recorder
        loss = outputs[0]
        note: dict[str, Any] = {
            "b": recorder.backwards,
            "place": place,
            "arrived": {},
            "fresh": [],
            "nested": nested,
            "requires_grad": bool(getattr(loss, "requires_grad", True)),
            "frame": recorder.activation,
        }
        if rest[1]:
            note["retain"] = True
        if rest[2]:
            note["create"] = True
        if rest[3]:
            note["inputs"] = True
        if len(outputs) > 1:
            note["losses"] = len(outputs)
            note["requires_grad"] = any(getattr(o, "requires_grad", True) for o in outputs)
        if recorder.stepping and not recorder.leaves.several:
            note["step"] = recorder.stepping[-1].index
        if recorder.ranks:
            note["sync"] = [bool(m.require_backward_grad_sync) for m in recorder.parallel]
        if hasattr(loss, "is_leaf"):  # else an edge of a graph
            if self.deep.silent(loss) and loss.dim():
                note["shape"] = tuple(loss.shape)
            if loss.is_leaf:
                note["leaf"] = True
            if not nested:
                self._cheap(note, loss)
        evaluating = recorder.evaluating()
        if evaluating:
            note["eval"] = evaluating
        return note

    def packing(self, _: Any, __: FrameType) -> None:
        """Somebody has hooks run where tensors are saved and looked at."""
        self.packed = True

    def _cheap(self, note: dict[str, Any], loss: Any) -> None:
        """What every backward is asked: the loss where it lies on the host, and kept graphs."""
        single = "shape" not in note or loss.numel() == 1
        if single and type(loss) is self._plain and loss.is_cpu and self.deep.possible():
            value = loss.item()
            if type(value) is float:
                note["loss"] = value
        if "leaf" not in note and (self.recorder.segments.deep or not note["b"] & 7):
            node = loss.grad_fn  # asking for it makes an object
            note["kept"] = len([1 for token in self._kept if token() is not None])
            self._kept.append(_Token.put(node))

    def _name(self, frame: FrameType) -> None:
        """Name the leaves, and keep some of their values."""
        recorder = self.recorder
        begun = _clock()
        recorder.name(frame)
        if self.deep.possible():
            self.deep.remember(recorder.leaves.live)
        if not recorder.named:  # once a run, so the looks that follow need not make up for it
            recorder.named = True
            recorder.segments.spent -= _clock() - begun

    def _look(self, note: dict[str, Any], outputs: Any, seeds: Any, frame: FrameType) -> None:
        recorder = self.recorder
        losses = [one for one in outputs if hasattr(one, "is_leaf")]
        with self.deep.quiet():
            if recorder.segments.deep:
                known, first = len(recorder.leaves.all), list[Any]()
                recorder.leaves.find(outputs, first)
                if len(recorder.leaves.all) != known or not recorder.named:
                    self._name(frame)
                self._closely(note, losses, first)
            if note.get("retain"):
                old = self.older.leaves(outputs, note["place"][0])
                if old:
                    note["old"] = old
            if not self.deep.possible():
                return
            if self.packed:
                note["ledger"] = {"error": _PACKED}
            else:
                self.behind.look(outputs, note["b"])
            if "loss" not in note and recorder.segments.deep:
                note["loss"] = self.deep.value(outputs[0])
            readable = not self.packed and all(map(self.deep.silent, losses))
            if recorder.read is not None and readable:
                try:
                    note["ledger"] = recorder.read(outputs, tuple(seeds))
                except Exception as error:  # noqa: BLE001 - "unknown" must not end the run
                    note["ledger"] = {"error": f"{type(error).__name__}: {error}"}

    def _closely(self, note: dict[str, Any], losses: list[Any], first: list[Any]) -> None:
        """Passes of which something still lives, and what is added to the loss without a graph."""
        note["held"] = sum(token() is not None for token in self._begun)
        if first:
            self._begun.append(_Token.put_first(first))
        added = constants(losses[0].grad_fn) if len(losses) == 1 else 0
        if added:
            note["constant"] = added

    def after(self, note: dict[str, Any]) -> None:
        """The engine is done, or has raised."""
        recorder = self.recorder
        error = sys.exc_info()[1]
        if error is not None and error is not note["error"] and type(error) is RuntimeError:
            note["failed"] = str(error)[:80]
        del note["error"]
        recorder.inside -= 1
        seen = recorder.leaves.look()
        del note["thread"]
        arrive(note, seen.grads)
        if seen.values:
            # A hook on the gradient writes to the parameter; an optimizer that steps inside the
            # backward has looked itself.
            note["written"] = recorder.indexes(seen.values)
            for leaf in seen.values:
                leaf.changes += 1
        if len(recorder.active) == 1 and recorder.active[0] is note:
            recorder.active.clear()
        else:
            recorder.active = [other for other in recorder.active if other is not note]
        place, begun = note.pop("place"), note.pop("begun")
        end = None
        note["arrived"] = list(note["arrived"])
        if recorder.segments.deep and not note["nested"] and self.deep.possible():
            end = recorder.now()
            spent = _clock()
            with self.deep.quiet():
                note["norm"] = self.deep.norm(recorder.leaves.live)
                note["memory"] = self.deep.memory()
            recorder.segments.spent += _clock() - spent
        shape = (bool(note["fresh"]), note["nested"])
        event = recorder.record("backward", place, begun, shape, note)
        if end is not None:
            event["e"] = end


def install(recorder: Recorder, deep: Deep, behind: Behind, patches: Patches) -> None:
    """Listen to the engine."""
    watch = _Watch(recorder, deep, behind)
    before, after = guarded(recorder, watch.begin), guarded_after(recorder, watch.end)
    run = recorder.torch.autograd.graph._engine_run_backward
    patches.graft(run, before, after, everything=True)
    if not tells(recorder.torch):
        enter = vars(recorder.torch.autograd.graph.saved_tensors_hooks)["__enter__"]
        patches.graft(enter, guarded(recorder, watch.packing))
