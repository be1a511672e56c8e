"""What the source says around a line that the trace names; for questions that a run leaves open."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from gradaccum.doctor.trace.model import Place

__all__ = [
    "above_of",
    "calls",
    "forwarded",
    "function_of",
    "gate",
    "gate_counts",
    "gate_divides",
    "gated",
    "in_loop_of",
    "loop_of",
    "microbatches",
    "overwrites",
    "parents",
    "reads_gradient",
    "same_loop",
    "statement",
    "tree_of",
    "unbracketed",
]

_MOST = 2_000_000
_DRAWS = ("get_batch", "next_batch", "sample_batch", "load_batch", "fetch", "next_data")
"""What functions that draw a batch are called."""
_SAID = ("micro", "accum")
"""What is in the names of loops over micro-batches: `for micro in range(accumulation_steps)`."""
_LOOPS = (ast.For, ast.While, ast.AsyncFor)


def tree_of(path: str) -> ast.Module | None:
    """A file's tree; `None` where it cannot be read."""
    try:
        about = Path(path).stat()
    except (OSError, ValueError):
        return None
    return None if about.st_size > _MOST else _parsed(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=64)
def _parsed(path: str, changed: int, size: int) -> ast.Module | None:
    """A file's tree; a file that has changed since is another."""
    del changed, size
    try:
        return ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=64)
def _parents_of(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def parents(path: str) -> dict[ast.AST, ast.AST]:
    """What each node of a file stands in."""
    tree = tree_of(path)
    return {} if tree is None else _parents_of(tree)


def statement(place: Place | None) -> ast.stmt | None:
    """The innermost statement at a line."""
    tree = None if place is None else tree_of(place.path)
    if tree is None or place is None:
        return None
    best: ast.stmt | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= place.line <= (node.end_lineno or 0):
            if best is None or node.lineno >= best.lineno:
                best = node
    return best


def above_of(place: Place | None) -> list[ast.AST]:
    """A line's enclosing statements up to its function, innermost first."""
    node: ast.AST | None = statement(place)
    if node is None or place is None:
        return []
    over, found = parents(place.path), []
    while node is not None:
        found.append(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            break
        node = over.get(node)
    return found


def loop_of(place: Place | None) -> ast.AST | None:
    """The innermost loop around a line; what a `for` goes over is computed outside of it."""
    around = above_of(place)
    if around and isinstance(around[0], ast.For):
        around = around[1:]
    return next((node for node in around if isinstance(node, _LOOPS)), None)


def same_loop(first: Place | None, second: Place | None) -> bool | None:
    """Whether two lines are in one innermost loop; `None` where the source does not tell."""
    if first is None or second is None or first.path != second.path:
        return None
    one, other = loop_of(first), loop_of(second)
    if one is None or other is None:
        return None
    return one is other


def in_loop_of(first: Place | None, second: Place | None) -> bool | None:
    """Whether a line is in the innermost loop around another, or in a loop within it.

    `None` where the source does not tell, as of lines of two functions.
    """
    if first is None or second is None or first.function != second.function:
        return None
    if same_loop(first, second) is None:
        return None
    return loop_of(second) in above_of(first)


def gated(step: Place | None, backward: Place | None) -> bool | None:
    """Whether the step stands under a condition in the loop that each backward is in.

    That is how micro-batches are told from the several passes of one objective: a loop that always
    steps once per pass has no condition. A step or backward in a helper counts as its calls.
    `None` where the source does not tell.
    """
    if step is None or backward is None or step.path != backward.path:
        return None
    told = None
    for first in _reached(step):
        for second in _reached(backward):
            if first.function == second.function or step == first:
                answer = _gated(first, second)
                if answer:
                    return True
                told = answer if told is None else told
    return told


def _reached(place: Place, depth: int = 2) -> list[Place]:
    """A line, and the lines that call its function."""
    found = [place]
    if depth and place.function not in ("<module>", "<lambda>"):
        for call in calls(place.path, place.function):
            if call.line != place.line:
                found += _reached(call, depth - 1)
    return found[:12]


def calls(path: str, name: str) -> tuple[Place, ...]:
    """Lines of a file that call something of a name."""
    tree = tree_of(path)
    if tree is None:
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called == name:
                found.append(Place(path, node.lineno, function_of(path, node)))
    return tuple(found)


def function_of(path: str, node: ast.AST) -> str:
    """The function that a node stands in."""
    over = parents(path)
    above: ast.AST | None = node
    while above is not None:
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return above.name
        above = over.get(above)
    return "<module>"


def _gated(step: Place, backward: Place) -> bool | None:
    loop = loop_of(backward)
    if loop is None:
        # A method that is called for each micro-batch: the loop is its caller's.
        if step.function == backward.function:
            return any(
                isinstance(node, (ast.If, ast.Match)) for node in above_of(step)
            ) and not any(isinstance(node, (ast.If, ast.Match)) for node in above_of(backward))
        return None
    around = above_of(step)
    if loop not in around:
        return False
    for node in around:
        if node is loop:
            return False
        if isinstance(node, (ast.If, ast.Match)) and node not in above_of(backward):
            return True
    return None


def gate(step: Place | None, backward: Place | None) -> Place | None:
    """The line of the condition in the backwards' loop that a step stands under.

    `None` where there is none, or the source does not tell.
    """
    if step is None or backward is None or step.path != backward.path:
        return None
    for place in _reached(step):
        for micro in _reached(backward):
            around, over = above_of(place), above_of(micro)
            conditions = [node for node in around if isinstance(node, ast.If) and node not in over]
            shared = any(node in around for node in over if isinstance(node, _LOOPS))
            if conditions and shared and place.function == micro.function:
                return Place(place.path, conditions[-1].test.lineno, place.function)
    return None


def gate_counts(step: Place | None) -> bool:
    """Whether the condition that a step stands under is a remainder."""
    if step is None:
        return False
    for place in _reached(step):
        for node in above_of(place):
            if isinstance(node, ast.If):
                return any(
                    isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)
                    for one in ast.walk(node.test)
                )
    return False


def unbracketed(condition: Place | None) -> str:
    """A part `i + 1 % n` of a condition, as it is written; empty if there is none."""
    node = next((n for n in above_of(condition) if isinstance(n, ast.If)), None)
    for one in ast.walk(node.test) if node is not None else ():
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add):
            right = one.right
            if isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mod):
                if isinstance(right.left, ast.Constant) and not isinstance(one.left, ast.Constant):
                    return ast.unparse(one)
    return ""


def gate_divides(step: Place | None, backward: Place | None, number: int | None) -> bool:
    """Whether the source divides by what the condition of a step counts to.

    Args:
        step: the line of the update.
        backward: that of the backward; its file is searched for the division.
        number: what the loss is divided by, which a literal has to be; `None` for a name only.
    """
    tree = None if backward is None else tree_of(backward.path)
    if tree is None or step is None:
        return False
    divisors = {
        _last_name(node.value if isinstance(node, ast.AugAssign) else node.right)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)
    }
    for place in _reached(step):
        for node in above_of(place):
            for one in ast.walk(node.test) if isinstance(node, ast.If) else ():
                if not isinstance(one, ast.BinOp) or not isinstance(one.op, ast.Mod):
                    continue
                if isinstance(one.right, ast.Constant):
                    if number is not None and one.right.value == number:
                        return True
                elif _last_name(one.right) in divisors:
                    return True
    return False


def _last_name(node: ast.AST) -> str:
    """`every` of `every` and of `self.every`; anything else as it is written."""
    return str(getattr(node, "attr", getattr(node, "id", ""))) or ast.dump(node)


def forwarded(inner: Place | None, backward: Place | None) -> Place | None:
    """The call, in a backward's function, of a wrapper's method that hands on its own name.

    `loop.zero_grad()` of a class whose `zero_grad` calls another's: what decides is the call.
    """
    if inner is None or backward is None or inner.function != "zero_grad":
        return None
    lines = [
        call
        for call in calls(inner.path, inner.function)
        if call.line != inner.line and call.function == backward.function
    ]
    return lines[0] if len(lines) == 1 else None


def microbatches(backward: Place | None) -> bool:
    """Whether the loop around a backward says that it takes micro-batches.

    By the names in its head, or by taking its data with `next` or from what draws batches.
    """
    loop = loop_of(backward)
    if isinstance(loop, ast.For) and any(
        word in str(getattr(node, "attr", getattr(node, "id", ""))).lower()
        for head in (loop.target, loop.iter)
        for node in ast.walk(head)
        for word in _SAID
    ):
        return True
    for node in ast.walk(loop) if loop is not None else ():
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "next":
            return True
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.Call) and not isinstance(value.func, ast.Call):
            name = str(getattr(value.func, "attr", getattr(value.func, "id", ""))).lower()
            if any(word in name for word in _DRAWS):
                return True
    return False


def reads_gradient(place: Place | None) -> bool:
    """Whether a `.grad` is read by the statement at a line."""
    node = statement(place)
    return node is not None and any(
        isinstance(one, ast.Attribute) and one.attr == "grad" and isinstance(one.ctx, ast.Load)
        for one in ast.walk(node)
    )


def overwrites(place: Place | None) -> bool:
    """Whether a line sets `.grad` to something in which no `.grad` occurs, unconditionally."""
    node = statement(place)
    if not isinstance(node, ast.Assign) or not any(
        isinstance(target, ast.Attribute) and target.attr == "grad" for target in node.targets
    ):
        return False
    if any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node.value)):
        return False
    loop = loop_of(place)
    return not any(
        isinstance(above, ast.If)
        and any(
            isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(above.test)
        )
        for above in (above_of(place) if loop is not None else [])
    )
