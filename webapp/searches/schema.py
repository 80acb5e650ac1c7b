"""What the OpenAPI schema says: the engine's own dataclasses, described by the code that validates them."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from engine.deployment import Deployment
from engine.plan import Plan
from engine.search.events import Budget
from engine.search.evidence import Evidence


def _described(cls: type) -> dict[str, Any]:
    schema = TypeAdapter(cls).json_schema(ref_template="#/x/{model}")
    return _inlined(schema, schema.pop("$defs", {}))


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """The schema with each reference replaced by what it refers to (none of ours is recursive)."""
    if isinstance(node, dict):
        if "$ref" in node:
            return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {key: _inlined(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_inlined(value, definitions) for value in node]
    return node


NEW_SEARCH = {
    "type": "object",
    "required": ["deployment"],
    "additionalProperties": False,
    "properties": {
        "deployment": _described(Deployment),
        "budget": _described(Budget),
        "seed": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "plan": _described(Plan),
    },
}
EVENT = {
    "type": "object",
    "properties": {
        "seq": {"type": "integer"},
        "time": {"type": "number"},
        "type": {"type": "string"},
        "data": {"type": "object"},
    },
}
EVENTS = {
    "type": "object",
    "properties": {"events": {"type": "array", "items": EVENT}, "last": {"type": "integer"}},
}
_FACTS: dict[str, Any] = {
    "id": {"type": "integer"},
    "title": {"type": "string"},
    "created": {"type": "string", "format": "date-time"},
    "finished": {"type": ["string", "null"], "format": "date-time"},
    "status": {"type": "string", "enum": ["running", "paused", "cancelling", "finished", "failed"]},
    "speedup": {"type": ["number", "null"]},
    "rounds": {"type": "integer"},
    "trials": {"type": "integer"},
    "deployment": _described(Deployment),
    "links": {"type": "object", "additionalProperties": {"type": "string"}},
}
SUMMARY = {"type": "object", "properties": _FACTS}
SEARCH = {
    "type": "object",
    "properties": {**_FACTS, "view": {"type": "object", "description": "What the live page shows."}},
}
TRIAL = _described(Evidence)
WORKER = {
    "type": "object",
    "properties": {
        "device": {"type": "string"},
        "kind": {"type": "string", "enum": ["cpu", "cuda", "control"]},
        "description": {"type": "string"},
        "since": {"type": "string", "format": "date-time"},
        "status": {"type": "string", "enum": ["working", "idle"]},
        "job": {"type": ["object", "null"]},
        "name": {"type": "string", "description": "staff only"},
        "host": {"type": "string", "description": "staff only"},
        "pid": {"type": "integer", "description": "staff only"},
    },
}
WORKERS = {
    "type": "object",
    "properties": {
        "workers": {"type": "array", "items": WORKER},
        "waiting": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"where": {"type": "string"}, "count": {"type": "integer"}},
            },
        },
    },
}
PROBLEM = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "field": {"type": "string"},
    },
}


def answers(success: dict[int, Any], *problems: int) -> dict[Any, Any]:
    """Responses of one operation for `extend_schema`."""
    return {
        **{(status, "application/json"): schema for status, schema in success.items()},
        **{(status, "application/problem+json"): PROBLEM for status in (401, *problems)},
    }
