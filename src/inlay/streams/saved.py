"""Values of this room as JSON, and back."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from inlay.errors import PackageError
from inlay.program.from_json import REFUSED, value_of

T = TypeVar("T")


def dumped(value: dict[str, Any]) -> str:
    """JSON in which equal values look equal."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def loaded(kind: type[T], text: str | bytes) -> T:
    """A value of this type from its JSON; anything else is refused."""
    try:
        value: T = value_of(kind, json.loads(text))
    except REFUSED as error:
        raise PackageError(f"This is no {kind.__name__.lower()}.", "Make it again.") from error
    return value
