"""What a module that is trained does in its own methods: GA309 and GA501."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gradaccum.lint.facts import Facts, tensor_of
from gradaccum.lint.rules.hits import Hit, hit
from gradaccum.lint.walk.evaluate import text
from gradaccum.lint.walk.trace import Event
from gradaccum.lint.walk.values import Class

__all__ = ["GLOBAL", "is_own", "is_parameter"]

_MOVES = frozenset({"to", "cuda", "cpu", "double", "half", "float", "bfloat16", "type"})
_ENDS_GRAPH = frozenset({"detach", "item", "data", "no_grad", "detach_", "inference_mode"})
_STATISTICS = frozenset({"mean", "var", "std", "sum", "norm"})
_NORM = re.compile(r"norm", re.IGNORECASE)


def of_trained(facts: Facts) -> Iterator[Hit]:
    """Faults in the classes of what a backward reaches."""
    homes: dict[int, tuple[Class, Event]] = {}
    for mark in facts.backwards:
        for model in tensor_of(mark).models if mark.loops else ():
            home = model.attrs.get("__class__")
            if isinstance(home, Class):
                homes.setdefault(id(home.node), (home, mark))
    for home, mark in homes.values():
        known = home.node.__dict__.get("_faults")
        if known is None:
            known = home.node.__dict__["_faults"] = [
                *_lost_parameters(home.node), *_kept_statistics(home.node)
            ]  # fmt: skip
        for code, node, message in known:
            place = Event("class", node, home.module.path, ())
            yield hit(code, place, message, (mark, "the backward that trains this module"))


Found = tuple[str, ast.AST, str]


def _lost_parameters(home: ast.ClassDef) -> Iterator[Found]:
    """GA309: a `Parameter` that the module does not keep, or keeps only a copy of."""
    for method in home.body:
        if not isinstance(method, ast.FunctionDef) or method.name not in ("__init__", "forward"):
            continue
        kept = {text(node) for node in ast.walk(method) if isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Load)}  # fmt: skip
        stored = {
            text(node.value)
            for node in ast.walk(method)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
        }
        for node in ast.walk(method):
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target, value = node.targets[0], node.value
            if method.name == "forward" and isinstance(target, ast.Name) and is_parameter(value):
                if target.id in kept and target.id not in stored and not _registers(method):
                    yield ("GA309", node, "a parameter that is made in each forward: no optimizer "
                           "has it, and the next forward makes another")  # fmt: skip
            elif method.name == "__init__" and is_own(target) and _is_moved(value):
                yield ("GA309", node, "what is stored is a copy of the parameter, not the "
                       "parameter: `parameters()` does not find it, so no optimizer steps it; "
                       "convert the tensor inside `nn.Parameter(...)`")  # fmt: skip


def is_parameter(node: ast.expr) -> bool:
    """Whether it makes an `nn.Parameter` that is trained."""
    if not isinstance(node, ast.Call) or text(node.func).split(".")[-1] != "Parameter":
        return False
    return not any(word.arg == "requires_grad" for word in node.keywords)


def _is_moved(node: ast.expr) -> bool:
    """`nn.Parameter(...).to(...)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MOVES
        and is_parameter(node.func.value)
    )


def _registers(method: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("register_parameter", "append")
        for node in ast.walk(method)
    )


def is_own(node: ast.AST) -> bool:
    """Whether it is `self.name`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _kept_statistics(home: ast.ClassDef) -> Iterator[Found]:
    """GA501: running statistics of a layer that hold the graph of every batch before."""
    if not _NORM.search(home.name):
        return
    writes: dict[str, list[ast.Assign]] = {}
    for method in home.body:
        if isinstance(method, ast.FunctionDef) and method.name != "__init__":
            for node in ast.walk(method):
                if isinstance(node, ast.Assign) and is_own(node.targets[0]):
                    writes.setdefault(text(node.targets[0]), []).append(node)
    forward = next((node for node in home.body if isinstance(node, ast.FunctionDef)
                    and node.name == "forward"), None)  # fmt: skip
    if forward is None or _names(forward) & _ENDS_GRAPH:
        return
    measured = {text(node.targets[0]) for node in ast.walk(forward)
                if isinstance(node, ast.Assign) and _measures(node.value)}  # fmt: skip
    measured |= {text(target) for node in ast.walk(forward) if isinstance(node, ast.Assign)
                 and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
                 for target, value in zip(node.targets[0].elts, node.value.elts, strict=False)
                 if _measures(value)}  # fmt: skip
    for name, found in writes.items():
        node = found[0]
        if len(found) != 1 or not isinstance(node.value, ast.BinOp):
            continue
        inner = {text(part) for part in ast.walk(node.value)
                 if isinstance(part, (ast.Name, ast.Attribute))}  # fmt: skip
        if name in inner and inner & measured and any(node is part for part in ast.walk(forward)):
            yield ("GA501", node, "the running value keeps the graph of every batch before it: "
                   "memory and the next backward grow with each iteration")  # fmt: skip


def _measures(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _STATISTICS
    )


def _names(node: ast.AST) -> set[str]:
    return {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node)}


GLOBAL = (of_trained,)
