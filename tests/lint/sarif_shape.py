"""What SARIF 2.1.0 asks of the objects we write, restated from the standard as a JSON Schema.

Narrower than OASIS's own schema: an object that we do not mean to write is refused here.
"""

from __future__ import annotations

from typing import Any

_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_MESSAGE = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": {"type": "string", "minLength": 1}},
    "additionalProperties": False,
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


_REGION = _object(
    ["startLine"],
    startLine={"type": "integer", "minimum": 1},
    startColumn={"type": "integer", "minimum": 1},
)
_PLACE = _object(
    ["artifactLocation", "region"],
    # 3.4.3: a URI reference, in which a space or a backslash has to be escaped
    artifactLocation=_object(["uri"], uri={"type": "string", "pattern": r"^[^\s\\]+$"}),
    region=_REGION,
)
_RULE = _object(
    ["id"],
    id={"type": "string"},
    shortDescription=_MESSAGE,
    fullDescription=_MESSAGE,
    help=_MESSAGE,
    defaultConfiguration=_object([], level=_LEVEL),
)
_RESULT = _object(
    ["message"],  # 3.27: the one property that a result must have
    ruleId={"type": "string"},
    ruleIndex={"type": "integer", "minimum": -1},
    level=_LEVEL,
    message=_MESSAGE,
    locations={"type": "array", "items": _object([], physicalLocation=_PLACE)},
    relatedLocations={
        "type": "array",
        "uniqueItems": True,
        "items": _object(
            [],
            id={"type": "integer", "minimum": -1},
            physicalLocation=_PLACE,
            message=_MESSAGE,
        ),
    },
)
_DRIVER = _object(
    ["name"],
    name={"type": "string"},
    version={"type": "string"},
    rules={"type": "array", "uniqueItems": True, "items": _RULE},
)
_RUN = _object(
    ["tool"],
    tool=_object(["driver"], driver=_DRIVER),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results={"type": "array", "items": _RESULT},
)
SHAPE: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    **_object(
        ["version", "runs"],
        version={"const": "2.1.0"},
        runs={"type": "array", "items": _RUN},
        **{"$schema": {"type": "string", "format": "uri"}},
    ),
}
