"""Calls of code that we were not given, which may do anything to what they are handed."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from gradaccum.lint.files.program import Module, Program
from gradaccum.lint.files.rows import HEADERS, NESTS, WORDS, Row

__all__ = ["UNSEEN", "is_known_library", "mark_unseen"]

UNSEEN = "unseen()"
"""The word of a statement that hands a model or an optimizer to such a call."""
_OWN = frozenset({"parameters", "named_parameters", "step", "zero_grad", "param_groups"})
"""What only a model or an optimizer is asked for."""
_LIBRARIES = frozenset(
    {
        "torch", "numpy", "math", "os", "sys", "json", "time", "copy", "random", "logging",
        "warnings", "tqdm", "torchvision", "torchaudio", "functools", "itertools", "operator",
        "collections", "contextlib", "pickle", "shutil", "pathlib", "matplotlib", "wandb",
        "tensorboardX", "mlflow", "torchsummary", "torchinfo",
    }
)  # fmt: skip
"""Libraries of which we know that they leave gradients alone, or in which functions they do not."""
_BUILTINS = frozenset(dir(builtins))
_KNOWN = frozenset(
    {
        "add_param_group", "append", "apply", "cpu", "cuda", "double", "extend", "float", "format",
        "get", "half", "items", "keys", "load_state_dict", "log", "named_modules", "modules",
        "children", "insert", "parameters", "named_parameters", "state_dict", "to", "train", "eval",
        "update", "values", "register_buffer", "save", "share_memory", "compile",
    }
)  # fmt: skip


def is_known_library(dotted: str) -> bool:
    """Whether an imported name is of a library that does not touch gradients behind our back."""
    return dotted.split(".")[0] in _LIBRARIES


def mark_unseen(rows: list[Row], module: Module, program: Program | None) -> frozenset[str]:
    """Give statements that hand an owner to unseen code its word; returns the owners' names."""
    owners: set[str] = set()
    for row in rows:
        if row.names & _OWN:
            owners |= {
                name
                for head in _heads(row)
                for node in ast.walk(head)
                if isinstance(node, ast.Attribute) and node.attr in _OWN
                for name in [_last(node.value)]
                if name
            }
    owners -= {"self", "cls"}
    if owners:
        _hand_on(rows, owners)
    defined = {row.node.name for row in rows if isinstance(row.node, NESTS)}
    for row in rows if owners else ():
        if row.names & owners and not isinstance(row.node, NESTS):
            calls = (node for head in _heads(row) for node in ast.walk(head)
                     if isinstance(node, ast.Call))  # fmt: skip
            if any(
                (_hands(node, owners) or _is_method(node, owners))
                and _is_unseen(node.func, module, program, defined)
                for node in calls
            ):
                row.words |= {UNSEEN}
    return frozenset(owners)


def _hand_on(rows: list[Row], owners: set[str]) -> None:
    """Add the parameters by which functions of this file are handed an owner."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if isinstance(row.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own = [arg.arg for arg in row.node.args.args]
            names[row.node.name] = own[1:] if row.method else own
    for _ in range(2):
        before = len(owners)
        for row in rows:
            if row.calls.isdisjoint(names) or row.names.isdisjoint(owners):
                continue
            for head in _heads(row):
                for node in ast.walk(head):
                    if isinstance(node, ast.Call) and _last(node.func) in names:
                        pairs = zip(names[_last(node.func)], node.args, strict=False)
                        owners |= {name for name, part in pairs if _last(part) in owners}
        if len(owners) == before:
            break


def _heads(row: Row) -> Iterator[ast.AST]:
    fields = HEADERS.get(type(row.node))
    if isinstance(row.node, NESTS):
        return
    if fields is None:
        yield row.node
        return
    for name in fields:
        value = getattr(row.node, name)
        yield from value if isinstance(value, list) else [value]


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return ""


def _hands(node: ast.Call, owners: set[str]) -> bool:
    """Whether a call is given an owner itself, its parameters, or a list of them."""
    stack: list[ast.expr] = [*node.args, *(part.value for part in node.keywords)]
    while stack:
        part = stack.pop()
        if isinstance(part, ast.Starred):
            part = part.value
        if isinstance(part, (ast.List, ast.Tuple)):
            stack.extend(part.elts)
        elif isinstance(part, ast.Call):
            func = part.func
            if isinstance(func, ast.Attribute) and func.attr in ("parameters", "named_parameters"):
                return True
            if isinstance(func, ast.Name) and func.id in ("list", "tuple", "iter"):
                stack.extend(part.args)
        elif _last(part) in owners:
            return True
    return False


def _is_method(node: ast.Call, owners: set[str]) -> bool:
    func = node.func
    return isinstance(func, ast.Attribute) and _last(func.value) in owners


def _is_unseen(func: ast.expr, module: Module, program: Program | None, defined: set[str]) -> bool:
    if isinstance(func, ast.Name):
        if func.id in defined or func.id in _BUILTINS:
            return False
        dotted = module.imports.get(func.id)
        return dotted is None or _not_given(dotted, module, program)
    if not isinstance(func, ast.Attribute):
        return isinstance(func, ast.Call)
    root = func.value
    while isinstance(root, ast.Attribute):
        root = root.value
    if isinstance(root, ast.Name) and root.id in module.imports:
        return _not_given(module.imports[root.id], module, program)
    return func.attr not in defined and func.attr not in _KNOWN and func.attr not in WORDS


def _not_given(dotted: str, module: Module, program: Program | None) -> bool:
    if is_known_library(dotted):
        return False
    return program is None or program.resolve(dotted, module.path) is None
