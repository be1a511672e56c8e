"""Findings for machines: JSON, SARIF 2.1.0, GitHub annotations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath
from urllib.parse import quote

from gradaccum.faults import CATALOGUE
from gradaccum.records import Finding

__all__ = ["github", "sarif", "to_json"]

_LEVELS = {"error": "error", "warning": "warning", "note": "note"}
_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_json(findings: Sequence[Finding], files: int) -> str:
    """`{"version": 1, "files": ..., "findings": [...]}`."""
    table = {"version": 1, "files": files, "findings": [asdict(item) for item in findings]}
    return json.dumps(table, indent=2)


def github(findings: Sequence[Finding]) -> str:
    """One workflow command a finding."""
    return "\n".join(
        f"::{_GITHUB[item.severity]} file={_property(_file(item.path))},line={item.line},"
        f"col={item.column},title={_property(f'{item.code} {item.title}')}::"
        f"{_data(_said(item))}"
        for item in findings
    )


def _said(item: Finding) -> str:
    """Message and mend; first the cell of a notebook, whose lines those that are told count in."""
    _, cell, number = item.path.partition(":cell ")
    where = f"In code cell {number}, line {item.line}: " if cell else ""
    return f"{where}{item.message}. {item.mend}".strip()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _file(path: str) -> str:
    return path.split(":cell ")[0]


def sarif(findings: Sequence[Finding], version: str) -> str:
    """A SARIF 2.1.0 log with one run."""
    codes = sorted({item.code for item in findings})
    rules = [_rule(code, findings) for code in codes]
    results = [
        {
            "ruleId": item.code,
            "ruleIndex": codes.index(item.code),
            "level": _LEVELS[item.severity],
            "message": {"text": _said(item)},
            "locations": [_location(item.path, item.line, item.column)],
            "relatedLocations": [
                {
                    **_location(other.path, other.line, 1),
                    "id": index,
                    "message": {"text": other.what},
                }
                for index, other in enumerate(item.evidence)
            ],
        }
        for item in findings
    ]
    driver = {"name": "gradaccum", "version": version, "rules": rules}
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
        ],
    }
    return json.dumps(log, indent=2)


def _rule(code: str, findings: Sequence[Finding]) -> dict[str, object]:
    fault = CATALOGUE.get(code)
    title = fault.title if fault else next(item.title for item in findings if item.code == code)
    rule: dict[str, object] = {"id": code, "shortDescription": {"text": title}}
    if fault is not None:
        rule["fullDescription"] = {"text": f"{fault.what} {fault.reason}"}
        rule["help"] = {"text": fault.mend}
        rule["defaultConfiguration"] = {"level": _LEVELS[fault.severity]}
    return rule


def _location(path: str, line: int, column: int) -> dict[str, object]:
    uri = quote(PurePath(_file(path)).as_posix(), safe="/:")
    region = {"startLine": max(line, 1), "startColumn": max(column, 1)}
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
