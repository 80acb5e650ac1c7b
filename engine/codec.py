"""Dataclasses to JSON and back, strictly.

pydantic validates plain stdlib dataclasses: unknown fields, wrong types and illegal literals are refused
by name, so a stored plan, event or bundle either means what it says or is not read at all.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from engine.errors import UserError

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Set as `__pydantic_config__` on every dataclass that is read from JSON."""


@functools.cache
def _cached(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _adapter(cls: Any) -> TypeAdapter[Any]:
    # Through Any: the cache wants a Hashable, which every class is, but mypy does not know it of `type[T]`.
    adapter: TypeAdapter[Any] = _cached(cls)
    return adapter


def to_json(value: Any) -> Any:
    """JSON-ready form (dicts, lists, numbers, strings) of a dataclass instance."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_json(cls: type[T], data: Any, *, what: str = "") -> T:
    """Build `cls` from parsed JSON. Raises UserError that names the first bad field."""
    try:
        # Through JSON text: there pydantic's strict mode takes a list for a tuple, but no "60" or true for a number.
        result: T = _adapter(cls).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "value"
        name = what or getattr(cls, "__name__", str(cls))
        raise UserError(f"{name}: {where}: {first['msg']}.", code="invalid-json") from None
    return result


def canonical(value: Any) -> str:
    """One text for one value: sorted keys, no spaces."""
    data = to_json(value) if dataclasses.is_dataclass(value) else value
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """First 12 hex digits of the SHA-256 of the canonical JSON: a stable name for a plan or candidate."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:12]
