from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from inlay.program.bindings import Bindings
from inlay.program.text.alignment import align
from inlay.program.text.diff import diff
from tests.synthetic_programs import irregular, layered

if TYPE_CHECKING:
    from inlay.program import Program

aten = torch.ops.aten
pytestmark = pytest.mark.fast


def _changed(program: Program, old: object, new: object, every: int = 1) -> Program:
    copied = program.copy()
    for count, node in enumerate(node for node in copied.graph.nodes if node.target is old):
        if count % every == 0:
            node.target = new
    return copied


def test_equal_programs() -> None:
    assert diff(layered(20), layered(20)).is_equal
    assert diff(irregular(500), irregular(500)).is_equal


def test_names_do_not_count() -> None:
    program = layered(5)
    renamed = program.copy()
    for index, node in enumerate(list(renamed.graph.nodes)):
        if node.op == "call_function":
            node.name = f"other_{index}"
    assert diff(program, renamed).is_equal


def test_one_operator_in_every_layer_is_one_row() -> None:
    program = layered(30)
    found = diff(program, _changed(program, aten.silu.default, aten.gelu.default))
    rows = [row for row in found.rows if row.kind != "same"]
    assert len(rows) == 1
    assert "silu" in rows[0].left
    assert "gelu" in rows[0].right
    assert found.operator_deltas == {"aten.gelu.default": 30, "aten.silu.default": -30}


def test_bounds_of_indices_are_compared() -> None:
    program = layered(2)
    row, *others = program.bindings
    bounded = [replace(program, bindings=Bindings((replace(row, below=below), *others))) for below in (10, 20)]
    assert diff(*bounded).binding_changes == (f"{row.role.value} {row.target} was below 10 and is below 20",)
    assert diff(bounded[0], bounded[0]).is_equal


def test_constant_and_wiring_changes_are_seen() -> None:
    program = layered(4)
    constant = program.copy()
    node = next(node for node in constant.graph.nodes if node.args[1:] == (0.5,))
    node.args = (node.args[0], 0.25)
    assert not diff(program, constant).is_equal
    wired = program.copy()
    add = [node for node in wired.graph.nodes if node.target is aten.add.Tensor][-1]
    add.args = (add.args[1], add.args[1])
    assert not diff(program, wired).is_equal


def test_type_changes_are_seen() -> None:
    program = layered(3)
    other = program.copy()
    node = next(node for node in other.graph.nodes if node.target is aten.relu.default)
    node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    assert not diff(program, other).is_equal


def test_hunks_skip_what_is_equal() -> None:
    program = irregular(400)
    other = program.copy()
    node = list(other.graph.nodes)[200]
    node.target = aten.cos.default
    node.args = node.args[:1]
    hunks = list(diff(program, other).hunks(context=2))
    assert len(hunks) < 20
    assert any(row.kind == "skipped" for row in hunks)


@pytest.mark.parametrize("seed", range(20))
def test_alignment_is_sound(seed: int) -> None:
    """Pairs are equal and in order, and what was not touched is mostly found again."""
    rng = random.Random(seed)
    left = [rng.randrange(rng.choice((5, 1000))) for _ in range(rng.randrange(1, 3000))]
    right = list(left)
    for _ in range(len(right) // 50):
        at = rng.randrange(len(right))
        if rng.random() < 0.5:
            right.insert(at, -1)
        else:
            right.pop(at)
    pairs = align(left, right)
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    assert len(pairs) >= 0.9 * len(left)
