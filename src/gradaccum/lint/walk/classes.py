"""Classes of the files we were given: their methods, and what their bases make of them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.walk.evaluate import evaluate, key_of
from gradaccum.lint.walk.values import Class, Func

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["base_kind", "counted_by", "divides", "find_method", "ones"]


def find_method(walker: Walker, home: Class, name: str, depth: int = 0) -> Func | None:
    """A method by name, in the class or in the bases we were given."""
    for node in home.node.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            static = any(getattr(item, "id", "") == "staticmethod" for item in node.decorator_list)
            func = Func(node, home.env, home.module, home=home)
            if static:
                func.bound = ()
            return func
    if depth < 8:
        for base in home.node.bases:
            value = evaluate(walker, home.env, base)
            if isinstance(value, Class) and value is not home:
                found = find_method(walker, value, name, depth + 1)
                if found is not None:
                    return found
    return None


def base_kind(walker: Walker, home: Class, depth: int = 0) -> str:
    """What a class is by its bases: model, optimizer, scheduler, or just an instance."""
    if home.node.bases and any(
        isinstance(node, ast.FunctionDef) and node.name == "forward" for node in home.node.body
    ):
        return "model"
    for base in home.node.bases:
        value = evaluate(walker, home.env, base)
        if isinstance(value, Class):
            if depth < 8 and value is not home:
                kind = base_kind(walker, value, depth + 1)
                if kind != "instance":
                    return kind
            continue
        name = key_of(value).split(".")[-1]
        if name.endswith(("Module", "ModelMixin", "PreTrainedModel")):
            return "model"
        if name in ("Optimizer", "SGD", "Adam", "AdamW") or name.endswith("Optimizer"):
            return "optimizer"
        if name == "IterableDataset":
            return "stream"
        if name in ("LRScheduler", "_LRScheduler"):
            return "scheduler"
    return "instance"


def ones(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """The parameters whose default is the number 1."""
    spec = node.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    pairs = [*zip(reversed(names), reversed(spec.defaults), strict=False),
             *zip([arg.arg for arg in spec.kwonlyargs], spec.kw_defaults, strict=True)]  # fmt: skip
    return {
        name
        for name, default in pairs
        if isinstance(default, ast.Constant) and type(default.value) is int and default.value == 1
    }


def counted_by(node: ast.AST) -> set[str]:
    """Names that a function counts by: `i % n`, or `range(n)`."""
    found: set[str] = set()
    for part in ast.walk(node):
        counts: list[ast.expr] = []
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            counts = [part.right]
        elif isinstance(part, ast.Call) and getattr(part.func, "id", "") in ("range", "trange"):
            counts = part.args
        found |= {count.id for count in counts if isinstance(count, ast.Name)}
    return found


def divides(walker: Walker, home: Class) -> bool:
    """Whether the `forward` of a class divides or scales what it returns."""
    method = find_method(walker, home, "forward")
    if method is None:
        return False
    known = method.node.__dict__.get("_divides")
    if known is None:
        known = method.node.__dict__["_divides"] = _returns_share(method.node)
    return bool(known)


def _returns_share(node: ast.AST) -> bool:
    bound: dict[str, list[ast.expr]] = {}
    returned: list[ast.expr] = []
    for part in ast.walk(node):
        if isinstance(part, ast.Return) and part.value is not None:
            returned.append(part.value)
        elif isinstance(part, ast.Assign):
            for target in part.targets:
                if isinstance(target, ast.Name):
                    bound.setdefault(target.id, []).append(part.value)
        elif isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
            whole = ast.BinOp(part.target, part.op, part.value)
            bound.setdefault(part.target.id, []).append(whole)
    seen: set[str] = set()
    while returned:
        value = returned.pop()
        if isinstance(value, (ast.Tuple, ast.List)):
            returned.extend(value.elts)
        elif isinstance(value, ast.Dict):
            returned.extend(value.values)
        elif isinstance(value, ast.IfExp):
            returned.extend((value.body, value.orelse))
        elif isinstance(value, ast.Name) and value.id not in seen:
            seen.add(value.id)
            returned.extend(bound.get(value.id, []))
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr in ("div", "div_", "mul", "mul_", "true_divide"):
                return True
            if value.func.attr in ("mean", "sum", "squeeze", "float"):
                returned.append(value.func.value)
        elif isinstance(value, ast.BinOp):
            if isinstance(value.op, ast.Div) or _is_share(value):
                return True
            returned.extend((value.left, value.right))
    return False


def _is_share(value: ast.BinOp) -> bool:
    """Whether it is a product with something of the object's own, or with a written share."""
    if not isinstance(value.op, ast.Mult):
        return False
    return any(
        isinstance(side, ast.Attribute)
        or (isinstance(side, ast.BinOp) and isinstance(side.op, ast.Div))
        for side in (value.left, value.right)
    )
