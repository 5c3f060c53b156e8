"""Schemas for llguidance: what is valid for a prepared schema is valid for the original."""

from __future__ import annotations

import math
import random
from typing import Any

import jsonschema_rs
import pytest

from inlay.errors import UsageError
from inlay.runtime.json_schema import close_objects, prepare_schema

CLOSED = {"properties": {"a": {}}, "additionalProperties": False}
OPEN: dict[str, Any] = {"properties": {"a": {}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"items": OPEN}, {"items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"x": OPEN}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        (OPEN | {"required": ["a"]}, CLOSED | {"required": ["a"]}),
        # and these are left as they are
        *(
            (each, each)
            for each in (
                OPEN | {"required": ["b"]},
                OPEN | {"minProperties": 2},
                OPEN | {"additionalProperties": {"type": "integer"}},
                OPEN | {"patternProperties": {"^x": {}}},
                {"allOf": [OPEN, {"properties": {"b": {}}}]},
                {"oneOf": [OPEN, {"properties": {"b": {}}}]},
                {"$ref": "#/$defs/x", "properties": {"b": {}}, "$defs": {"x": OPEN}},
                {"anyOf": [OPEN], "required": ["b"]},
                {"items": OPEN, "not": OPEN},
                OPEN | {"enum": [{"b": 1}]},
                {"type": "object"},
                True,
                {"properties": [1]},
                3,
            )
        ),
    ],
)
def test_objects_are_closed(schema: Any, expected: Any) -> None:
    assert close_objects(schema) == expected


def test_bounds_are_rounded_inwards() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    for _ in range(300):
        scaled = rng.gauss(0, 1) * 10 ** rng.randint(-9, 9)
        value = rng.choice([rng.uniform(-100, 100), round(rng.uniform(-9, 9), 2), scaled])
        made = prepare_schema({"properties": {"x": {"minimum": value, "maximum": value + 1}}})["properties"]["x"]
        assert made["minimum"] >= value, seed
        assert made["maximum"] <= value + 1, seed
        assert math.isclose(made["minimum"], value, rel_tol=1e-14)
        assert len(f"{made['minimum']:.15g}") >= len(repr(made["minimum"])) - 4, "few digits"
        assert jsonschema_rs.is_valid({"minimum": value}, made["minimum"])


def test_other_numbers_are_left_or_refused() -> None:
    plain: dict[str, Any] = {"enum": [0.1, 1e300, 5], "default": 0.1 + 0.2, "multipleOf": 0.01}
    assert prepare_schema(plain) == plain
    with pytest.raises(UsageError, match="more than 15 digits"):
        prepare_schema({"properties": {"x": {"enum": [0.1 + 0.2]}}})
