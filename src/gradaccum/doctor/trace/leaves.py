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


class Leaves:
    """All leaves that are watched; tensors are held weakly.

    Args:
        torch: the module, which the script has imported.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._grad = torch._C.TensorBase.grad.__get__
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
        self._by_id: dict[int, Tracked] = {}
        self._by_grad: dict[int, Tracked] = {}
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
        except (RuntimeError, TypeError):  # a lazy or an inference tensor
            return None
        if self._again(leaf) or len(self.all) >= MOST:
            return self.get(tensor)
        gradient = self._grad(tensor)
        if gradient is not None:
            leaf.grad, leaf.grad_version = id(gradient), gradient._version
            leaf.holding = Holding(1, (-1,), 1)  # stood there before we looked
            self._by_grad[id(gradient)] = leaf
        leaf.pointer = _pointer(tensor)
        self.all.append(leaf)
        self.live.append(leaf)
        self.new.append(leaf)
        self._by_id[id(tensor)] = leaf
        self._by_pointer = None
        return leaf

    def _again(self, leaf: Tracked) -> bool:
        """Whether this is the next of a kind that is made anew for each batch, as inputs are."""
        if leaf.is_parameter:
            return False
        for old in self.all:
            same = old.shape == leaf.shape and old.dtype == leaf.dtype
            if same and not old.is_parameter and old.reference() is None:
                old.reference, old.version, old.grad = leaf.reference, leaf.version, 0
                drop([old])
                self._by_id[id(leaf.reference())] = old
                self.live.append(old)
                self._by_pointer = None
                return True
        return False

    def find(self, roots: tuple[Any, ...]) -> list[Tracked]:
        """Watch every leaf that these tensors depend on; returns them."""
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
            todo.extend(child for child, _ in node.next_functions)
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
        seen = Seen()
        grad = self._grad
        thread = self.whose() if self.several else 0
        gone = False
        for leaf in self.live:
            tensor = leaf.reference()
            if tensor is None:
                gone = True
                continue
            if self.several and leaf.thread != thread:
                continue
            gradient = grad(tensor)
            if gradient is None:
                if leaf.grad:
                    self._by_grad.pop(leaf.grad, None)
                    leaf.grad = 0
                    seen.cleared.append(leaf)
            else:
                number, version = id(gradient), gradient._version
                if number != leaf.grad or version != leaf.grad_version:
                    if number != leaf.grad:
                        self._by_grad.pop(leaf.grad, None)
                        self._by_grad[number] = leaf
                        self._by_pointer = None
                    leaf.grad, leaf.grad_version = number, version
                    seen.grads.append(leaf)
            version = tensor._version
            if version != leaf.version:
                leaf.version = version
                seen.values.append(leaf)
        if gone:
            self._bury()
        return seen

    def _bury(self) -> None:
        live = [leaf for leaf in self.live if leaf.reference() is not None]
        self._by_id = {
            number: leaf for number, leaf in self._by_id.items() if leaf.reference() is not None
        }
        for leaf in self.live:
            if leaf.reference() is None:
                self._by_grad.pop(leaf.grad, None)
                if not leaf.grad:
                    drop([leaf])
        self.live = live
        self._by_pointer = None

    def meant(self, tensor: Any) -> tuple[str, Tracked] | None:
        """Which leaf a tensor is or whose gradient; `param`, `grad`, `data` or `grad.data`."""
        leaf = self.get(tensor)
        if leaf is not None:
            return "param", leaf
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
            try:
                table[tensor.data_ptr()] = ("data", leaf)
                gradient = self._grad(tensor)
                if gradient is not None:
                    table[gradient.data_ptr()] = ("grad.data", leaf)
            except RuntimeError:  # sparse, or without storage
                continue
        return table

    def elsewhere(self) -> list[Tracked]:
        """Leaves whose memory is another than when last looked at."""
        found = []
        for leaf in self.live:
            tensor = leaf.reference()
            if tensor is None:
                continue
            pointer = _pointer(tensor)
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


def _kinds(kind: type) -> set[type]:
    """A class and all that derive from it."""
    found, todo = {kind}, [kind]
    while todo:
        new = [sub for sub in type.__subclasses__(todo.pop()) if sub not in found]
        found.update(new)
        todo.extend(new)
    return found


def _pointer(tensor: Any) -> int:
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def _parts(module: Any, kind: str) -> list[Any]:
    return list((module.__dict__.get(kind) or {}).values())


def _items(module: Any, kind: str) -> list[tuple[str, Any]]:
    return list((module.__dict__.get(kind) or {}).items())
