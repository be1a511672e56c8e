"""Counters of micro-batches, and the lengths of windows they are held against."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from gradaccum.lint.walk.sizes import SURE
from gradaccum.lint.walk.values import Num, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["counts", "iterations", "modulus", "number"]

BIG = 8
"""A written window length beyond this one is walked as a short one."""


def iterations(walker: Walker, value: Value, other: Value) -> Value:
    """`epoch * X` beside a counter it is added to: X is how often that counter's loop turns."""
    if not isinstance(value, Thing) or not isinstance(other, Num) or not other.varies:
        return value
    parts = value.args if value.kind == "unknown" and "times" in value.uses else ()
    epochs = [part for part in parts if isinstance(part, Num) and part.varies and not part.tags]
    if len(walker.loops) < 2 or len(epochs) != 1 or len(parts) != 2:
        return value
    walker.trace.exact = False
    length = walker.known.get("length", 8)
    return Num(epochs[0].value * length, frozenset(("#epochs",)), True)


def number(walker: Walker, value: Value) -> Value:
    """A symbol that counts something, as the number chosen for it."""
    if isinstance(value, Thing) and (value.key in walker.known or value.key in walker.asserted):
        return walker.symbol(value.key)
    return value


def modulus(walker: Walker, left: Value, right: Value, node: ast.AST) -> tuple[Value, Value]:
    """Both sides of `counter % length`, the length as a number if the counter is one."""
    counting = isinstance(left, Num) and left.varies
    if isinstance(left, Num) and not counting and walker.loops:
        # a counter that starts outside the loop does not vary until it was counted up once
        named = any(isinstance(part, (ast.Name, ast.Attribute))
                    for part in ast.walk(getattr(node, "left", node)))  # fmt: skip
        counting = named and left.value <= 1 and not left.tags
    if not counting and walker.driver is not None and isinstance(left, (Thing, Num)):
        if isinstance(left, Thing) and left.kind == "unknown":
            left, counting = Num(walker.driver.index, frozenset(), True), True
    if not counting:
        return left, right
    if isinstance(left, Num) and any(tag.startswith("len(") for tag in left.tags):
        walker.trace.shifted = True
    if isinstance(right, Thing) and right.kind in ("unknown", "external", "dict"):
        walker.trace.shifted |= right.varies
        right_number = walker.symbol(right.key)
        walker.trace.window_keys.add(right.key)
        return left, right_number
    if isinstance(right, Num) and not right.tags:
        if walker.loops and walker.loops[-1].exact:
            return left, right
        if right.value > BIG:
            chosen = walker.symbol(f"{right.value:g}")
            if any(many % right.value == 0 for many in walker.trace.multiples if many > SURE):
                walker.trace.multiples.add(chosen.value)  # all windows are whole, so these are
            return left, chosen
        if right.value > 3:
            walker.known["length"] = 11
    return left, right


def counts(counter: Num, limit: Thing, test: ast.Compare, around: ast.AST | None) -> bool:
    """Whether a counter is held against a window length: the branch starts it anew."""
    if not counter.varies or limit.kind != "unknown" or not isinstance(around, ast.If):
        return False
    named = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(test)
        if isinstance(node, (ast.Name, ast.Attribute))
    }
    for statement in around.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                for part in parts:
                    name = part.id if isinstance(part, ast.Name) else getattr(part, "attr", None)
                    if name in named:
                        return True
    return False
