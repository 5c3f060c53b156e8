"""Random JSON schemas whose answers are bounded, and schemas of the JSON Schema test suite."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

WORDS = ("name", "age", "city", "tags", "price", "is_open", "kind", "note", "x", "größe", "first name", "id")
PATTERNS = ("^[a-z]{1,8}$", "^[A-Z][a-z]+( [A-Z][a-z]+)?$", "^\\d{3}-\\d{4}$", "^(red|green|blue)$", "^#[0-9a-f]{6}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return the schema of an object with bounded properties."""
    definitions = {name: _value(rng, 1, ()) for name in ("first", "second")[: rng.randrange(3)]}
    made = _object(rng, depth, tuple(definitions))
    return {**made, "$defs": definitions} if definitions else made


def _value(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _choice, _simple] + ([_object, _array, _either] if depth else [])
    if names and rng.random() < 0.2:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    return rng.choice(kinds)(rng, depth - 1, names)


def _object(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    keys = rng.sample(WORDS, rng.randint(1, 4))
    made: dict[str, Any] = {"type": "object", "properties": {key: _value(rng, depth, names) for key in keys}}
    if rng.random() < 0.8:
        made["required"] = rng.sample(keys, rng.randint(0, len(keys)))
    if rng.random() < 0.4:
        made["additionalProperties"] = False
    return made


def _array(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    low = rng.randrange(3)
    if rng.random() < 0.2:
        fixed = [_value(rng, depth, names) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": fixed, "items": False, "minItems": rng.randint(0, len(fixed))}
    return {"type": "array", "items": _value(rng, depth, names), "minItems": low, "maxItems": low + rng.randrange(3)}


def _either(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth, names) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    low = rng.randrange(4)
    return rng.choice(
        [
            {"type": "string", "maxLength": 20},
            {"type": "string", "minLength": low, "maxLength": low + rng.randrange(12)},
            {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 30},
            {"type": "string", "format": rng.choice(FORMATS), "maxLength": 60},
        ]
    )


def _integer(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    named = rng.choice(["minimum", "exclusiveMinimum"])
    return {"type": "integer", named: low, "maximum": low + rng.randint(2, 5000)}


def _number(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    low = round(rng.uniform(-10, 10), 2)
    return {"type": "number", "minimum": low, "maximum": low + 5}


def _choice(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    values = ["a", "two words", "ünï", '"quoted"', 3, -2.5, True, None, [1, 2], {"k": "v"}]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _simple(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])


def suite(folder: Path) -> Iterator[Any]:
    """Yield the schemas of the JSON Schema test suite of 2020-12, from its folder `tests/draft2020-12`."""
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            yield group["schema"]
