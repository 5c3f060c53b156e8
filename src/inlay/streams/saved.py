"""Values of this room as JSON, and back."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from inlay.errors import PackageError, ProgramError

T = TypeVar("T")


def dumped(value: dict[str, Any]) -> str:
    """JSON in which equal values look equal."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def loaded(kind: type[T], text: str | bytes) -> T:
    """A value of this type from its JSON; anything else is refused."""
    try:
        value: T = _read(kind, json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ProgramError) as error:
        raise PackageError(f"This is no {kind.__name__.lower()}.", "Make it again.") from error
    return value


def _read(kind: Any, value: Any) -> Any:
    """
    >>> _read(tuple[tuple[int, str], ...] | None, [[1, "a"]])
    ((1, 'a'),)
    """
    home: Any = get_origin(kind) or kind
    if home is UnionType:
        return None if value is None else _read(next(each for each in get_args(kind) if each is not NoneType), value)
    if is_dataclass(kind):
        hints = _hints(home)
        if set(value) - {each.name for each in fields(kind)}:
            raise TypeError(f"{sorted(value)} are no fields of {home}")
        return home(**{name: _read(hints[name], each) for name, each in value.items()})
    if home is tuple and isinstance(value, list):
        inner = get_args(kind)
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_read(each, item) for each, item in zip(kinds, value, strict=True))
    if issubclass(home, StrEnum):
        return home(value)
    if home is float and type(value) is int:
        return float(value)
    if type(value) is not home:
        raise TypeError(f"{value!r} is no {home}")
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
