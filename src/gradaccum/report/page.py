"""A diagnosis as one HTML file: it asks no host for anything and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from gradaccum.faults import find
from gradaccum.records.diagnosis import Diagnosis, ParameterSeen
from gradaccum.report.amounts import amount, duration, number, plural
from gradaccum.report.excerpts import excerpt, shorten
from gradaccum.report.figures import MOST_WINDOWS, embedded, figures
from gradaccum.report.seen import happened, updates
from gradaccum.report.visible import one_line, tame
from gradaccum.report.weights import weighed

__all__ = ["html"]

_ASSETS = "assets"
_SCRIPTS = (
    "base.js",
    "timeline.js",
    "charts.js",
    "weights.js",
    "curves.js",
    "tables.js",
    "start.js",
)
_ORDER = {"error": 0, "warning": 1, "note": 2}
_MOST_CARDS, _MOST_CARD_BYTES = 60, 300_000
_MOST_NAMED = 200
_MOST_PARAMETERS, _MOST_OPTIMIZERS = 500, 40
_MOST_TOTALS = 40
_LONGEST = 600
_LONGEST_NAME = 120


def html(diagnosis: Diagnosis) -> str:
    """The report as a page that works from `file://`: light, dark, on paper and by keyboard.

    A content security policy names the hashes of the page's own style and script, so that no text
    of the run, however it is written, is run by the browser. Its size is bounded (1.5 MB) whatever
    the size of the run; what is left out is counted on it.
    """
    shown = tame(_bounded(diagnosis), _LONGEST)
    cards = _cards(shown)
    named = shown.findings[len(cards) :]
    short = shorten(_paths(shown))
    style, script = _style(), _script()
    return _environment(short).get_template("page.html.j2").render(
        run=shown.run,
        arguments=one_line(" ".join(diagnosis.run.argv[:200])),
        verdict=shown.verdict,
        state=_state(diagnosis),
        tiles=_tiles(diagnosis),
        cards=cards,
        named=named,
        findings_left=len(diagnosis.findings) - len(shown.findings),
        severities=Counter(item.severity for item in diagnosis.findings),
        windows=len(shown.windows),
        totals=list(shown.totals.items()),
        optimizers=shown.optimizers,
        parameters=[(item, _trouble(item) < _FINE) for item in shown.parameters],
        has_change=any(item.change is not None for item in shown.parameters),
        parameters_left=len(diagnosis.parameters) - len(shown.parameters),
        figures=Markup(embedded(figures(shown, short))),
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
    ).lstrip()  # fmt: skip


def _bounded(diagnosis: Diagnosis) -> Diagnosis:
    """What a page shows of it, what is worth most first."""
    findings = sorted(diagnosis.findings, key=lambda item: _ORDER.get(item.severity, 3))
    parameters = sorted(diagnosis.parameters, key=_trouble)[:_MOST_PARAMETERS]
    return replace(
        diagnosis,
        run=replace(diagnosis.run, argv=()),
        findings=tuple(findings[: _MOST_CARDS + _MOST_NAMED]),
        totals=dict(list(diagnosis.totals.items())[:_MOST_TOTALS]),
        optimizers=diagnosis.optimizers[:_MOST_OPTIMIZERS],
        parameters=tuple(tame(item, _LONGEST_NAME) for item in parameters),
        windows=diagnosis.windows[:MOST_WINDOWS],
    )


def _cards(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Findings with their source, until there are many or they have become long."""
    cards, size = [], 0
    for finding in diagnosis.findings[:_MOST_CARDS]:
        parts, rest = excerpt(finding, diagnosis.sources)
        size += sum(
            len(line.code) + sum(map(len, line.notes)) + 200
            for part in parts
            for run in part.runs
            for line in run
        )
        size += sum(len(item.what) for item in rest) + len(finding.message) + len(finding.mend)
        if size > _MOST_CARD_BYTES:
            break
        cards.append(
            {"finding": finding, "parts": parts, "rest": rest, "fault": find(finding.code)}
        )
    return cards


def _environment(short: Mapping[str, str]) -> Environment:
    made = Environment(
        loader=PackageLoader("gradaccum.report", _ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def shortened(path: str) -> str:
        return short.get(path, path)

    made.filters.update(
        number=number,
        duration=duration,
        plural=plural,
        ticked=_ticked,
        short=shortened,
        unbroken=_unbroken,
    )
    return made


@cache
def _asset(name: str) -> str:
    return (resources.files("gradaccum.report") / _ASSETS / name).read_text(encoding="utf-8")


@cache
def _style() -> Markup:
    return Markup(_asset("vendor/uPlot.min.css") + "\n" + _asset("page.css"))


@cache
def _script() -> Markup:
    own = "\n".join(_asset(name) for name in _SCRIPTS)
    # uPlot reads the ratio once: twice the pixels keep the canvases sharp on paper
    first = "window.devicePixelRatio = Math.max(2, window.devicePixelRatio);\n"
    plots = _asset("vendor/uPlot.iife.min.js")
    return Markup(f"{first}{plots}\n(() => {{\n'use strict';\n{own}}})();\n")


def _ticked(text: str) -> Markup:
    """What stands between backticks as code; a lone backtick stays one."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts[-2:] = ["`".join(parts[-2:])]
    return Markup().join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )


def _unbroken(text: Markup) -> Markup:
    """A large line that breaks inside `micro-batch` reads badly."""
    return Markup(re.sub(r"\bmicro-batch(?:es)?\b", r'<span class="whole">\g<0></span>', str(text)))


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _paths(diagnosis: Diagnosis) -> list[str]:
    named = [diagnosis.run.script] if not diagnosis.run.script.startswith("-") else []
    for finding in diagnosis.findings:
        named += [finding.path, *(item.path for item in finding.evidence)]
    named += [item.path for item in diagnosis.optimizers]
    for window in diagnosis.windows:
        named += [item.path for item in (*window.microbatches, *window.events)]
    return named


def _state(diagnosis: Diagnosis) -> str:
    """`error`, `warning`, `fine`, `stopped` or `unsure`: how the page looks at first glance."""
    worst = min((_ORDER.get(item.severity, 2) for item in diagnosis.findings), default=2)
    if worst < _ORDER["note"]:
        return "error" if worst == 0 else "warning"
    if not happened(diagnosis, "backward"):
        return "unsure"
    return "fine" if diagnosis.run.ended in ("finished", "exited") else "stopped"


def _tiles(diagnosis: Diagnosis) -> list[tuple[str, str, str, str]]:
    """Figure, unit, what it means, and its state."""
    found, alone = weighed(diagnosis), not happened(diagnosis, "step")
    outside = "outside any optimizer" if alone and updates(diagnosis) else ""
    tiles = [
        (number(happened(diagnosis, "backward")), "backward passes", "", ""),
        (number(updates(diagnosis)), "updates", outside, ""),
    ]
    if found.all:
        said = f"{number(found.unknown)} could not be told" if found.unknown else "in what was seen"
        share = f"{number(found.right)} / {number(found.right + found.off)}"
        wrong = bool(found.off) and _state(diagnosis) in ("error", "warning")
        tiles.append((share, "weights as they should be", said, "error" if wrong else ""))
    if found.lost:
        tiles.append((number(found.lost), "gradients lost", "no step used them", "error"))
    if diagnosis.parameters and diagnosis.run.ended not in ("killed", "unfinished"):
        changed = sum(item.changes > 0 for item in diagnosis.parameters)
        share = f"{number(changed)} / {number(len(diagnosis.parameters))}"
        tiles.append((share, "parameters changed", "", ""))
    peaks = [value for _, value in diagnosis.memory] + [
        item.memory for item in diagnosis.windows if item.memory is not None
    ]
    if peaks:
        tiles.append((amount(max(peaks)), "peak memory", "", ""))
    return tiles


_FINE = 3


def _trouble(item: ParameterSeen) -> int:
    """What is worth looking at comes first."""
    if item.owner is None:
        return 0
    if not item.arrivals:
        return 1
    return 2 if not item.changes else _FINE
