"""Calls: into the files we were given, of methods that matter, and of everything else."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from gradaccum.lint.walk import by_hand, effects, library
from gradaccum.lint.walk.arithmetic import INSIDE, asked, merged
from gradaccum.lint.walk.attributes import attribute
from gradaccum.lint.walk.classes import base_kind, divides, find_method
from gradaccum.lint.walk.contents import models_of
from gradaccum.lint.walk.escapes import escapes
from gradaccum.lint.walk.evaluate import evaluate, text
from gradaccum.lint.walk.lightning import configured
from gradaccum.lint.walk.loops import LENGTH
from gradaccum.lint.walk.means import is_quotient, shown
from gradaccum.lint.walk.sizes import called, sized
from gradaccum.lint.walk.tensor_methods import tensor_method
from gradaccum.lint.walk.trace import Frame
from gradaccum.lint.walk.values import Class, Divisor, Env, Func, Seq, Tensor, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["call", "instantiate", "tensors"]

_OF_LIGHTNING = {"optimizers": "optimizer", "lr_schedulers": "scheduler"}


def call(walker: Walker, env: Env, node: ast.Call) -> Value:
    """The value of a call, after its effects were noted."""
    walker.budget -= 1
    func = node.func
    if isinstance(func, ast.Attribute):
        receiver = evaluate(walker, env, func.value)
        args, kwargs = _arguments(walker, env, node)
        if walker.loops and _AVERAGES.search(text(func)):
            _average(walker, node, receiver, args)
        return _method(walker, node, receiver, func.attr, args, kwargs)
    target = evaluate(walker, env, func)
    args, kwargs = _arguments(walker, env, node)
    if walker.loops and isinstance(func, ast.Name) and _AVERAGES.search(func.id):
        _average(walker, node, None, args)
    return apply(walker, node, target, args, kwargs)


_AVERAGES = re.compile(
    r"(^|[._])ema([._]\w+)*\.(update|step)$|_ema\.(update|step)$|\.update_parameters$"
    r"|^(update_ema|ema_update|update_average)(_params|_parameters|_model)?$",
    re.IGNORECASE,
)
"""How code moves an average of the weights."""


def _average(walker: Walker, node: ast.Call, receiver: Value, args: list[Value]) -> None:
    """Note a move of an average, if it is one of weights: it was given a model."""
    given = [*args, *(receiver.args if isinstance(receiver, Thing) else ())]
    if isinstance(receiver, Thing) and receiver.kwargs.keys() & {
        "update_every",
        "update_after_step",
    }:
        return  # it counts by itself
    if models_of(given) or (isinstance(receiver, Thing) and receiver.models):
        walker.note("averaged", node, receiver if isinstance(receiver, Thing) else None)


def _arguments(walker: Walker, env: Env, node: ast.Call) -> tuple[list[Value], dict[str, Value]]:
    args: list[Value] = []
    for part in node.args:
        value = evaluate(walker, env, part)
        if isinstance(part, ast.Starred) and isinstance(value, Seq) and not value.open:
            args.extend(value.items)
        else:
            args.append(value)
    kwargs: dict[str, Value] = {}
    for keyword in node.keywords:
        value = evaluate(walker, env, keyword.value)
        if keyword.arg is not None:
            kwargs[keyword.arg] = value
        elif isinstance(value, Thing):
            kwargs.update({k: v for k, v in value.attrs.items() if k.isidentifier()})
    return args, kwargs


def _method(
    walker: Walker,
    node: ast.Call,
    receiver: Value,
    name: str,
    args: list[Value],
    kwargs: dict[str, Value],
) -> Value:
    if isinstance(receiver, Tensor):
        return tensor_method(walker, node, receiver, name, args, kwargs)
    if isinstance(receiver, Seq):
        return _list_method(walker, node, receiver, name, args)
    if isinstance(receiver, Class):
        method = find_method(walker, receiver, name)
        if method is not None:
            return _enter(walker, method, args, kwargs)
        if name.startswith(("from_", "load_")):
            made = Thing(base_kind(walker, receiver), f"{text(node.func)}()@{node.lineno}",
                         node=node, depth=len(walker.loops))  # fmt: skip
            made.attrs["__class__"] = receiver
            return made
        return unknown_call(walker, node, None, args, kwargs)
    if isinstance(receiver, Thing):
        if receiver.key == "super()":
            method = _above(walker, receiver, name)
            if method is not None:
                return _enter(walker, method, args, kwargs)
            return Thing("unknown", f"super().{name}()", bool(walker.loops))
        if receiver.kind in ("external", "file"):
            return apply(walker, node, attribute(walker, receiver, name, node), args, kwargs)
        if receiver.kind == "grad":
            _read_grad(walker, node, receiver, name)
        if name == "apply" and len(args) == 1 and receiver.kind in ("model", "unknown"):
            if receiver.kind == "model" or isinstance(args[0], Func):
                return by_hand.submodules(walker, node, receiver, args[0])
        home = receiver.attrs.get("__class__")
        if name in receiver.attrs:
            return apply(walker, node, receiver.attrs[name], args, kwargs)
        if isinstance(home, Class):
            if _CLIP.search(home.node.name) and _clips(walker, node, receiver, args):
                return None
            method = find_method(walker, home, name)
            if method is not None and not (
                receiver.kind == "optimizer" and _updates(walker, home, method)
            ):
                method.owner = receiver
                result = _enter(walker, method, args, kwargs)
                if receiver.kind == "model" and _may_be_output(result):
                    return effects.forward(walker, node, receiver, tensors([*args, result]), result)
                return result
        if receiver.kind == "leaf" and name not in effects.OF_LEAF:
            return tensor_method(walker, node, effects.leaf(receiver), name, args, kwargs)
        if receiver.kind == "dict" and name in ("values", "items") and _spelled_out(receiver):
            return _entries(walker, receiver, name)
        if name == "item" and is_quotient(receiver):
            return shown(receiver, node, name)
        if receiver.kind == "unknown" and "__len__" in receiver.attrs:
            count = called(receiver, name, args)
            if count is not None:
                whole = Thing("unknown", f"{text(node.func)}()@{node.lineno}", bool(walker.loops),
                              node=node, depth=len(walker.loops))  # fmt: skip
                return sized(whole, count)
        if name in _OF_LIGHTNING and not args:
            return configured(walker, receiver, _OF_LIGHTNING[name])
        handler = effects.METHODS.get(name)
        if handler is not None:
            return handler(walker, node, receiver, args, kwargs)
        if receiver.kind == "optimizer" and name not in effects.OF_OPTIMIZER and walker.loops:
            walker.note("escape", node, receiver)  # a method that we do not see
        if receiver.kind == "unknown" and name not in effects.OF_OPTIMIZER and walker.loops:
            receiver.attrs["__unseen__"] = True
        if receiver.kind == "model" and name not in effects.PLAIN:
            return effects.forward(walker, node, receiver, tensors([*args, *kwargs.values()]))
    return unknown_call(walker, node, receiver, args, kwargs)


def _spelled_out(mapping: Thing) -> bool:
    """Whether a dict was written with all its keys; an empty one may have been filled since."""
    keys = getattr(mapping.node, "keys", [])
    return bool(keys) and None not in keys


def _entries(walker: Walker, mapping: Thing, name: str) -> Seq:
    pairs = [(key, value) for key, value in mapping.attrs.items() if key[:2] != "__"]
    if name == "values":
        return Seq([value for _, value in pairs], len(walker.loops))
    return Seq([Seq([key, value]) for key, value in pairs], len(walker.loops))


def _may_be_output(result: Value) -> bool:
    """Whether what a method of a model returns may come of its parameters."""
    return isinstance(result, Thing) and result.kind not in ("optimizer", "scheduler", "scaler")


_UPDATES = frozenset({"step", "zero_grad", "backward"})


def _above(walker: Walker, receiver: Thing, name: str) -> Func | None:
    """The method that `super()` means, where we have the class."""
    home = receiver.attrs.get("__home__")
    for base in home.node.bases if isinstance(home, Class) else ():
        value = evaluate(walker, home.env, base)  # type: ignore[union-attr]
        if isinstance(value, Class) and value is not home:
            method = find_method(walker, value, name)
            if method is not None:
                method.owner = receiver.args[0]
                return method
    return None


def _updates(walker: Walker, home: Class, method: Func) -> bool:
    """Whether a method of an own optimizer is its update: it leaves the rest to its caller."""
    if getattr(method.node, "name", "") not in ("step", "zero_grad"):
        return False
    known = method.node.__dict__.get("_updates")
    if known is None:
        known = method.node.__dict__["_updates"] = not _delegates(walker, home, method, 0)
    return bool(known)


def _delegates(walker: Walker, home: Class, method: Func, depth: int) -> bool:
    """Whether a method has others step or clear, itself or through methods of its own object."""
    for node in ast.walk(method.node):
        if not isinstance(node, ast.Attribute):
            continue
        if node.attr in _UPDATES:
            return True
        if depth < 3 and isinstance(node.value, ast.Name) and node.value.id == "self":
            inner = find_method(walker, home, node.attr)
            if inner is not None and inner.node is not method.node:
                if _delegates(walker, home, inner, depth + 1):
                    return True
    return False


def _read_grad(walker: Walker, node: ast.Call, grad: Thing, name: str) -> None:
    if name in ("square", "pow"):
        walker.note("square", node, grad)
    if walker.loops and not walker.inside("filter"):
        walker.note("grad_read", node, grad, None, *asked(walker, node))


def _enter(walker: Walker, func: Func, args: list[Value], kwargs: dict[str, Value]) -> Value:
    walker.budget -= 1
    return walker.function(func, args, kwargs)


def apply(
    walker: Walker, node: ast.Call, target: Value, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """Call `target`."""
    if isinstance(target, Func):
        return _enter(walker, target, args, kwargs)
    if isinstance(target, Class):
        return instantiate(walker, node, target, args, kwargs)
    if isinstance(target, Tensor):
        return effects.forward(walker, node, effects.alias(walker, target),
                               tensors([*args, *kwargs.values()]))  # fmt: skip
    if isinstance(target, Thing):
        if target.kind == "external":
            return library.external_call(walker, node, target.key, args, kwargs)
        home = target.attrs.get("__class__")
        if isinstance(home, Class) and target.kind != "model":
            method = find_method(walker, home, "__call__")
            if method is not None:
                method.owner = target
                return _enter(walker, method, args, kwargs)
        name = target.key.rpartition(".")[2]
        if target.kind == "unknown" and name in effects.METHODS and len(target.args) == 1:
            owner = target.args[0]  # a method that was taken before it was called
            if isinstance(owner, Thing) and target.key == f"{owner.key}.{name}":
                return effects.METHODS[name](walker, node, owner, args, kwargs)
        if target.kind == "context" and len(args) == 1 and isinstance(args[0], Func):
            return replace(args[0], within=target.key)  # a context used as a decorator
        if target.kind == "scheduler":
            walker.note("step", node, target)
            return None
        if target.kind == "model":
            made = effects.forward(walker, node, target, tensors([*args, *kwargs.values()]))
            inside = isinstance(home, Class) and divides(walker, home)
            return made.but(divisors=(Divisor(INSIDE, None),)) if inside else made
        if target.kind == "loss_fn":
            parts = tensors([*args, *kwargs.values()])
            if not parts:
                return _opaque(walker, node, args)
            made = merged(parts, node)
            flags = made.flags | {"sum"} if "sum" in target.uses else made.flags - {"sum"}
            flags |= target.uses & {"mean"}
            if "class_weights" in target.uses and "sum" not in target.uses:
                flags |= {"class_weights"}
            return made.but(divisors=(), partial=(), flags=flags)
        values = [*args, *kwargs.values()]
        made = target.kind == "unknown" and isinstance(target.node, ast.Call)
        given = args[0] if args else None
        wraps = isinstance(given, Thing) and given.kind in library.ITERABLES
        if made and not wraps and isinstance(node.func, ast.Attribute) and walker.loops:
            escapes(walker, node, values)
            return effects.forward(walker, node, target, tensors(values))
    return unknown_call(walker, node, target, args, kwargs)


def instantiate(
    walker: Walker, node: ast.AST, home: Class, args: list[Value], kwargs: dict[str, Value]
) -> Thing:
    """A new object of a class whose source we have."""
    kind = base_kind(walker, home)
    made = Thing(kind, home.node.name, node=node, depth=len(walker.loops), args=tuple(args),
                 kwargs=dict(kwargs))  # fmt: skip
    made.attrs["__class__"] = home
    walker.trace.made_in[id(node)] = walker.paths[-1]
    made.models = models_of([*args, *kwargs.values()])
    method = find_method(walker, home, "__init__")
    if method is not None:
        method.owner = made
        walker.function(method, args, kwargs)
    return made


def _list_method(
    walker: Walker, node: ast.Call, receiver: Seq, name: str, args: list[Value]
) -> Value:
    if name in ("append", "add") and args:
        if isinstance(args[0], Tensor) and len(walker.loops) > receiver.depth:
            walker.note("store", node, Thing("list", "list", depth=receiver.depth), args[0], "kept")
        if len(receiver.items) < 64:
            receiver.items.append(args[0])
    elif name in ("extend", "__iadd__") and args:
        other = args[0]
        if isinstance(other, Seq) and len(receiver.items) < 64:
            receiver.items.extend(other.items[:64])
        elif isinstance(other, Thing):
            receiver.items.append(other)
        receiver.open = True
    elif name == "clear":
        receiver.items.clear()
    elif name == "pop" and receiver.items:
        return receiver.items.pop()
    return Thing("unknown", f"list.{name}()", True)


def tensors(values: list[Value]) -> list[Tensor]:
    """The tensors among values, in lists and dicts as well."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Seq):
            found.extend(tensors(value.items[:16]))
        elif isinstance(value, Thing):
            if value.kind == "leaf":
                found.append(effects.leaf(value))
            elif value.kind == "dict":
                found.extend(tensors(list(value.attrs.values())))
    return found


def _drive(walker: Walker, values: list[Value]) -> None:
    """Ignite's `Engine(update)` calls `update` once a micro-batch: walk it so."""
    for value in values:
        if not isinstance(value, Func) or isinstance(value.node, ast.Lambda):
            continue
        found = walker.module_slice(value.module)
        words = found.functions.get(value.node.name, frozenset())
        if "backward" not in words or value.node.name in found.looped or walker.loops:
            continue
        if _handled(value.module.tree):
            continue  # what handlers do between the calls is not walked
        frame = Frame(value.node, walker.tick())
        before = walker.driver
        walker.loops.append(frame)
        walker.driver = frame
        try:
            length = int(walker.known.get("length", LENGTH))
            for index in range(length):
                frame.turn(index + 1, index == length - 1)
                walker.function(value, [], {})
        finally:
            walker.loops.pop()
            walker.driver = before


def _handled(tree: ast.Module) -> bool:
    """Whether a function that an engine calls by itself clears or steps."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        told = any(isinstance(item, ast.Call) and getattr(item.func, "attr", "") == "on"
                   for item in node.decorator_list)  # fmt: skip
        if told and any(isinstance(part, ast.Attribute) and part.attr in ("zero_grad", "step")
                        for part in ast.walk(node)):  # fmt: skip
            return True
    return any(
        isinstance(node, ast.Attribute) and node.attr == "add_event_handler"
        for node in ast.walk(tree)
    ) and any(isinstance(node, ast.Lambda) for node in ast.walk(tree))


_CLIP = re.compile(r"clip\w*grad|grad\w*clip", re.IGNORECASE)
_SCALES = re.compile(
    r"(mul|scale|div|average|reduce|sync)\w*grad|grad\w*(mul|scale|average|reduce)"
)


def _clips(walker: Walker, node: ast.Call, target: Value, values: list[Value]) -> bool:
    """Note what a helper does to the gradients of what it is given, where its name says so."""
    func = node.func
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    if isinstance(target, Thing) and target.kind in ("instance", "optimizer", "unknown"):
        if _SCALES.search(name) and target.kind == "optimizer":
            walker.note("grad_scale", node, target)
            return False
        if name == "step" or isinstance(func, ast.Name):
            name = f"{name} {target.key.split('@')[0]}"
    owner = next((value for value in values if isinstance(value, Thing)
                  and value.kind in ("params", "model", "optimizer")), None)  # fmt: skip
    if owner is not None and owner.kind != "model" and _SCALES.search(name):
        walker.note("grad_scale", node, owner)
    if owner is None or not _CLIP.search(name):
        return False
    effects.clip(walker, node, owner, None)
    return True


def unknown_call(
    walker: Walker, node: ast.Call, target: Value, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """A call of something whose source we do not have."""
    values = [*args, *kwargs.values()]
    if node.func is not None and text(node.func).split(".")[-1] == "Engine":
        _drive(walker, values)
    if _clips(walker, node, target, values):
        return Thing("unknown", f"clip@{node.lineno}", True)
    escapes(walker, node, values)
    if args and isinstance(args[0], Thing) and args[0].kind in library.ITERABLES:
        return Thing("wrapped", text(node.func), args=(args[0],))
    parts = tensors(values)
    callers = models_of([value for value in values if isinstance(value, Thing)])
    if not isinstance(node.func, ast.Attribute) and isinstance(target, Thing):
        if target.kind == "unknown" and (walker.loops or parts):
            return effects.forward(walker, node, target, parts)
    if not parts and callers and any(_are_parameters(value) for value in values):
        return Thing("unknown", f"{text(node.func)}()@{node.lineno}", node=node, models=callers,
                     depth=len(walker.loops), args=tuple(args))  # fmt: skip
    if parts or callers:
        made = merged(parts, node) if parts else Tensor(made=node)
        flags = made.flags - {"detached", "item", "sum"}
        forwards = made.forwards or frozenset((walker.tick(),))
        quiet = walker.quiet()
        return made.but(models=made.models | callers, graph=not quiet, forwards=forwards,
                       flags=flags | ({"blind"} if quiet else set()))  # fmt: skip
    return _opaque(walker, node, values)


def _are_parameters(value: Value) -> bool:
    """Whether a value is what only an optimizer is made of."""
    return isinstance(value, Thing) and value.kind == "params"


_SETTLED = re.compile(
    r"(is|has|use)_(\w+_)?(available|installed|enabled|initialized|distributed|process|master|main)"
    r"|get_(local_)?rank|get_world_size"
)
"""Questions about the machine: their answer is the same in every iteration."""


def _opaque(walker: Walker, node: ast.Call, args: list[Value]) -> Thing:
    where = f"{text(node.func)}()@{node.lineno}"
    name = text(node.func)
    settled = not args and _SETTLED.fullmatch(name.split(".")[-1]) is not None
    if settled:
        where = f"{name}()"
    changes = bool(walker.loops) and not settled
    made = Thing("unknown", where, changes, node=node, depth=len(walker.loops))
    made.args = tuple(args)
    if any(isinstance(value, Thing) and value.kind == "optimizer" for value in args):
        made.uses.add("from_optimizer")
    return made
