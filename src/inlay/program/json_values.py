"""Decoding of frozen dataclasses from JSON; values that do not fit their type are rejected."""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from inlay.errors import ProgramError

DECODE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError, ProgramError)
"""Exceptions that `from_json` and `json.loads` raise for invalid input."""


def from_json(kind: Any, value: Any) -> Any:
    """Decode a JSON value to this type.

    >>> from_json(dict[str, tuple[int, int | None]], {"length": [1, None]})
    {'length': (1, None)}
    >>> from_json(tuple[float, ...] | None, [1, 2.5])
    (1.0, 2.5)
    """
    home: Any = get_origin(kind) or kind
    inner = get_args(kind)
    if is_dataclass(kind):
        hints = _hints(home)
        return home(**{name: from_json(hints[name], each) for name, each in value.items()})
    if home is UnionType:
        return from_json(_select_type(inner, value), value)
    if home is tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(from_json(each, item) for each, item in zip(kinds, value, strict=True))
    if home is dict and isinstance(value, dict):
        return {name: from_json(inner[1], each) for name, each in value.items()}
    if issubclass(home, Enum):
        return home(value)
    if home is float and type(value) is int:
        return float(value)
    if type(value) is not home:
        raise TypeError(f"{value!r} is not of type {home}")
    return value


def _select_type(kinds: tuple[Any, ...], value: Any) -> Any:
    """Return the member of a union type that fits a value."""
    if value is None:
        return NoneType
    fitting = [each for each in kinds if type(value) is each or (is_dataclass(each) and isinstance(value, dict))]
    return next(iter(fitting), next(each for each in kinds if each is not NoneType))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
