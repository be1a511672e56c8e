"""Lines of the source that keep what a pass computed, with its graph, beyond the pass."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradaccum.doctor.checks.origin import flows, unrecorded
from gradaccum.doctor.checks.patterns import receiver
from gradaccum.doctor.checks.source import calls, function_of, loop_of, statement, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = ["carried_over", "kept_by_hook", "kept_in_loop", "kept_on_self", "made_outside"]

_ADDS = ("append", "extend", "add", "put", "appendleft", "insert", "push", "enqueue")
_JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "append")
_LETS_GO = {
    "item", "detach", "detach_", "float", "numpy", "tolist", "int", "str", "format", "data",
    "print", "argmax", "argmin", "argsort", "topk", "round", "len", "shape", "size", "bool", "eq",
    "ne", "gt", "lt", "ge", "le", "long", "dim", "numel", "deepcopy", "no_grad", "get_lr", "isnan",
}  # fmt: skip
"""What gives numbers, or tensors without a graph."""
_PLAIN = {"range", "enumerate", "zip", "next", "iter", "time", "perf_counter", "randn", "rand"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _name(node: ast.AST | None) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _holds(node: ast.AST, live: set[str]) -> bool:
    """Whether an expression keeps the graph of one of some names, or of a call made in it."""
    if isinstance(node, ast.Call | ast.Attribute):
        if _name(node.func if isinstance(node, ast.Call) else node) in _LETS_GO:
            return False
    if isinstance(node, ast.JoinedStr | ast.Compare | ast.Constant | ast.Lambda):
        return False
    if isinstance(node, ast.Name):
        return node.id in live
    return any(_holds(child, live) for child in ast.iter_child_nodes(node))


def _live(body: list[ast.AST], given: set[str]) -> set[str]:
    """Names of a body that what its calls compute may stand in, with a graph."""
    live = set(given)
    for _ in range(4):
        before = len(live)
        for node in body:
            if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                continue
            value = node.value
            if value is None or not (_holds(value, live) or _computes(value)):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                live |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
        if len(live) == before:
            break
    return live


def _computes(value: ast.AST) -> bool:
    """Whether a value is what a call gives that may have a graph."""
    return (
        isinstance(value, ast.Call)
        and _name(value.func) not in _LETS_GO | _PLAIN
        and not any(_name(one) in _LETS_GO for one in ast.walk(value.func))
    )


def _base(node: ast.AST) -> str:
    """What an element or an attribute is of, as it is written: `log` of `log["loss"]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return ast.unparse(node)


def _renewed(body: list[ast.AST], base: str) -> bool:
    """Whether a body gives something a value that is not made of it: then nothing is kept."""
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if ast.unparse(one) == base and isinstance(node, ast.Assign):
                    if not any(
                        isinstance(part, ast.expr) and ast.unparse(part) == base
                        for part in ast.walk(node.value)
                    ):
                        return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            frees = node.func.attr in ("clear", "pop", "popleft", "reset")
            if frees and ast.unparse(node.func.value) == base:
                return True
        if isinstance(node, ast.Delete) and any(_base(one) == base for one in node.targets):
            return True
    return False


def _keeping(node: ast.AST, live: set[str]) -> str:
    """What a statement or a call keeps something live in, as it is written; empty if in nothing."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _ADDS and any(_holds(one, live) for one in node.args):
            return _base(node.func.value)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return _base(node.target) if _holds(node.value, live) else ""
    if not isinstance(node, ast.Assign):
        return ""
    for target in node.targets:
        whole = ast.unparse(target)
        if isinstance(target, ast.Subscript) and _holds(node.value, live):
            return _base(target)
        again = [
            one
            for one in ast.walk(node.value)
            if isinstance(one, ast.Name | ast.Attribute | ast.Subscript)
            and ast.unparse(one) == whole
        ]
        sums = isinstance(node.value, ast.BinOp) or _name(getattr(node.value, "func", None)) in (
            *_JOINS,
            "lerp",
        )
        if again and sums and _holds(node.value, live - {whole}):
            return whole
    return ""


def _handed(path: str, node: ast.AST, live: set[str]) -> str:
    """The function of the file that a call hands something live to, which keeps it."""
    if not isinstance(node, ast.Call) or not (node.args or node.keywords):
        return ""
    at = [i for i, one in enumerate(node.args) if _holds(one, live) or _computes(one)]
    name, tree = _name(node.func), tree_of(path)
    for one in ast.walk(tree) if tree is not None and at else ():
        if not isinstance(one, ast.FunctionDef) or one.name != name or name in ("forward", ""):
            continue
        method = bool(one.args.args) and one.args.args[0].arg == "self"
        given = one.args.args[1:] if method else one.args.args
        names = {given[i].arg for i in at if i < len(given)}
        body = _inner(one)
        for part in body:
            base = _keeping(part, names)
            root = base.split(".")[0].split("[")[0]
            outer = root == "self" or root not in {
                _name(t) for n in body if isinstance(n, ast.Assign) for t in n.targets
            }
            if base and outer and base not in names and not _renewed(body, base):
                return ast.unparse(node.func)
    return ""


def kept_by_hook(path: str) -> Place | None:
    """The line of a file where a lambda, or a function within one, keeps what it is given."""
    tree = tree_of(path)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Lambda):
            body = list(ast.walk(node.body))
        elif isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args][:1] != ["self"]:
            body = _inner(node)
        else:
            continue
        if len(node.args.args) != 3:
            continue  # module, inputs, output
        live = {one.arg for one in node.args.args[1:]}
        for one in body:
            base = _keeping(one, live)
            if base and base not in live and not _renewed(body, base):
                line = getattr(one, "lineno", 0)
                return Place(path, line, function_of(path, one))
    return None


def _inner(loop: ast.AST) -> list[ast.AST]:
    """All of a loop's body, without functions that are defined in it, in the order of lines."""
    todo: list[ast.AST] = [*getattr(loop, "body", ())]
    found: list[ast.AST] = []
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, _SCOPES):
            todo.extend(ast.iter_child_nodes(node))
    return sorted(found, key=lambda one: getattr(one, "lineno", 0))


def _around(place: Place, depth: int = 2) -> Iterator[Place]:
    """A line, and the lines that call its function."""
    yield place
    if depth and place.function not in ("<module>", "<lambda>"):
        for call in calls(place.path, place.function):
            if call.line != place.line:
                yield from _around(call, depth - 1)


def kept_in_loop(place: Place | None) -> Place | None:
    """The line of the loop around a pass, or around a call of its function, that keeps its graph.

    A line that keeps the loss itself comes before one that keeps something else.
    """
    if place is None:
        return None
    for at in list(_around(place))[:12]:
        loop = loop_of(at)
        if loop is None:
            continue
        body = _inner(loop)
        loss = receiver(statement(at))
        live = _live(body, flows(statement(at)) if loss else set())
        for names in ({loss}, live) if loss else (live,):
            for node in body:
                base = _keeping(node, names) or _handed(at.path, node, names)
                line = Place(at.path, getattr(node, "lineno", 0), at.function)
                if base and base != loss and not _renewed(body, base):
                    if not unrecorded(line):
                        return line
    return None


def kept_on_self(path: str) -> Place | None:
    """The line of a method of a file's classes that keeps on `self` what it has computed."""
    tree = tree_of(path)
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.FunctionDef) or not node.args.args or node.name == "__init__":
            continue
        own = node.args.args[0].arg
        if own != "self":
            continue
        body = _inner(node)
        live = _live(body, {one.arg for one in (*node.args.args[1:], *node.args.kwonlyargs)})
        for one in body:
            base = _keeping(one, live)
            line = Place(path, getattr(one, "lineno", 0), function_of(path, one))
            if base.startswith("self.") and not _renewed(body, base) and not unrecorded(line):
                return line
    return None


def _carries(body: list[ast.AST], only_self: bool) -> int:
    """The line of a body on which a value is made of its own last one, by a call; 0 if on none."""
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call | ast.BinOp):
            continue
        for target in node.targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                whole = ast.unparse(one)
                if not isinstance(one, ast.Name | ast.Attribute):
                    continue
                if only_self and not whole.startswith("self."):
                    continue
                if _holds_it(node.value, whole) and not _renewed(body, whole):
                    return node.lineno
    return 0


def _holds_it(value: ast.AST, whole: str) -> bool:
    """Whether a value is made of something that is written as given, and not let go of."""
    if isinstance(value, ast.Call) and _name(value.func) in _LETS_GO:
        return False
    if isinstance(value, ast.Name | ast.Attribute) and ast.unparse(value) == whole:
        return True
    if isinstance(value, ast.Attribute) and value.attr in _LETS_GO:
        return False
    return any(_holds_it(child, whole) for child in ast.iter_child_nodes(value))


def carried_over(place: Place | None) -> Place | None:
    """The line that hands a pass's state to the next with its graph: `out, h = rnn(x, h)`."""
    tree = None if place is None else tree_of(place.path)
    if place is None or tree is None:
        return None
    for at in list(_around(place))[:12]:
        loop = loop_of(at)
        line = _carries(_inner(loop), False) if loop is not None else 0
        if line:
            return Place(at.path, line, at.function)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            line = _carries(_inner(node), True)
            if line:
                return Place(place.path, line, node.name)
    return None


def made_outside(place: Place | None) -> Place | None:
    """The line before a loop that computes, by a call, what the loss of each pass is made of."""
    tree = None if place is None else tree_of(place.path)
    loop = loop_of(place)
    if place is None or tree is None or loop is None:
        return None
    body = _inner(loop)
    names = flows(statement(place))
    inside: set[str] = {
        one.id for one in ast.walk(loop) if isinstance(one, ast.Name) and _stored(one)
    }
    for _ in range(_DEEP):
        for node in body:
            if isinstance(node, ast.Assign) and any(_name(t) in names for t in node.targets):
                names |= flows(node.value)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or getattr(loop, "lineno", 0) <= node.lineno:
            continue
        if function_of(place.path, node) != place.function or not _computes(node.value):
            continue
        kind = _name(getattr(node.value, "func", None))
        given = node.targets[0]
        if isinstance(given, ast.Name) and given.id in names - inside and not kind[:1].isupper():
            if not unrecorded(Place(place.path, node.lineno, "")) and _has_graph(tree, node.value):
                return Place(place.path, node.lineno, place.function)
    return None


_DEEP = 4


def _stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _has_graph(tree: ast.Module, value: ast.AST) -> bool:
    """Whether an expression calls what a file makes of a class, `nn.Linear`, or a parameter."""
    modules = {
        one.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.Tuple)
        for part in [node.value, *getattr(node.value, "elts", ())]
        if isinstance(part, ast.Call) and _name(part.func)[:1].isupper()
        for target in node.targets
        for one in ast.walk(target)
        if isinstance(one, ast.Name)
    }
    return any(isinstance(one, ast.Name) and one.id in modules for one in ast.walk(value))
