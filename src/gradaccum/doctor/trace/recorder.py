"""The trace as it is made: hooks call in here, records go out."""

from __future__ import annotations

import os
import sys
import time
import weakref
from _thread import get_ident as _ident
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradaccum.doctor.trace.leaves import Leaves, Seen
from gradaccum.doctor.trace.places import Places
from gradaccum.doctor.trace.segments import Segments
from gradaccum.doctor.trace.sink import Sink
from gradaccum.doctor.trace.tracked import Optimizer, Tracked, arrive, counts, drop, groups, told

__all__ = ["VERSION", "Recorder"]

VERSION = 1
HOLDERS = 32
_clock = time.perf_counter
Mark = tuple[str, int, int, str, bool, "Tracked | None"]
"""What is about to be written: kind of target, two places, how, whether autograd records, and the
leaf where it is known."""


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _forked() -> None:
    """A fork is another process, and its parent's recorder is not its own."""
    for recorder in list(_recorders):
        recorder.elsewhere = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)  # asking for the pid costs a system call


class Recorder:
    """All that is known of the run while it runs.

    Args:
        torch: the module, which the script has imported.
        sink: takes the records.
        head: the first record's fields.
        read: the ledger: what it says of a loss goes into the trace.
    """

    def __init__(
        self, torch: Any, sink: Sink, head: dict[str, Any], read: Callable[..., object] | None
    ) -> None:
        self.torch = torch
        self.read = read
        self.start = _clock()
        own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self.places = Places((os.path.dirname(torch.__file__) + os.sep, own + os.sep))
        self.leaves = Leaves(torch)
        self.optimizers: list[Optimizer] = []
        self._optimizer_by_id: dict[int, Optimizer] = {}
        self.named = False
        self.modules: list[dict[str, Any]] = []
        self.holders: dict[str, list[int]] = {}
        """The script's own names of modules, and the parameters of each."""
        self.parallel: weakref.WeakSet[Any] = weakref.WeakSet()
        """DistributedDataParallel modules that were called."""
        self.ranks = False
        """Whether there are any: to ask a `WeakSet` is slow."""
        self.turned = True
        """Whether a module's mode may have changed since it was last asked."""
        self._evaluating: list[int] = []
        self.activation = 0
        """Identity of the user's frame that was found last."""
        self.active: list[dict[str, Any]] = []
        """Backwards that run now, outermost first."""
        self.stepping: list[Optimizer] = []
        self.step_code: Any = None
        self.scaling = False
        """Whether a scaler's step runs."""
        self.marks: list[Mark] = []
        self.last = (-1, -1)
        self.busy: set[int] = set()
        """Threads in which our own code runs."""
        self.inside = 0
        """Above 0 while single writes are told by a larger event: a step, a clip, a backward."""
        self.trouble = ""
        self.closed = False
        self.rank: tuple[int, int] | None = None
        self.gone: Callable[[Tracked], float | None] | None = None
        """How far a parameter has gone over the run."""
        self._closely: Callable[[bool], None] | None = None
        self.begin(sink, head)
        _recorders.add(self)

    def begin(self, sink: Sink, head: dict[str, Any]) -> None:
        """Begin a trace: at the start, and again in a process that was forked off."""
        self.elsewhere = False
        self.sink = sink
        self.segments = Segments(sink, self.start)
        self.segments.before_write = self._describe
        self.segments.after_flush = self.summarise
        self.look_closely(self._closely)
        self.totals: Counter[str] = Counter()
        self.number = 0
        self.backwards = 0
        self._places_told = 0
        self._head: dict[str, Any] | None = {"t": "head", "version": VERSION, **head}
        self.leaves.new = list(self.leaves.all)
        self.busy.clear()

    def look_closely(self, turn: Callable[[bool], None] | None) -> None:
        """Call this whenever windows begin, or cease, to be looked at closely."""
        self._closely = turn
        self.segments.turn = turn
        if turn is not None:
            turn(self.segments.deep)

    # -- events ----------------------------------------------------------------------------------

    def listening(self) -> bool:
        """Whether events are to be recorded: not in a fork of the process that is recorded."""
        return not (self.elsewhere or self.closed)

    def enter(self) -> bool:
        """Begin a look of our own, unless this thread is in one."""
        thread = _ident()
        if thread in self.busy or not self.listening():
            return False
        self.busy.add(thread)
        return True

    def leave(self) -> None:
        """Our own code is over."""
        self.busy.discard(_ident())

    def now(self) -> float:
        """Seconds since the run began."""
        return _clock() - self.start

    def find(self, frame: FrameType | None) -> tuple[int, int]:
        """The numbers of the places that a frame is at."""
        at, user, self.activation = self.places.find(frame)
        return at, user

    def module(self, module: Any) -> int | None:
        """Its number among the modules that are told of."""
        return self.leaves.module_numbers.get(id(module))

    def evaluating(self) -> list[int]:
        """Modules with dropout or statistics that trained once and do not now.

        Asked of each only when `train` or `eval` was called since, and now and then.
        """
        if not (self.turned or self.segments.deep or not self.backwards & 15):
            return self._evaluating
        self.turned = False
        found = self._evaluating = []
        for number, watched in enumerate(self.leaves.watched):
            module = watched[0]()
            if module is None:
                continue
            training = module.__dict__.get("training", True)
            if training:
                watched[1] = True
            elif watched[1]:
                found.append(number)
        return found

    def ask_rank(self) -> None:
        """Which rank this process is; launchers tell some only once the process runs."""
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self.rank = (distributed.get_rank(), distributed.get_world_size())

    def event(
        self, kind: str, place: tuple[int, int], begun: float, mark: object = None, /, **data: Any
    ) -> dict[str, Any]:
        """Record an event that is over now."""
        return self.record(kind, place, begun, mark, data)

    def record(
        self, kind: str, place: tuple[int, int], begun: float, mark: object, data: dict[str, Any]
    ) -> dict[str, Any]:
        """The same, with what is said of it as a dictionary that becomes the event."""
        at, user = place
        now = _clock() - self.start
        data["k"], data["n"], data["s"], data["e"] = kind, self.number, begun, now
        if at >= 0:
            data["at"] = at
            self.last = place
        if user >= 0 and user != at:
            data["user"] = user
        self.number += 1
        self.totals[kind] += 1
        self.segments.add(data, mark, now)
        return data

    def fail(self, error: BaseException, where: str) -> None:
        """Remember what went wrong in our own code; the script must not notice."""
        if not self.trouble:
            self.trouble = f"{where}: {type(error).__name__}: {error}"

    # -- who wrote what --------------------------------------------------------------------------

    def mark(self, kind: str, frame: FrameType, how: str, leaf: Tracked | None = None) -> None:
        """Somebody is about to write: remember where, and settle what another line wrote."""
        marks = self.marks
        mark = (kind, *self.find(frame), how, self.torch.is_grad_enabled(), leaf)
        if marks:
            if mark in marks[-4:]:
                return
            if marks[-1][1] != mark[1] and len(marks) < 64:
                self.settle((-1, -1))
                marks = self.marks
        if len(marks) < 4096:
            marks.append(mark)

    def settle(self, place: tuple[int, int]) -> None:
        """Look at what has changed since the last look, and say who did it."""
        seen = self.leaves.look()
        marks, self.marks = self.marks, []
        thread = self.leaves.whose() if self.active else 0
        active = [note for note in self.active if note.get("thread") == thread]
        if active:
            arrive(active[-1], seen.grads)
        elif marks or seen.values or seen.cleared or seen.grads:
            self._explain(seen, marks, place)

    def _explain(self, seen: Seen, marks: list[Mark], place: tuple[int, int]) -> None:
        now = self.now()
        hidden = [m for m in marks if m[0] in ("data", "grad.data") and m[5] is not None]
        if hidden:
            self._hidden(hidden, now)
        moved = [m for m in marks if m[0] == "data="]
        if moved:
            leaves = self.leaves.elsewhere()
            if leaves:
                self._written("param", leaves, "data=", self._spot(moved, place), now)
        assigned = [m for m in marks if m[0] == "assign"]
        written = [m for m in marks if m[0] == "grad"]
        if seen.cleared:
            self._cleared(seen.cleared, "assign", self._spot(assigned, place), now)
        if seen.grads:
            chosen = written or assigned
            spot = self._spot(chosen, place)
            how = chosen[-1][3] if chosen else ""
            if how == "zero_" and all(m[3] == "zero_" for m in chosen):
                self._cleared(seen.grads, "write", spot, now)
            else:
                self._written("grad", seen.grads, how or "unknown", spot, now)
        if seen.values:
            chosen = [m for m in marks if m[0] == "param"]
            how = chosen[-1][3] if chosen else "unknown"
            self._written("param", seen.values, how, self._spot(chosen, place), now)
        required = [m for m in marks if m[0] == "require"]
        if required:
            self._required(self._spot(required, place), now)

    def _required(self, spot: dict[str, Any], now: float) -> None:
        """Leaves that began or ceased to ask for gradients."""
        place = spot.pop("place")
        turned: dict[bool, list[int]] = {}
        for leaf in self.leaves.live:
            tensor = leaf.reference()
            if tensor is not None and tensor.requires_grad != leaf.requires:
                leaf.requires = bool(tensor.requires_grad)
                turned.setdefault(leaf.requires, []).append(leaf.index)
        for requires, indexes in turned.items():
            self.event("require", place, now, requires, params=indexes, requires_grad=requires)

    def _spot(self, marks: list[Mark], place: tuple[int, int]) -> dict[str, Any]:
        if marks:
            return {"place": (marks[-1][1], marks[-1][2]), "nograd": not marks[-1][4]}
        return {"place": (-1, -1), "after": self.last[0], "before": place[0]}

    def _hidden(self, marks: list[Mark], now: float) -> None:
        """Writes through `.data`, which no version counter shows."""
        by: dict[tuple[str, int, int, str, bool], list[Tracked]] = {}
        for kind, at, user, how, grad, leaf in marks:
            if leaf is not None:
                by.setdefault((kind, at, user, how, grad), []).append(leaf)
        for (kind, at, user, how, grad), leaves in by.items():
            spot = {"place": (at, user), "nograd": not grad, "sure": False}
            if kind == "grad.data" and how == "zero_":
                self._cleared(leaves, "write", spot, now)
            else:
                target = "param" if kind == "data" else "grad"
                self._written(target, leaves, f"data.{how}", spot, now)

    def _cleared(
        self, leaves: list[Tracked], via: str, spot: dict[str, Any], now: float, **data: Any
    ) -> None:
        place = spot.pop("place")
        lost = groups(leaves)
        drop(leaves)
        for leaf in leaves:
            leaf.zeroed += 1
        self.event(
            "zero", place, now, (via, bool(lost)), via=via, cleared=self.indexes(leaves),
            lost=lost, **spot, **data,
        )  # fmt: skip

    def _written(
        self, target: str, leaves: list[Tracked], how: str, spot: dict[str, Any], now: float
    ) -> None:
        if target == "param":
            if not self.backwards:
                return  # the script still builds its model
            for leaf in leaves:
                leaf.changes += 1
        place = spot.pop("place")
        self.event(
            "write", place, now, (target, how), target=target, params=self.indexes(leaves),
            how=how, **spot,
        )  # fmt: skip

    def clear(
        self, via: str, place: tuple[int, int], begun: float, owned: list[Tracked], **data: Any
    ) -> None:
        """A call that clears gradients is over: say whose it cleared."""
        seen = self.leaves.look()
        self.marks = []
        if seen.values:
            self._written("param", seen.values, "unknown", self._spot([], place), begun)
        cleared = seen.cleared
        if seen.grads:
            known = {leaf.index for leaf in owned}
            cleared = cleared + [leaf for leaf in seen.grads if leaf.index in known]
        self._cleared(cleared, via, {"place": place}, begun, **data)

    def cleared_inside(self, leaves: list[Tracked], place: tuple[int, int]) -> None:
        """An optimizer's step has cleared gradients itself."""
        self._cleared(leaves, "step", {"place": place}, self.now())

    @staticmethod
    def indexes(leaves: list[Tracked]) -> list[int]:
        """Their numbers."""
        return [leaf.index for leaf in leaves]

    def name(self, frame: FrameType | None) -> None:
        """Name the leaves: by their modules, and by the variables that the script gave them."""
        self.modules = self.leaves.name()
        module = self.torch.nn.Module
        nameless = {id(leaf.reference()): leaf for leaf in self.leaves.live if not leaf.name}
        while frame is not None:
            if not self.places.ours(frame) and frame.f_code.co_name == "<module>":
                for name, value in list(frame.f_globals.items()):
                    leaf = nameless.get(id(value))
                    if leaf is not None:
                        leaf.name = name
                    if isinstance(value, module) and len(self.holders) < HOLDERS:
                        self.holders[name] = self.indexes(self.leaves.held(value))
            frame = frame.f_back

    # -- optimizers ------------------------------------------------------------------------------

    def optimizer(self, optimizer: Any, frame: FrameType | None = None) -> Optimizer:
        """The record of an optimizer, made when it is first met."""
        found = self._optimizer_by_id.get(id(optimizer))
        if found is not None and found.reference() is optimizer:
            return found
        at, user = self.find(frame)
        found = Optimizer(len(self.optimizers), optimizer, at, user)
        if len(self.optimizers) < 1000:
            self.optimizers.append(found)
        self._optimizer_by_id[id(optimizer)] = found
        if len(self._optimizer_by_id) > 2000:
            self._optimizer_by_id = {
                k: o for k, o in self._optimizer_by_id.items() if o.reference() is not None
            }
        return found

    def check_stepping(self, frame: FrameType | None) -> None:
        """Forget steps that raised: those whose call is no longer on the stack."""
        if self.leaves.several:
            return  # it may be on another's
        running = 0
        while frame is not None:
            running += frame.f_code is self.step_code
            frame = frame.f_back
        while len(self.stepping) > running:
            record = self.stepping.pop()
            self.inside = max(0, self.inside - 1)
            self.event("step_failed", (-1, -1), self.now(), optimizer=record.index)

    def own(self, record: Optimizer, optimizer: Any, closely: bool = True) -> None:
        """Look up whose parameters these are, if they are not those of the last look.

        Not `closely`: if they are not as many.
        """
        if not closely and sum([len(g["params"]) for g in optimizer.param_groups]) == len(
            record.ids
        ):
            return
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        ids = [id(p) for p in tensors]
        if ids == record.ids:
            return
        record.ids = ids
        leaves = [self.leaves.track(p) for p in tensors]
        record.leaves = [leaf for leaf in leaves if leaf is not None]
        for leaf in record.leaves:
            if record.index not in leaf.owners:
                leaf.owners = (*leaf.owners[-7:], record.index)

    # -- what goes out ---------------------------------------------------------------------------

    def _describe(self) -> None:
        """Write what the next record refers to and the file does not yet say."""
        if self._head is not None:
            head, self._head = self._head, None
            self.sink.write(head)
        described = self.places.described
        if self._places_told < len(described):
            new = described[self._places_told :]
            self.sink.write({"t": "places", "from": self._places_told, "places": new})
            self._places_told = len(described)
        if self.leaves.new:
            self.sink.write({"t": "params", "params": [told(leaf) for leaf in self.leaves.new]})
            self.leaves.new = []

    def finish(self, last: BaseException | None = None) -> None:
        """Write all that is still to be told."""
        if not self.number or self.elsewhere:
            return
        with self.torch._C.DisableTorchFunction():  # a class of the script's own may listen
            if self.enter():
                try:
                    self.settle((-1, -1))
                except Exception as error:  # noqa: BLE001 - the trace is worth more
                    self.fail(error, "finish")
                finally:
                    self.leave()
            self.segments.flush(_clock(), summary=False)
            self.summarise(last, ended=True)

    def summarise(self, last: BaseException | None = None, ended: bool = False) -> None:
        """Write what the whole run was like so far."""
        self._describe()
        leaves = self.leaves.all
        self.sink.write(
            {
                "t": "totals",
                "seconds": self.now(),
                "rank": self.rank,
                "totals": dict(self.totals),
                "tally": self.segments.tally(),
                "segments": self.segments.index,
                "optimizers": [self._optimizer(o) for o in self.optimizers],
                "params": [told(leaf) for leaf in leaves],
                "counts": [counts(leaf) for leaf in leaves],
                "changes": self._changes() if ended else [],
                "modules": self.modules,
                "holders": self.holders,
                "trouble": self.trouble,
                "error": "" if last is None else _line(last),
                "ended": ended,
            }
        )

    def _changes(self) -> list[float | None]:
        if self.gone is None or not self.enter():
            return []
        try:
            with self.torch.no_grad():
                return [self.gone(leaf) for leaf in self.leaves.all]
        except Exception as error:  # noqa: BLE001 - the trace is worth more
            self.fail(error, "finish")
            return []
        finally:
            self.leave()

    def _optimizer(self, record: Optimizer) -> dict[str, Any]:
        return {
            "i": record.index, "kind": record.kind, "at": record.at, "user": record.user,
            "params": self.indexes(record.leaves), "steps": record.steps, "lr": record.lr,
        }  # fmt: skip


def _line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the script's own `__str__`
        text = ""
    first = text.strip().splitlines()[0][:300] if text.strip() else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def last_error() -> BaseException | None:
    """What ended the program, if Python has printed it."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
