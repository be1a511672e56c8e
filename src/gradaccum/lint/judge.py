"""From walks to findings: a fault counts if some configuration has it whatever the data are."""

from __future__ import annotations

from gradaccum.lint.configured import configured_schedules
from gradaccum.lint.facts import Facts, facts_of
from gradaccum.lint.files.program import Module, Program
from gradaccum.lint.rules import (
    clipping,
    declared,
    gradients,
    graph,
    lengths,
    logs,
    modules,
    piling,
    ranks,
    scaling,
    schedules,
    stepping,
    taken,
    zeroing,
)
from gradaccum.lint.rules.hits import Hit
from gradaccum.lint.rules.places import placed
from gradaccum.lint.survey import Survey, survey

__all__ = ["judge"]

PER_VIEW = (
    *piling.RULES, *zeroing.RULES, *scaling.RULES, *stepping.RULES, *taken.RULES, *clipping.RULES,
    *ranks.RULES, *lengths.RULES, *declared.RULES, *schedules.RULES,
    *logs.RULES,
)  # fmt: skip
PER_WALK = (
    zeroing.overwritten,
    *scaling.GLOBAL,
    *stepping.GLOBAL,
    *taken.GLOBAL,
    *graph.GLOBAL,
    *ranks.GLOBAL,
    *gradients.GLOBAL,
    *lengths.GLOBAL,
    *logs.GLOBAL,
    *schedules.GLOBAL,
    *modules.GLOBAL,
)


def judge(program: Program, module: Module) -> list[Hit]:
    """All faults of the loops that start in one file, wherever they lie."""
    found: dict[tuple[str, str, int, int], Hit] = {}
    for item in survey(program, module):
        for one in _agreed(item):
            better = placed(one, program)
            found.setdefault(better.place, better)
    for one in configured_schedules(program, module):
        found.setdefault(one.place, one)
    return sorted(found.values(), key=lambda one: (one.path, one.line, one.column, one.code))


def _agreed(item: Survey) -> list[Hit]:
    walks: list[tuple[Facts, dict[tuple[str, str, int, int], Hit]]] = []
    for trace in item.traces:
        facts = facts_of(trace, item.driven, item.repeated)
        hits: dict[tuple[str, str, int, int], Hit] = {}
        for view in facts.views:
            for rule in PER_VIEW:
                for one in rule(facts, view):
                    hits.setdefault(one.place, one)
        for whole in PER_WALK:
            for one in whole(facts):
                hits.setdefault(one.place, one)
        walks.append((facts, hits))
    agreed: dict[tuple[str, str, int, int], Hit] = {}
    for facts, hits in walks:
        for place, one in hits.items():
            if place not in agreed and all(
                place in others or not _same_script(facts, other) for other, others in walks
            ):
                agreed[place] = one
    return list(agreed.values())


def _same_script(left: Facts, right: Facts) -> bool:
    """Whether two walks differ only in what the data decided, and both trained."""
    if not right.backwards or not any(view.windows for view in right.views):
        return False
    for key, (chosen, changes) in left.trace.decisions.items():
        other = right.trace.decisions.get(key)
        if other is not None and not changes and other[0] != chosen:
            return False
    return True
