"""`--fix`: the mends that are certain, made in the syntax tree so that comments stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradaccum.errors import MissingExtraError
from gradaccum.lint.sources import Source
from gradaccum.records import Finding

if TYPE_CHECKING:
    import libcst as cst

__all__ = ["CERTAIN", "mend"]

CERTAIN = frozenset({"GA402", "GA407"})


def mend(source: Source, findings: Sequence[Finding]) -> tuple[bytes, list[Finding]]:
    """The mended text, and the findings that are left for a person.

    Raises:
        MissingExtraError: if libcst is not installed.
    """
    wanted = [item for item in findings if item.code in CERTAIN]
    if not wanted or source.cells:
        return source.data, list(findings)
    try:
        import libcst as cst  # noqa: PLC0415 - an extra, for this only
    except ModuleNotFoundError:
        raise MissingExtraError(
            "fix-missing", "`--fix` and `--diff` need libcst: pip install 'gradaccum[fix]'"
        ) from None
    try:
        wrapper = cst.metadata.MetadataWrapper(cst.parse_module(source.data))
    except (cst.ParserSyntaxError, UnicodeDecodeError):
        return source.data, list(findings)
    places = wrapper.resolve(cst.metadata.PositionProvider)
    plan = _plan(wrapper.module, places, wanted)
    if not plan.before and not plan.lists:
        return source.data, list(findings)
    new = wrapper.module.visit(_writer(plan))
    assert isinstance(new, cst.Module)
    left = [item for item in findings if item not in plan.done]
    return new.bytes, left


class _Plan:
    """What to change, by node."""

    def __init__(self) -> None:
        self.before: dict[cst.CSTNode, str] = {}
        self.lists: set[cst.CSTNode] = set()
        self.done: list[Finding] = []


def _plan(module: cst.Module, places, wanted: Sequence[Finding]) -> _Plan:
    import libcst as cst  # noqa: PLC0415 - an extra, for this only

    plan = _Plan()
    calls: dict[int, list[cst.Call]] = {}
    statements: dict[int, cst.SimpleStatementLine] = {}
    assigned: dict[str, list[cst.Assign]] = {}
    for node, place in places.items():
        if isinstance(node, cst.Call):
            calls.setdefault(place.start.line, []).append(node)
        elif isinstance(node, cst.SimpleStatementLine):
            statements[place.start.line] = node
        elif isinstance(node, cst.Assign) and len(node.targets) == 1:
            target = node.targets[0].target
            if isinstance(target, cst.Name):
                assigned.setdefault(target.value, []).append(node)
    for item in wanted:
        if item.code == "GA402":
            line = statements.get(item.line)
            steps = [call for other in item.evidence for call in calls.get(other.line, [])
                     if _is_scaler_step(call)]  # fmt: skip
            if line is None or len(line.body) != 1 or not steps:
                continue
            receiver = steps[0].func
            assert isinstance(receiver, cst.Attribute)
            scaler, optimizer = (
                module.code_for_node(part) for part in (receiver.value, steps[0].args[0].value)
            )
            plan.before[line] = f"{scaler}.unscale_({optimizer})"
            plan.done.append(item)
        elif item.code == "GA407":
            names = [
                call.args[0].value.value
                for call in calls.get(item.line, [])
                if call.args and isinstance(call.args[0].value, cst.Name)
            ]
            for name in names:
                made = assigned.get(name, [])
                if len(made) == 1 and _is_iterator(made[0].value):
                    plan.lists.add(made[0].value)
                    plan.done.append(item)
    return plan


def _is_scaler_step(call: cst.Call) -> bool:
    import libcst as cst  # noqa: PLC0415 - an extra, for this only

    func = call.func
    return isinstance(func, cst.Attribute) and func.attr.value == "step" and len(call.args) == 1


def _is_iterator(value: cst.BaseExpression) -> bool:
    import libcst as cst  # noqa: PLC0415 - an extra, for this only

    return (
        isinstance(value, cst.Call)
        and isinstance(value.func, cst.Name)
        and value.func.value in ("filter", "map")
    )


def _writer(plan: _Plan) -> cst.CSTTransformer:
    import libcst as cst  # noqa: PLC0415 - an extra, for this only

    class Writer(cst.CSTTransformer):
        def leave_SimpleStatementLine(  # noqa: N802 - libcst's name
            self,
            original_node: cst.SimpleStatementLine,
            updated_node: cst.SimpleStatementLine,
        ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
            added = plan.before.get(original_node)
            if added is None:
                return updated_node
            first = cst.parse_statement(added)
            assert isinstance(first, cst.SimpleStatementLine)
            first = first.with_changes(leading_lines=updated_node.leading_lines)
            return cst.FlattenSentinel([first, updated_node.with_changes(leading_lines=[])])

        def leave_Call(  # noqa: N802 - libcst's name
            self, original_node: cst.Call, updated_node: cst.Call
        ) -> cst.BaseExpression:
            if original_node not in plan.lists:
                return updated_node
            return cst.Call(cst.Name("list"), [cst.Arg(updated_node)])

    return Writer()
