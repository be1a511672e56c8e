"""How each fault is mended whose mend is certain: a statement moved, added or changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import libcst as cst
from libcst import matchers as m
from libcst.metadata import CodeRange

from gradaccum.records import Finding

__all__ = ["CERTAIN", "Edit", "Place"]


@dataclass(slots=True)
class Edit:
    """Changes of one file, by node."""

    remove: set[cst.CSTNode] = field(default_factory=set)
    replace: dict[cst.CSTNode, cst.CSTNode] = field(default_factory=dict)
    before: dict[cst.CSTNode, list[cst.CSTNode]] = field(default_factory=dict)
    after: dict[cst.CSTNode, list[cst.CSTNode]] = field(default_factory=dict)


@dataclass(slots=True)
class Place:
    """One finding in one parsed file."""

    module: cst.Module
    ranges: Mapping[cst.CSTNode, CodeRange]
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    item: Finding

    def statement(self, line: int) -> cst.SimpleStatementLine | None:
        """The statement that stands alone on a line, or begins there."""
        for node, where in self.ranges.items():
            if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
                if where.start.line <= line <= where.end.line:
                    return node
        return None

    def step(self) -> cst.SimpleStatementLine | None:
        """The statement that steps, among the lines the fault is judged by."""
        for line in (self.item.line, *(other.line for other in self.item.evidence)):
            node = self.statement(line)
            if node is not None and _optimizer(self.module, node):
                return node
        return None

    def home(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The function that a node stands in."""
        while node in self.parents and not isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            node = self.parents[node]
        return node

    def can_leave(self, node: cst.CSTNode) -> bool:
        """Whether a statement may go without leaving an empty block behind."""
        block = self.parents.get(node)
        return isinstance(block, (cst.IndentedBlock, cst.Module)) and len(block.body) > 1


def _call(node: cst.SimpleStatementLine) -> cst.Call | None:
    only = node.body[0]
    return only.value if isinstance(only, cst.Expr) and isinstance(only.value, cst.Call) else None


def _optimizer(module: cst.Module, node: cst.SimpleStatementLine) -> str:
    """The optimizer that a statement steps, as it is spelled."""
    call = _call(node)
    if call is None or not isinstance(call.func, cst.Attribute) or call.func.attr.value != "step":
        return ""
    part = call.args[0].value if call.args else call.func.value
    return module.code_for_node(part)


def _scaler(module: cst.Module, node: cst.SimpleStatementLine) -> str:
    """The scaler through which a statement steps; nothing where there is none."""
    call = _call(node)
    if call is None or len(call.args) != 1 or not isinstance(call.func, cst.Attribute):
        return ""
    return module.code_for_node(call.func.value)


def _made(text: str) -> cst.SimpleStatementLine:
    statement = cst.parse_statement(text)
    assert isinstance(statement, cst.SimpleStatementLine)
    return statement


def _reads_gradients(place: Place) -> bool:
    """Whether the file looks at a gradient anywhere: to clear one earlier may take it away."""
    for node in m.findall(place.module, m.Attribute(attr=m.Name("grad"))):
        if not isinstance(place.parents.get(node), cst.AssignTarget):
            return True
    return False


def _add_zero(place: Place) -> Edit | None:
    step = place.step()
    if step is None or _reads_gradients(place):
        return None
    return Edit(after={step: [_made(f"{_optimizer(place.module, step)}.zero_grad()")]})


def _moved(place: Place, after: bool) -> Edit | None:
    """The statement found, moved beside the step."""
    found, step = place.statement(place.item.line), place.step()
    if found is None or step is None or found is step or _call(found) is None:
        return None
    if place.home(found) is not place.home(step) or not place.can_leave(found):
        return None
    side: dict[cst.CSTNode, list[cst.CSTNode]] = {step: [found]}
    return Edit({found}, after=side) if after else Edit({found}, before=side)


def _zero_after(place: Place) -> Edit | None:
    found = place.statement(place.item.line)
    call = _call(found) if found is not None else None
    if call is None or not m.matches(call.func, m.Attribute(attr=m.Name("zero_grad"))):
        return None
    if _reads_gradients(place):
        return None
    return _moved(place, after=True)


def _before_step(place: Place) -> Edit | None:
    return _moved(place, after=False)


def _clip_before(place: Place) -> Edit | None:
    step = place.step()
    if step is None or _scaler(place.module, step):
        return None  # under a scaler the clip would need an `unscale_` as well
    return _moved(place, after=False)


def _scheduler_after(place: Place) -> Edit | None:
    found = place.statement(place.item.line)
    steps = [place.statement(other.line) for other in place.item.evidence]
    if found is None or not steps or steps[0] is None or steps[0] is found:
        return None
    if place.home(found) is not place.home(steps[0]) or not place.can_leave(found):
        return None
    return Edit({found}, after={steps[0]: [found]})


def _count_from_one(place: Place) -> Edit | None:
    step = place.step()
    node: cst.CSTNode | None = step
    while node is not None and not isinstance(node, cst.If):
        node = place.parents.get(node)
    if node is None:
        return None
    wanted = m.Comparison(
        m.BinaryOperation(left=m.Name(), operator=m.Modulo()),
        [m.ComparisonTarget(m.Equal(), m.Integer("0"))],
    )
    found = m.findall(node.test, wanted)
    if len(found) != 1:
        return None
    modulo = found[0].left  # type: ignore[attr-defined]
    after = cst.BinaryOperation(
        modulo.left, cst.Add(), cst.Integer("1"), lpar=[cst.LeftParen()], rpar=[cst.RightParen()]
    )
    return Edit(replace={modulo: modulo.with_changes(left=after)})


def _unscale(place: Place) -> Edit | None:
    found, step = place.statement(place.item.line), place.step()
    if found is None or step is None or not _scaler(place.module, step):
        return None
    text = f"{_scaler(place.module, step)}.unscale_({_optimizer(place.module, step)})"
    added = _made(text).with_changes(leading_lines=found.leading_lines)
    return Edit(before={found: [added]}, replace={found: found.with_changes(leading_lines=[])})


def _update(place: Place) -> Edit | None:
    step = place.statement(place.item.line)
    if step is None or not _scaler(place.module, step):
        return None
    return Edit(after={step: [_made(f"{_scaler(place.module, step)}.update()")]})


def _list(place: Place) -> Edit | None:
    found = place.statement(place.item.line)
    names = m.findall(found, m.Call(args=[m.Arg(m.Name()), m.ZeroOrMore()])) if found else []
    for call in names:
        name = call.args[0].value.value  # type: ignore[attr-defined]
        made = m.findall(
            place.module,
            m.Assign([m.AssignTarget(m.Name(name))], m.Call(m.Name("filter") | m.Name("map"))),
        )
        every = m.findall(place.module, m.AssignTarget(m.Name(name)))
        if len(made) == len(every) == 1:
            value = made[0].value  # type: ignore[attr-defined]
            return Edit(replace={value: cst.Call(cst.Name("list"), [cst.Arg(value)])})
    return None


def _detach(place: Place) -> Edit | None:
    found = place.statement(place.item.line)
    only = found.body[0] if found is not None else None
    value: cst.BaseExpression | None = None
    if isinstance(only, cst.AugAssign):
        value = only.value
    elif isinstance(only, cst.Expr) and m.matches(
        only.value, m.Call(m.Attribute(attr=m.Name("append")), [m.Arg()])
    ):
        value = only.value.args[0].value  # type: ignore[attr-defined]
    if not isinstance(value, (cst.Name, cst.Attribute)):
        return None
    return Edit(replace={value: cst.Call(cst.Attribute(value, cst.Name("detach")))})


def _keep_random(place: Place) -> Edit | None:
    found = place.statement(place.item.line)
    wanted = m.Arg(keyword=m.Name("preserve_rng_state"))
    marks = m.findall(found, wanted) if found is not None else []
    if len(marks) != 1:
        return None
    return Edit(replace={marks[0]: marks[0].with_changes(value=cst.Name("True"))})


CERTAIN: dict[str, Callable[[Place], Edit | None]] = {
    "GA101": _add_zero,
    "GA102": _zero_after,
    "GA103": _zero_after,
    "GA303": _count_from_one,
    "GA305": _scheduler_after,
    "GA401": _before_step,
    "GA402": _unscale,
    "GA403": _before_step,
    "GA404": _update,
    "GA405": _clip_before,
    "GA407": _list,
    "GA501": _detach,
    "GA505": _keep_random,
}
"""Faults with a mend, which says nothing where it is not certain."""
