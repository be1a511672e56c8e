"""The leaves of the run: found, named, and compared with how they last stood."""

from __future__ import annotations

import gc
import weakref
from _thread import get_ident
from collections.abc import Iterable
from itertools import compress
from typing import Any

from gradaccum.doctor.trace.tracked import Holding, Tracked, drop

__all__ = ["Leaves", "Seen"]

MOST = 20_000
NODES = 200_000
FIRST = 64
"""Nodes of a graph that are told to be its first."""


class Seen:
    """What changed between two looks."""

    __slots__ = ("cleared", "grads", "values")

    def __init__(self) -> None:
        self.grads: list[Tracked] = []
        """Gradients that are new or were written to."""
        self.cleared: list[Tracked] = []
        """Gradients that are `None` now."""
        self.values: list[Tracked] = []
        """Leaves that were written to."""


_NOTHING = Seen()
_NONE = id(None)


class Leaves:
    """All leaves that are watched; tensors are held weakly.

    Args:
        torch: the module, which the script has imported.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._grad = torch._C.TensorBase.grad.__get__
        self._silent = torch._C._disabled_torch_dispatch_impl
        self._parameter = torch.nn.Parameter
        self.running: set[int] = set()
        """Threads in which a backward runs."""
        self.first: int | None = None
        self.several = False
        """Whether more threads than one have run backwards.

        The engine works without Python's lock. Even to hold a gradient that another thread's
        engine writes to can end the process, so then each thread reads its own leaves only.
        """
        self.all: list[Tracked] = []
        self.live: list[Tracked] = []
        # How each of these last stood, side by side, so that they are compared in C: reference,
        # identity of its gradient, version of its gradient, its own version.
        self._references: list[Any] = []
        self._stood: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._by_id: dict[int, Tracked] = {}
        self._by_grad: dict[int, Tracked] | None = None
        self._by_pointer: dict[int, tuple[str, Tracked]] | None = None
        self.watched: list[list[Any]] = []
        """Weak references to the modules that are told of, and whether each has trained."""
        self.module_numbers: dict[int, int] = {}
        self.new: list[Tracked] = []
        """Found since the last description was written."""

    def get(self, tensor: Any) -> Tracked | None:
        """The leaf that a tensor is."""
        leaf = self._by_id.get(id(tensor))
        return leaf if leaf is not None and leaf.reference() is tensor else None

    def track(self, tensor: Any) -> Tracked | None:
        """Watch a tensor from now on."""
        leaf = self.get(tensor)
        if leaf is not None:
            return leaf
        try:
            reference = weakref.ref(tensor)
            leaf = Tracked(len(self.all), tensor, reference, isinstance(tensor, self._parameter))
            _standing([tensor], [None])
        except (RuntimeError, TypeError):  # a lazy or an inference tensor
            return None
        if self._again(leaf) or len(self.all) >= MOST:
            return self.get(tensor)
        gradient = self._grad(tensor)
        if gradient is not None:
            leaf.grad = id(gradient)
            leaf.holding = Holding(1, (-1,), 1)  # stood there before we looked
        leaf.pointer = self._pointer(tensor)
        self.all.append(leaf)
        self.new.append(leaf)
        self._join(leaf, tensor, gradient)
        return leaf

    def _join(self, leaf: Tracked, tensor: Any, gradient: Any) -> None:
        self.live.append(leaf)
        self._references.append(leaf.reference)
        for stood, now in zip(self._stood, _standing([tensor], [gradient]), strict=True):
            stood += now
        self._by_id[id(tensor)] = leaf
        self._by_grad = self._by_pointer = None

    def _again(self, leaf: Tracked) -> bool:
        """Whether this is the next of a kind that is made anew for each batch, as inputs are."""
        if leaf.is_parameter:
            return False
        for old in self.all:
            same = old.shape == leaf.shape and old.dtype == leaf.dtype
            if same and not old.is_parameter and old.reference() is None:
                if old in self.live:
                    self._bury()
                old.reference, old.grad = leaf.reference, 0
                drop([old])
                self._join(old, leaf.reference(), None)
                return True
        return False

    def find(self, roots: tuple[Any, ...], first: list[Any] | None = None) -> list[Tracked]:
        """Watch every leaf that these tensors depend on; returns them.

        Args:
            roots: the tensors.
            first: takes the nodes that nothing but leaves lead to, where each pass begins.
        """
        todo = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
        found: list[Tracked] = []
        seen: set[Any] = set()
        thread = get_ident()
        while todo and len(seen) < NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaf = self.track(variable)
                if leaf is not None:
                    if leaf.thread != thread:
                        leaf.thread = 0 if leaf.thread in (0, *self.running - {thread}) else thread
                    found.append(leaf)
            children = [child for child, _ in node.next_functions if child is not None]
            room = first is not None and children and len(first) < FIRST
            if first is not None and room and all(hasattr(c, "variable") for c in children):
                first.append(node)
            todo.extend(children)
        return found

    def begin(self, thread: int) -> bool:
        """A backward is about to run; returns whether it is the outermost of its thread."""
        if self.first is None:
            self.first = thread
        elif self.first != thread:
            self.several = True
        if thread in self.running:
            return False
        self.running.add(thread)
        return True

    def whose(self) -> int:
        """The thread that looks: for one of the engine's own, that which called the engine."""
        thread, running = get_ident(), self.running
        if thread in running or len(running) != 1:
            return thread
        inside = self._torch._C._current_graph_task_id() != -1
        return next(iter(running), thread) if inside else thread

    def gradients(self, leaves: Iterable[Tracked]) -> list[Any]:
        """Gradients that stand in these leaves and may be read."""
        thread, grad = self.whose(), self._grad
        found = []
        for leaf in leaves:
            tensor = leaf.reference()
            if tensor is None or (self.several and leaf.thread != thread):
                continue
            gradient = grad(tensor)
            if gradient is not None:
                found.append(gradient)
        return found

    def look(self) -> Seen:
        """Compare all leaves with how they last stood."""
        grad = self._grad
        if self.several:
            return self._look_at_own()
        tensors = [reference() for reference in self._references]
        try:
            gradients = [grad(tensor) for tensor in tensors]
        except TypeError:  # of None: a leaf is gone
            if not any(tensor is None for tensor in tensors):
                raise
            self._bury()
            return self.look()
        now = _standing(tensors, gradients)
        if now == self._stood:
            return _NOTHING
        return self._compare(now, range(len(tensors)))

    def _look_at_own(self) -> Seen:
        """Those whose backwards run in this thread; of the others not even a gradient is held."""
        thread = self.whose()
        if any(leaf.reference() is None for leaf in self.live):
            self._bury()
        mine = [i for i, leaf in enumerate(self.live) if leaf.thread == thread]
        tensors = [self._references[i]() for i in mine]
        if any(tensor is None for tensor in tensors):
            return self._look_at_own()
        found = _standing(tensors, [self._grad(tensor) for tensor in tensors])
        now = tuple(list(stood) for stood in self._stood)
        for whole, part in zip(now, found, strict=True):
            for i, value in zip(mine, part, strict=True):
                whole[i] = value
        return self._compare((now[0], now[1], now[2]), mine)

    def _compare(self, now: tuple[list[int], list[int], list[int]], which: Iterable[int]) -> Seen:
        seen, live = Seen(), self.live
        (ids, writes, versions), (old_ids, old_writes, old_versions) = now, self._stood
        if ids != old_ids:
            self._by_grad = self._by_pointer = None
        if ids != old_ids or writes != old_writes:
            for i in which:
                if ids[i] == old_ids[i] and writes[i] == old_writes[i]:
                    continue
                leaf = live[i]
                if ids[i] == _NONE:
                    leaf.grad = 0
                    seen.cleared.append(leaf)
                else:
                    leaf.grad = ids[i]
                    seen.grads.append(leaf)
        if versions != old_versions:
            seen.values = [live[i] for i in which if versions[i] != old_versions[i]]
        self._stood = now
        return seen

    def _bury(self) -> None:
        alive = [leaf.reference() is not None for leaf in self.live]
        for leaf in self.live:
            if leaf.reference() is None and not leaf.grad:
                drop([leaf])
        self.live = list(compress(self.live, alive))
        self._references = list(compress(self._references, alive))
        ids, writes, versions = (list(compress(stood, alive)) for stood in self._stood)
        self._stood = ids, writes, versions
        self._by_id = {
            number: leaf for number, leaf in self._by_id.items() if leaf.reference() is not None
        }
        self._by_grad = self._by_pointer = None

    def meant(self, tensor: Any) -> tuple[str, Tracked] | None:
        """Which leaf a tensor is or whose gradient; `param`, `grad`, `data` or `grad.data`."""
        leaf = self.get(tensor)
        if leaf is not None:
            return "param", leaf
        if self._by_grad is None:
            self._by_grad = {leaf.grad: leaf for leaf in self.live if leaf.grad}
        leaf = self._by_grad.get(id(tensor))
        if leaf is not None:
            owner = leaf.reference()
            if owner is not None and self._grad(owner) is tensor:
                return "grad", leaf
        return None

    def alias(self, tensor: Any) -> tuple[str, Tracked] | None:
        """The same for a tensor that only shares its memory with one, such as `p.data`."""
        try:
            pointer = tensor.data_ptr()
        except RuntimeError:
            return None
        if not pointer:
            return None
        table = self._by_pointer
        if table is None:
            table = self._by_pointer = self._pointers()
        return table.get(pointer)

    def _pointers(self) -> dict[int, tuple[str, Tracked]]:
        table: dict[int, tuple[str, Tracked]] = {}
        thread = self.whose()
        for leaf in self.live:
            tensor = leaf.reference()
            if tensor is None or (self.several and leaf.thread != thread):
                continue
            table[self._pointer(tensor)] = ("data", leaf)
            gradient = self._grad(tensor)
            if gradient is not None:
                table[self._pointer(gradient)] = ("grad.data", leaf)
        return table

    def _pointer(self, tensor: Any) -> int:
        """Where its memory begins; 0 where it has none, or where its class would hear of it."""
        if type(tensor).__torch_dispatch__ is not self._silent:
            return 0
        try:
            return int(tensor.data_ptr())
        except RuntimeError:  # sparse, or without storage
            return 0

    def elsewhere(self) -> list[Tracked]:
        """Leaves whose memory is another than when last looked at."""
        found = []
        for leaf in self.live:
            tensor = leaf.reference()
            if tensor is None:
                continue
            pointer = self._pointer(tensor)
            if pointer != leaf.pointer:
                leaf.pointer = pointer
                found.append(leaf)
        self._by_pointer = None
        return found

    def name(self) -> list[dict[str, Any]]:
        """Name leaves by the modules that hold them; returns the modules worth telling of."""
        module = self._torch.nn.Module
        kinds = {id(kind) for kind in _kinds(module)}
        objects = gc.get_objects()
        # In C and by identity: there may be a million of them, with types of any kind.
        among = map(kinds.__contains__, map(id, map(type, objects)))
        modules = list(compress(objects, among))
        del objects
        inner = {id(c) for m in modules for c in _parts(m, "_modules") if c is not None}
        told: list[dict[str, Any]] = []
        before = {id(m): w[1] for w in self.watched if (m := w[0]()) is not None}
        self.watched, self.module_numbers = [], {}
        for root in modules:
            if id(root) not in inner:
                self._walk(root, "", told, set())
        for watched in self.watched:
            watched[1] = before.get(id(watched[0]()), False)
        return told

    def held(self, module: Any) -> list[Tracked]:
        """The leaves of a module and of those within it, asked without running its own code."""
        todo, seen, found = [module], set(), []
        while todo:
            one = todo.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            found += [self.get(p) for p in _parts(one, "_parameters") if p is not None]
            todo += [child for child in _parts(one, "_modules") if child is not None]
        return [leaf for leaf in found if leaf is not None]

    def _walk(self, module: Any, prefix: str, told: list[dict[str, Any]], seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        kind = type(module).__name__
        sways = "BatchNorm" in kind or "InstanceNorm" in kind or "Dropout" in kind
        if (not prefix or sways) and len(told) < 200:
            training = bool(module.__dict__.get("training", True))
            told.append({"kind": kind, "name": prefix.rstrip("."), "training": training})
            self.module_numbers[id(module)] = len(self.watched)
            self.watched.append([weakref.ref(module), False])
        for name, parameter in _items(module, "_parameters"):
            leaf = self.track(parameter) if parameter is not None else None
            if leaf is not None and not leaf.name:
                leaf.name = prefix + name
        for name, child in _items(module, "_modules"):
            if child is not None:
                self._walk(child, f"{prefix}{name}.", told, seen)


def _standing(tensors: list[Any], gradients: list[Any]) -> tuple[list[int], list[int], list[int]]:
    """How leaves stand: the identity of each one's gradient, its version, and the leaf's own."""
    return (
        [*map(id, gradients)],
        [0 if gradient is None else gradient._version for gradient in gradients],
        [tensor._version for tensor in tensors],
    )


def _kinds(kind: type) -> set[type]:
    """A class and all that derive from it."""
    found, todo = {kind}, [kind]
    while todo:
        new = [sub for sub in type.__subclasses__(todo.pop()) if sub not in found]
        found.update(new)
        todo.extend(new)
    return found


def _parts(module: Any, kind: str) -> list[Any]:
    return list((module.__dict__.get(kind) or {}).values())


def _items(module: Any, kind: str) -> list[tuple[str, Any]]:
    return list((module.__dict__.get(kind) or {}).items())
