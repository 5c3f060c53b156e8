"""JSON schemas as they are given to llguidance: objects closed, and numbers that it reads exactly."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from inlay.errors import UsageError

_DIGITS = 15
"""Numbers with more digits are read with an error of one unit in the last place."""
_ROUNDING = {
    **dict.fromkeys(("minimum", "exclusiveMinimum"), ROUND_CEILING),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), ROUND_FLOOR),
}
_NEUTRAL = {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "discriminator"}
_BOUNDS = {"minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_PLAIN_KEYWORDS = frozenset(
    {"type", "enum", "const", "$ref", "$defs", "definitions", "anyOf", "multipleOf", "readOnly", "writeOnly"}
    | {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
    | {"items", "prefixItems", "minItems", "maxItems"}
    | _NEUTRAL
    | _BOUNDS
)
"""Keywords of schemas in which closing an object changes nothing else."""


def prepare_schema(schema: Any) -> Any:
    """Return a schema for llguidance. What is valid for it is valid for the original."""
    try:
        return _exact(close_objects(schema))
    except RecursionError:
        raise UsageError("The JSON schema is nested too deeply.", "Use a simpler one.") from None


def close_objects(schema: Any) -> Any:
    """Return a schema whose objects have no properties but the stated ones, unless it says more about others.

    A schema allows any other property by default. Few who write one want them, and a small model adds them without end.
    A schema that combines others stays as it is, because together they may require what each of them does not state.

    >>> close_objects({"properties": {"a": {"type": "integer"}}})
    {'properties': {'a': {'type': 'integer'}}, 'additionalProperties': False}
    >>> close_objects({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]})
    {'allOf': [{'properties': {'a': {}}}, {'properties': {'b': {}}}]}
    """
    try:
        return _closed(schema)
    except (_OpenSchemaError, TypeError, AttributeError, RecursionError):  # what is no schema is rejected later
        return schema


class _OpenSchemaError(Exception):
    """A schema that must not be changed."""


def _closed(schema: Any) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict) or not schema.keys() <= _PLAIN_KEYWORDS:
        raise _OpenSchemaError
    if len(schema.keys() & {"properties", "anyOf", "$ref", "enum", "const"}) > 1 or (
        "required" in schema and not schema.keys().isdisjoint({"anyOf", "$ref"})
    ):
        raise _OpenSchemaError
    made = dict(schema)
    for key in schema.keys() & {"properties", "$defs", "definitions"}:
        made[key] = {name: _closed(each) for name, each in schema[key].items()}
    for key in schema.keys() & {"anyOf", "prefixItems"}:
        made[key] = [_closed(each) for each in schema[key]]
    for key in schema.keys() & {"items", "additionalProperties"}:
        made[key] = _closed(schema[key])
    stated = schema.get("properties", {})
    needed = max(schema.get("minProperties", 0), len(stated.keys() | set(schema.get("required", ()))))
    if stated and "additionalProperties" not in schema and needed == len(stated):
        made["additionalProperties"] = False
    return made


def _exact(value: Any, key: str = "") -> Any:
    """Return a schema in which bounds of many digits are rounded inwards. Raise an error for other such numbers."""
    if key in ("default", "examples"):
        return value
    if isinstance(value, dict):
        return {name: _exact(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_exact(each) for each in value]
    if not isinstance(value, float) or value == float(f"{value:.{_DIGITS}g}"):
        return value
    if key not in _ROUNDING:
        raise UsageError(f"The JSON schema has a number of more than {_DIGITS} digits: {value}.", "Round it.")
    return float(Context(prec=_DIGITS, rounding=_ROUNDING[key]).create_decimal(repr(value)))
