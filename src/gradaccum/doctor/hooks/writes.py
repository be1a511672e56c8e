"""Writes to parameters and gradients, noticed where the method that writes is looked up."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from gradaccum.doctor.hooks.behind import Behind
from gradaccum.doctor.hooks.guard import aside, guarded, guarded_after, uncompiled
from gradaccum.doctor.touch import Patches, StandIn
from gradaccum.doctor.trace.recorder import Recorder

__all__ = ["install"]

_HARMLESS = {
    "share_memory_", "detach_", "rename_", "retain_grad_", "is_shared_",
}  # fmt: skip
_OPERATORS = (
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__", "__idiv__",
)  # fmt: skip


class _Handing:
    """Stands as `__call__` in a class; hands out what is called."""

    def __get__(self, callee: Any, kind: Any = None) -> Any:
        return self if callee is None else callee._original


class _Mutator(StandIn):
    """Stands in `torch.Tensor` for a method that writes in place; hands out the original."""

    __call__ = _Handing()

    def __init__(self, name: str, original: Any, recorder: Recorder, behind: Behind) -> None:
        self._name = name
        self._original = original
        self._bind = original.__get__
        self._recorder = recorder
        self._behind = behind
        self._plain = (recorder.torch.Tensor, recorder.torch.nn.Parameter)
        self._compiler = aside(recorder.torch)
        self._hidden = recorder.torch._C.DisableTorchFunction

    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        if tensor is None:
            return self._original
        recorder = self._recorder
        if (
            not recorder.inside
            and type(tensor) in self._plain
            and (recorder.leaves.live or self._behind.any_graph())
        ):
            self._note(tensor, sys._getframe(1))
        return self._bind(tensor, kind)

    def _note(self, tensor: Any, frame: Any) -> None:
        recorder = self._recorder
        if not recorder.enter():
            return
        compiling = self._compiler(None) if self._compiler else None
        try:
            with self._hidden():
                self._mark(tensor, frame)
        except Exception as error:  # noqa: BLE001 - the script must not notice
            recorder.fail(error, "write")
        finally:
            recorder.leave()
            if self._compiler:
                self._compiler(compiling)

    def called(self, tensor: Any, frame: Any) -> None:
        """The same for a method in Python."""
        if not self._recorder.inside and type(tensor) in self._plain:
            self._mark(tensor, frame)

    def _mark(self, tensor: Any, frame: Any) -> None:
        recorder = self._recorder
        meant = recorder.leaves.meant(tensor)
        if meant is None and not recorder.places.ours(frame):
            meant = recorder.leaves.alias(tensor)
        if self._name == "requires_grad_":
            if meant is None and type(tensor) is self._plain[1]:
                recorder.leaves.track(tensor)
            recorder.mark("require", frame, self._name)
        elif meant is not None:
            recorder.mark(meant[0], frame, self._name, meant[1])
        else:
            self._behind.note(tensor, self._name, frame)


class _Setter:
    """Stands as `__call__` of what sets an attribute; hands out the original."""

    def __get__(self, callee: Any, kind: Any = None) -> Any:
        if callee is None:
            return self
        recorder = callee.recorder
        if not recorder.inside and recorder.leaves.live:
            callee.note(None, sys._getframe(1))
        return callee.original


class _Set:
    __call__ = _Setter()

    def __init__(self, original: Any, note: Any, recorder: Recorder) -> None:
        self.original = original
        self.note = note
        self.recorder = recorder


class _Attribute(property):
    """`grad`, `data`, `requires_grad`: read as before, and noticed when set.

    Whoever asks it for an attribute is answered by the original: a `__torch_function__` is called
    with `torch.Tensor.grad.__get__` and compares it with what it knows.
    """

    real: Any

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "real"), name)

    def __repr__(self) -> str:
        return repr(object.__getattribute__(self, "real"))


def _attribute(recorder: Recorder, name: str, kind: str) -> _Attribute:
    real = getattr(recorder.torch._C.TensorBase, name)

    def note(_: Any, frame: Any) -> None:
        recorder.mark(kind, frame, name + "=")

    noted = guarded(recorder, note)
    setter = _Set(real.__set__, noted, recorder)
    deleter = _Set(real.__delete__, noted, recorder)
    stand_in = _Attribute(real.__get__, setter, deleter)
    object.__setattr__(stand_in, "real", real)
    return stand_in


class _Hooking:
    """Hooks that the script sets on its leaves: they run inside every backward."""

    def __init__(self, recorder: Recorder, how: str, table: str) -> None:
        self.recorder = recorder
        self.how = how
        self.table = table

    def before(self, tensor: Any, frame: Any) -> Any:
        """It is being set."""
        recorder = self.recorder
        plain = (recorder.torch.Tensor, recorder.torch.nn.Parameter)
        if type(tensor) not in plain or not tensor.requires_grad or tensor.grad_fn is not None:
            return None
        leaf = recorder.leaves.track(tensor)
        if leaf is None or recorder.places.ours(frame):
            return None
        return leaf, recorder.find(frame), recorder.now()

    def after(self, note: Any) -> None:
        """It is set; the last of its table is the one."""
        leaf, place, begun = note
        tensor = leaf.reference()
        hooks = getattr(tensor, self.table, None)
        function = list(hooks.values())[-1] if hooks else None
        code = getattr(function, "__code__", None)
        path = line = None
        if code is not None:
            path, line = code.co_filename, code.co_firstlineno
        self.recorder.event(
            "hook", place, begun, params=[leaf.index], how=self.how, path=path, line=line,
            count=len(hooks or ()),
        )  # fmt: skip


def install(recorder: Recorder, behind: Behind, patches: Patches) -> None:
    """Listen to methods that write in place, and to `.grad =` and `.data =`."""
    uncompiled(recorder.torch, _Mutator.__get__, _Mutator._note, _Setter.__get__, _Handing.__get__)
    tensor, base = recorder.torch.Tensor, recorder.torch._C.TensorBase
    names = [
        name
        for name in dir(base)
        if name.endswith("_") and not name.startswith("_") and name not in _HARMLESS
    ]
    for name in (*names, *(n for n in _OPERATORS if hasattr(tensor, n))):
        original = getattr(tensor, name)
        stand_in = _Mutator(name, original, recorder, behind)
        if isinstance(original, FunctionType):
            patches.graft(original, guarded(recorder, stand_in.called))
        elif hasattr(original, "__get__"):
            patches.put(tensor, name, stand_in)
    for name, table in (
        ("register_hook", "_backward_hooks"),
        ("register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks"),
    ):
        hooking = _Hooking(recorder, name, table)
        before, after = guarded(recorder, hooking.before), guarded_after(recorder, hooking.after)
        patches.graft(vars(tensor)[name], before, after)
    patches.put(tensor, "requires_grad", _attribute(recorder, "requires_grad", "require"))
    patches.put(tensor, "grad", _attribute(recorder, "grad", "assign"))
    patches.put(tensor, "data", _attribute(recorder, "data", "data="))
