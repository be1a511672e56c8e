"""Two calls grafted into a function's own code, before and after what it does.

The function stays the object that it was: whatever holds it, compares it, pickles it by its name or
asks for its signature or source sees no difference, and neither do its bound methods. Its code is
compiled once more from the same lines of the same file, with a call at its beginning and one in a
`finally` around the rest. Neither belongs to a line: the frame, its lines and every traceback
through it are what they were, and while the function works no frame of ours is on the stack.

`torch.compile` meets a condition that it knows the answer to, and compiles what it would compile
without us.
"""

from __future__ import annotations

import ast
import inspect
import sys
import tokenize
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["Graft", "graftable", "grafted"]

_MARK = "\0gradaccum"
_FUTURE = 0x1FF0000  # the flags of `from __future__ import ...`
_BEFORE = "if not torch.compiler.is_compiling(): {mark!r}.before({given})"
_HELD = "held = None if torch.compiler.is_compiling() else {mark!r}.before({given})"
_AFTER = "if held is not None: {mark!r}.after(held)"
_made: dict[Any, CodeType | None] = {}
"""What was compiled, for the next to listen."""


class Graft:
    """What is called in a function's frame.

    Args:
        before: is given the function's first argument; returns what `after` gets, or None if the
            end need not be noticed.
        after: is given that when the function returns or raises.
        everything: hand `before` all arguments as one tuple, those behind `*` and `**` each as one.
    """

    __slots__ = ("after", "before", "everything", "original")

    def __init__(
        self,
        before: Callable[..., Any],
        after: Callable[[Any], None] | None = None,
        everything: bool = False,
    ) -> None:
        self.before = before
        self.after = after
        self.everything = everything
        self.original: CodeType | None = None
        """The code without any graft."""


def graftable(function: object) -> FunctionType | None:
    """The function in Python that does the work, below wrappers that know nothing of torch."""
    while "torch" not in getattr(function, "__globals__", {}) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def grafted(function: FunctionType, graft: Graft) -> CodeType | None:
    """The function's code with a graft more; None where its source is not to be had."""
    code = function.__code__
    older = [c for c in reversed(code.co_consts) if isinstance(c, Graft)]
    if older and older[0].original is not None:
        code = older[0].original
    grafts = [*older, graft]
    key = function, code, tuple((one.after is not None, one.everything) for one in grafts)
    if key not in _made:
        _made[key] = _marked(function, code, grafts)
    marked = _made[key]
    if marked is None:
        return None
    graft.original = code
    known = {f"{_MARK}{i}": one for i, one in enumerate(grafts)}
    constants = tuple(known.get(c, c) if isinstance(c, str) else c for c in marked.co_consts)
    return marked.replace(co_consts=constants)


def _marked(function: FunctionType, code: CodeType, grafts: list[Graft]) -> CodeType | None:
    """The code with marks where the grafts will be."""
    try:
        tree, path = _parsed(function, code)
        if _compiled(tree, code, path) != code:
            return None  # the file is no longer what was loaded
        definition = _definition(tree, len(path))
        for i, one in enumerate(grafts):
            _insert(definition, function, one, f"{_MARK}{i}")
        new = _compiled(tree, code, path)
    except (OSError, SyntaxError, ValueError, LookupError, tokenize.TokenError):
        return None
    return new if new.co_freevars == code.co_freevars else None


@lru_cache(maxsize=1)  # several functions of one file, one after the other
def _lines(path: str) -> list[str]:
    with tokenize.open(path) as file:
        return file.readlines()


def _parsed(function: FunctionType, code: CodeType) -> tuple[ast.Module, list[str]]:
    """The function alone, at its place in scopes and lines; and the names that lead to it."""
    block = inspect.getblock(_lines(code.co_filename)[code.co_firstlineno - 1 :])
    indented = block[0][0].isspace()
    path = getattr(code, "co_qualname", code.co_name).split(".")
    free = ", ".join(name for name in code.co_freevars if name != "__class__")
    headers, scopes = [], []
    for scope, inner in pairwise(path):
        if scope != "<locals>":
            scopes.append(scope)
            headers.append(f"def {scope}({free}):" if inner == "<locals>" else f"class {scope}:")
    if indented and not headers:
        scopes = ["_"] if free else []
        headers = [f"def _({free}):"] if free else ["if 1:"]
    outer = "".join(" " * i + header + "\n" for i, header in enumerate(headers))
    tree = ast.parse(f"import _{_imported(function, code)}\n{outer}{''.join(block)}")
    ast.increment_lineno(tree, code.co_firstlineno - 2 - len(headers))
    return tree, [*scopes, code.co_name]


def _imported(function: FunctionType, code: CodeType) -> str:
    """Names that its module has imported: calls of their methods are compiled in another way."""
    known, home = function.__globals__, function.__globals__.get("__name__")
    found = ""
    for name in code.co_names:
        value = known.get(name)
        foreign = isinstance(value, type | FunctionType) and value.__module__ != home
        if foreign or isinstance(value, ModuleType):
            found += f", {name}"
    return found


def _definition(tree: ast.Module, depth: int) -> ast.FunctionDef:
    body: Sequence[ast.stmt] = tree.body
    while True:
        inner = body[-1]
        if not isinstance(inner, ast.FunctionDef | ast.ClassDef | ast.If):
            raise LookupError("no function")
        depth -= not isinstance(inner, ast.If)
        if not depth and isinstance(inner, ast.FunctionDef):
            return inner
        body = inner.body


def _compiled(tree: ast.Module, code: CodeType, path: list[str]) -> CodeType:
    flags = code.co_flags & _FUTURE
    found = compile(tree, code.co_filename, "exec", flags, dont_inherit=True)
    for name in path:
        inner = [c for c in found.co_consts if isinstance(c, CodeType) and c.co_name == name]
        if not inner:
            raise LookupError(name)
        found = inner[-1]
    return found


def _insert(definition: ast.FunctionDef, function: FunctionType, graft: Graft, mark: str) -> None:
    names = {"mark": mark, "given": _given(definition.args, graft.everything)}
    held = f".{mark[1:]}"  # no source can spell it
    kept: list[ast.stmt] = []
    rest = definition.body
    if isinstance(rest[0], ast.Expr) and isinstance(rest[0].value, ast.Constant):
        kept, rest = rest[:1], rest[1:]  # what documents it stays first
    torch = "torch"
    if function.__globals__.get(torch) is not sys.modules[torch]:
        torch = f".torch{held}"
        kept = [*kept, *_nowhere("import torch as held", torch)]
    if graft.after is None:
        definition.body = [*kept, *_nowhere(_BEFORE.format(**names), held, torch), *rest]
        return
    (around,) = _nowhere("try: pass\nfinally: pass", held)
    assert isinstance(around, ast.Try)
    around.body = rest or around.body
    around.finalbody = _nowhere(_AFTER.format(**names), held)
    definition.body = [*kept, *_nowhere(_HELD.format(**names), held, torch), around]


def _given(arguments: ast.arguments, everything: bool) -> str:
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    if not everything:
        if names or arguments.vararg is None:
            return names[0] if names else "None"
        several = arguments.vararg.arg
        return f"{several}[0] if {several} else None"
    stars = [one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return f"({', '.join([*names, *(one.arg for one in arguments.kwonlyargs), *stars])},)"


def _nowhere(source: str, held: str, torch: str = "torch") -> list[ast.stmt]:
    """Statements that belong to no line, their names replaced."""
    body = ast.parse(source).body
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Name):
            node.id = {"held": held, "torch": torch}.get(node.id, node.id)
        elif isinstance(node, ast.alias):
            node.asname = held
        if isinstance(node, ast.stmt | ast.expr | ast.alias):
            node.lineno = node.end_lineno = node.col_offset = node.end_col_offset = -1
    return body
