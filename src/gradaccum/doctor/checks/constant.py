"""Summands of a loss that the source says have no graph, and the line where they lost it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from gradaccum.doctor.checks.origin import unrecorded
from gradaccum.doctor.checks.patterns import receiver
from gradaccum.doctor.checks.source import above_of, function_of, statement, tree_of
from gradaccum.doctor.trace.model import Place

__all__ = ["constant_summand"]

_DEEP = 12
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LIBRARIES = {"torch", "F", "nn", "math", "np", "numpy", "functional", "autograd", "linalg"}
_NUMBERS = {"item", "tolist", "numpy", "float"}
_MAKES = {"tensor", "as_tensor", "Tensor", "FloatTensor", "DoubleTensor", "from_numpy"}
_CHOICES = {"argmax", "argmin", "argsort", "round", "sign", "floor", "ceil"}
"""What has no derivative, or none but zero."""
_PURE = {"sum", "max", "min", "abs", "len", "range", "zip", "enumerate", "list", "tuple", "sqrt"}
_WEIGHTS = ("parameters", "named_parameters")


def _name(node: ast.AST | None) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


@dataclass
class _Value:
    """What is known of an expression's value."""

    constant: bool
    """Whether it surely has no graph."""
    cut: ast.AST | None = None
    """Where something that had one lost it."""
    meant: bool = False
    """Whether it was detached by name, and so on purpose."""
    trained: bool = False
    """Whether it is known to be made of parameters: of a model's, or by calling a module."""


_NUMBER = _Value(True)
_LIVE = _Value(False)
_TRAINED = _Value(False, trained=True)


def _all(values: list[_Value]) -> _Value:
    """What is made of several values."""
    cuts = [one.cut for one in values if one.cut is not None]
    return _Value(
        all(one.constant for one in values),
        cuts[0] if cuts else None,
        any(one.meant for one in values),
        any(one.trained for one in values),
    )


def _without(inner: _Value, node: ast.AST, meant: bool = False) -> _Value:
    """What is left of a value by something that takes its graph away."""
    cut = node if inner.trained and not inner.constant else inner.cut
    return _Value(True, cut, meant or inner.meant)


@dataclass
class _Reader:
    """Reads one file's expressions; every name is looked up in its function."""

    path: str
    tree: ast.Module
    seen: set[tuple[int, str]] = field(default_factory=set)

    def value(self, node: ast.AST, scope: ast.AST, given: dict[str, _Value], deep: int) -> _Value:
        """What an expression's value is."""
        if isinstance(node, ast.Constant):
            return _NUMBER
        if deep <= 0:
            return _LIVE
        if isinstance(node, ast.Name):
            return self.named(node, scope, given, deep - 1)
        if isinstance(node, ast.Call):
            return self.called(node, scope, given, deep - 1)
        if isinstance(node, ast.Attribute):
            return self.attribute(node, scope, given, deep - 1)
        if isinstance(node, ast.GeneratorExp | ast.ListComp):
            return self.each(node, scope, given, deep - 1)
        if isinstance(
            node,
            ast.Compare | ast.operator | ast.unaryop | ast.cmpop | ast.expr_context | ast.Slice,
        ):
            return _NUMBER
        if isinstance(
            node,
            ast.BinOp
            | ast.UnaryOp
            | ast.Subscript
            | ast.Tuple
            | ast.List
            | ast.Starred
            | ast.IfExp,
        ):
            parts = list(ast.iter_child_nodes(node))
            return _all([self.value(one, scope, given, deep - 1) for one in parts])
        return _LIVE

    def attribute(
        self, node: ast.Attribute, scope: ast.AST, given: dict[str, _Value], deep: int
    ) -> _Value:
        if node.attr == "data":
            inner = self.value(node.value, scope, given, deep)
            return _without(inner, node)
        if node.attr == "grad":
            return _Value(True, node)
        if node.attr in ("shape", "dtype", "device", "ndim", "pi", "inf"):
            return _NUMBER
        if _name(node.value) in _LIBRARIES:
            return _NUMBER
        return _LIVE

    def each(
        self,
        node: ast.GeneratorExp | ast.ListComp,
        scope: ast.AST,
        given: dict[str, _Value],
        deep: int,
    ) -> _Value:
        inner = dict(given)
        for part in node.generators:
            for one in ast.walk(part.target):
                if isinstance(one, ast.Name):
                    inner[one.id] = self.value(part.iter, scope, given, deep)
        return self.value(node.elt, scope, inner, deep)

    def called(self, node: ast.Call, scope: ast.AST, given: dict[str, _Value], deep: int) -> _Value:
        how = _name(node.func)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if how == "grad" and _name(owner) in ("autograd", "torch", ""):
            asked = [one.value for one in node.keywords if one.arg == "create_graph"]
            off = not asked or getattr(asked[0], "value", None) is False
            return _Value(True, node) if off else _LIVE
        given_to = [*node.args, *(one.value for one in node.keywords)]
        parts = [] if owner is None or _name(owner) in _LIBRARIES else [owner]
        values = [self.value(one, scope, given, deep) for one in (*parts, *given_to)]
        inner = _all(values)
        if how in _NUMBERS and (owner is not None) != (how == "float"):
            return _without(inner, node)
        if how == "float" and owner is not None:
            return inner  # a cast
        if how in ("detach", "detach_"):
            return _without(inner, node, True)
        if how in _CHOICES:
            return _without(inner, node)
        if how in _MAKES:
            return _without(inner, node)
        if how in _WEIGHTS or how in ("requires_grad_", "Parameter"):
            return _TRAINED
        if owner is not None and (_name(owner) in _LIBRARIES or isinstance(owner, ast.expr)):
            if _name(owner) in _LIBRARIES or values[0].constant or values[0].trained:
                return inner
            return _TRAINED if self.is_module(node.func) else _LIVE
        if isinstance(node.func, ast.Name):
            return self.function(node, inner, scope, given, deep)
        return _LIVE

    def function(
        self, node: ast.Call, inner: _Value, scope: ast.AST, given: dict[str, _Value], deep: int
    ) -> _Value:
        """A call of a name: of Python's own, of a loss module, or of a function of the file."""
        name = _name(node.func)
        found = self.returned(node, scope, given, deep)
        if found is not None:
            return self.value(*found, deep)
        if any(isinstance(one, _FUNCTIONS) and one.name == name for one in ast.walk(self.tree)):
            return _LIVE
        made = self.assigned(self.tree, name)
        losses = [v for _, v in made if isinstance(v, ast.Call) and _name(v.func).endswith("Loss")]
        if name in _PURE or (made and len(losses) == len(made)):
            return inner
        return _TRAINED if self.is_module(node.func) else _LIVE

    def returned(
        self, node: ast.Call, scope: ast.AST, given: dict[str, _Value], deep: int
    ) -> tuple[ast.expr, ast.AST, dict[str, _Value]] | None:
        """What a function of the file returns, if by one line, and what it is given here."""
        for one in ast.walk(self.tree):
            if not isinstance(one, _FUNCTIONS) or one.name != _name(node.func):
                continue
            lines = [
                part.value
                for part in ast.walk(one)
                if isinstance(part, ast.Return) and part.value is not None
            ]
            if len(lines) != 1:
                return None
            names = [argument.arg for argument in one.args.args]
            pairs = zip(names, node.args, strict=False)
            mine = {name: self.value(value, scope, given, deep) for name, value in pairs}
            return lines[0], one, mine
        return None

    def is_module(self, called: ast.expr) -> bool:
        """Whether what is called is everywhere made by calling a class, as a module is."""
        name = _name(called)
        pairs: list[tuple[ast.expr, ast.expr]] = []
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += zip(target.elts, node.value.elts, strict=False)
                else:
                    pairs.append((target, node.value))
        made = [value for target, value in pairs if _name(target) == name]
        return bool(made) and all(
            isinstance(one, ast.Call) and _name(one.func)[:1].isupper() for one in made
        )

    def assigned(self, scope: ast.AST, name: str) -> list[tuple[ast.AST, ast.expr]]:
        """What a scope gives a name, functions within it left out."""
        found: list[tuple[ast.AST, ast.expr]] = []
        todo: list[ast.AST] = list(ast.iter_child_nodes(scope))
        while todo:
            node = todo.pop()
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
                continue
            todo.extend(ast.iter_child_nodes(node))
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            elif isinstance(node, ast.For):
                if any(_name(one) == name for one in ast.walk(node.target)):
                    found.append((node, node.iter))
                continue
            value = getattr(node, "value", None)
            for target in targets:
                inner = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                if isinstance(value, ast.expr) and any(_name(one) == name for one in inner):
                    found.append((node, value))
        return found

    def named(self, node: ast.Name, scope: ast.AST, given: dict[str, _Value], deep: int) -> _Value:
        """What all that a name is given makes of it."""
        if node.id in given:
            return given[node.id]
        if node.id in _LIBRARIES:
            return _NUMBER
        key = id(scope), node.id
        if key in self.seen:
            return _NUMBER  # it is made of itself, and of what else is looked at
        self.seen.add(key)
        try:
            values = []
            for where, value in self.assigned(scope, node.id):
                known = self.value(value, scope, given, deep)
                place = Place(self.path, getattr(where, "lineno", 0), "")
                if unrecorded(place) and not known.constant:
                    known = _Value(True, where if self.of_weights(value) else None)
                values.append(known)
            if not values and scope is not self.tree:
                return self.named(node, self.tree, {}, deep)
            return _all(values) if values else _LIVE
        finally:
            self.seen.discard(key)

    def of_weights(self, node: ast.AST) -> bool:
        """Whether something is computed of all parameters of a model."""
        return any(
            isinstance(one, ast.Call) and _name(one.func) in _WEIGHTS for one in ast.walk(node)
        )


_Term = tuple[ast.expr, ast.AST, dict[str, "_Value"]]
"""A summand, the function that it stands in, and what that was given."""


def _summands(reader: _Reader, term: _Term, deep: int) -> list[_Term]:
    """What a sum is of, with what its names are given; factors that are numbers are taken off."""
    node, scope, given = term
    if deep <= 0:
        return [term]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        both = ((node.left, scope, given), (node.right, scope, given))
        return [one for part in both for one in _summands(reader, part, deep - 1)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        left, right = (reader.value(one, scope, given, _DEEP) for one in (node.left, node.right))
        if right.constant and right.cut is None and (left.cut or not left.constant):
            return _summands(reader, (node.left, scope, given), deep - 1)
        if left.constant and left.cut is None and (right.cut or not right.constant):
            return _summands(reader, (node.right, scope, given), deep - 1)
        return [term]
    if isinstance(node, ast.Name):
        return _named(reader, term, deep)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        found = reader.returned(node, scope, given, _DEEP)
        if found is not None and isinstance(found[0], ast.BinOp | ast.Name):
            return _summands(reader, found, deep - 1)
    return [term]


def _named(reader: _Reader, term: _Term, deep: int) -> list[_Term]:
    """The summands of all that a name is given, where that is sums."""
    node, scope, given = term
    name = getattr(node, "id", "")
    made = reader.assigned(scope, name) if name not in given else []
    parts = [value for where, value in made if not isinstance(where, ast.For)]
    sums = any(isinstance(where, ast.AugAssign) for where, _ in made) or any(
        isinstance(part, ast.BinOp) for part in parts
    )
    if parts and sums and len(parts) <= 8:
        found = [
            one
            for part in parts
            if not _is(part, name)
            for one in _summands(reader, (part, scope, given), deep - 1)
        ]
        return found or [term]
    if len(parts) == len(made) == 1:
        called = isinstance(parts[0], ast.Call)
        return _summands(reader, (parts[0], scope, given), deep - 1) if called else [term]
    return [term]


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def constant_summand(backward: Place | None) -> tuple[Place, bool] | None:
    """The line where a summand of a backward's loss lost its graph, though something of it had one.

    Only what is made of nothing else: a factor of a term that has a graph is left alone, and so is
    a summand that is detached as a whole. Also says whether something was detached by that name.
    """
    whole, tree = statement(backward), None if backward is None else tree_of(backward.path)
    if backward is None or tree is None or whole is None:
        return None
    around = above_of(backward)
    scope = around[-1] if around and isinstance(around[-1], _FUNCTIONS) else tree
    reader = _Reader(backward.path, tree)
    for call in ast.walk(whole):
        if not isinstance(call, ast.Call) or _name(call.func) != "backward":
            continue
        loss = getattr(call.func, "value", None)
        if receiver(whole) and call.args and isinstance(call.args[0], ast.Name):
            loss = call.args[0]
        while isinstance(loss, ast.Call) and loss.args and _name(loss.func) == "scale":
            loss = loss.args[0]  # scaler.scale(loss)
        if not isinstance(loss, ast.expr):
            continue
        for one, inner, given in _summands(reader, (loss, scope, {}), 8):
            value = reader.value(one, inner, given, _DEEP)
            line = getattr(value.cut, "lineno", 0)
            whole_term = isinstance(one, ast.Call) and _name(one.func) in ("detach", "detach_")
            if value.constant and line and value.cut is not None and not whole_term:
                if value.meant and not isinstance(one, ast.Call):
                    continue
                place = Place(backward.path, line, function_of(backward.path, value.cut))
                return place, value.meant
    return None
