"""The line to name: the one that is to be changed, where it is not the call that was judged."""

from __future__ import annotations

import ast
from dataclasses import replace

from gradaccum.lint.files.program import Program
from gradaccum.lint.rules.hits import Hit

__all__ = ["placed"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_STEPS = ("GA302", "GA303")
_LOSSES = ("GA202", "GA203")


def placed(one: Hit, program: Program) -> Hit:
    """A hit, at the condition that its step stands under, or at the line that makes its loss.

    Where the source does not say which that is, it stays at the call.
    """
    if one.code not in (*_STEPS, *_LOSSES):
        return one
    module = program.load(one.path)
    above = _above(module.tree, one.line, one.column) if module is not None else []
    node = _gate(above, one) if one.code in _STEPS else _made(above, one.code == "GA202")
    if node is None or node.lineno == one.line:
        return one
    what = "the step" if one.code in _STEPS else "the backward of this loss"
    here = (one.path, one.line, what)
    evidence = tuple(dict.fromkeys((*one.evidence, here)))
    return replace(one, line=node.lineno, column=node.col_offset, evidence=evidence)


def _above(tree: ast.AST, line: int, column: int) -> list[ast.AST]:
    """What a call stands in, outermost first, itself last."""
    found: list[ast.AST] = []
    todo: list[tuple[ast.AST, list[ast.AST]]] = [(tree, [])]
    while todo:
        node, over = todo.pop()
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", None) or line
        if not first <= line <= last:
            continue
        here = [*over, node]
        if first == line and getattr(node, "col_offset", -1) == column:
            if isinstance(node, ast.Call) and (not found or len(here) < len(found)):
                found = here
        todo += [(child, here) for child in ast.iter_child_nodes(node)]
    return found


def _own(above: list[ast.AST]) -> list[ast.AST]:
    """From the innermost function on."""
    starts = [i for i, node in enumerate(above) if isinstance(node, _FUNCTIONS)]
    return above[starts[-1] if starts else 0 :]


def _gate(above: list[ast.AST], one: Hit) -> ast.expr | None:
    """The outermost condition around a step, in its loop, that no backward stands under."""
    lines = [line for path, line, what in one.evidence if path == one.path and "backward" in what]
    lines += [line for _, line, what in one.evidence if "micro-batches" in what]
    looped = False
    for node in _own(above):
        looped = looped or isinstance(node, ast.For | ast.While | ast.AsyncFor)
        if isinstance(node, ast.If) and (looped or not lines):
            last = node.end_lineno or node.lineno
            if not any(node.lineno <= line <= last for line in lines):
                return node.test
    return None


def _made(above: list[ast.AST], divided: bool) -> ast.stmt | None:
    """The nearest statement above a backward, in its function, that divides or makes its loss."""
    call = above[-1] if above else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    loss = call.args[0] if call.args else call.func.value
    if isinstance(loss, ast.Call) and len(loss.args) == 1:
        loss = loss.args[0]  # scaler.scale(loss)
    if not isinstance(loss, ast.Name):
        return None
    found = [
        node
        for node in ast.walk(_own(above)[0])
        if isinstance(node, ast.Assign | ast.AugAssign)
        and node.lineno < call.lineno
        and (_divides(node, loss.id) if divided else _computes(node, loss.id))
    ]
    return max(found, key=lambda node: node.lineno, default=None)


def _divides(node: ast.Assign | ast.AugAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if not any(isinstance(one, ast.Name) and one.id == name for one in targets):
        return False
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Div)
    return any(
        isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div) for one in ast.walk(node.value)
    )


def _computes(node: ast.Assign | ast.AugAssign, name: str) -> bool:
    """Whether it gives a name its value, and does not only scale it."""
    if not isinstance(node, ast.Assign):
        return False
    own = any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node.value))
    return not own and any(isinstance(one, ast.Name) and one.id == name for one in node.targets)
