"""The brief difference: blocks folded alike on both sides, each way of differing shown, the rest counted."""

from __future__ import annotations

import re

import pytest
import torch

from inlay.program.text.diff import Diff, diff
from inlay.program.text.diff_rows import DiffRow, build_rows, mark_first_changes, normalize_line
from inlay.program.text.side_by_side import diff_lines
from tests.synthetic_programs import irregular, layered

aten = torch.ops.aten
pytestmark = pytest.mark.fast


def _changed(layers: int, chosen: set[int]) -> Diff:
    """Layers with one activation, and with another one in the chosen layers."""
    before = layered(layers)
    after = before.copy()
    for layer, node in enumerate(node for node in after.graph.nodes if node.target is aten.silu.default):
        if layer in chosen:
            node.target = aten.gelu.default
    return diff(before, after)


def _titles(found: Diff) -> list[str]:
    return [row.left for row in found.rows if row.left.startswith("def block")]


@pytest.mark.parametrize(
    ("chosen", "times"),
    [
        (set(range(6)), [6]),
        (set(range(1, 6)), [5, 1]),
        (set(range(5)), [5, 1]),
        ({3}, [5, 1]),
        ({0, 2, 4}, [3, 3]),
        ({0, 1, 2}, [3, 3]),
    ],
    ids=["all", "but the first", "but the last", "one", "every other", "the first half"],
)
def test_blocks_are_compared_with_what_they_became(chosen: set[int], times: list[int]) -> None:
    found = _changed(6, chosen)
    assert [int(title.rpartition("× ")[2]) for title in _titles(found)] == times
    (row,) = (row for row in found.rows if row.kind != "same")
    assert "silu" in row.left
    assert "gelu" in row.right
    assert found.operator_deltas == {"aten.gelu.default": len(chosen), "aten.silu.default": -len(chosen)}


def test_both_directions() -> None:
    """A transform may also make layers equal that were not."""
    before, after = layered(6, odd=(0,)), layered(6, odd=(0,))
    (odd,) = (node for node in after.graph.nodes if node.target is aten.tanh.default)
    odd.replace_all_uses_with(odd.args[0])
    after.graph.erase_node(odd)
    found = diff(before, after)
    assert [title.rpartition("× ")[2] for title in _titles(found)] == ["5", "1"]
    assert len([row for row in found.rows if row.kind != "same"]) <= 2
    assert found.operator_deltas == {"aten.tanh.default": -1}


def test_one_changed_layer_is_not_hidden_by_the_others() -> None:
    before = layered(8)
    after = before.copy()
    node = [node for node in after.graph.nodes if node.args[1:] == (0.5,)][5]
    node.args = (node.args[0], 0.25)
    assert "0.25" in str(diff(before, after))
    assert "block_b" in str(diff(before, after))


def test_models_that_were_captured_apart_are_compared_as_they_fold() -> None:
    found = diff(layered(4), layered(7))
    assert not found.is_equal
    assert "× 4" in str(found)
    assert "× 7" in str(found)


def _row(value: int, constant: float = 1.0) -> DiffRow:
    return DiffRow("changed", f"    a_{value} = b_{value} + {constant}", f"    a_{value} = aten.tanh(b_{value})")


def test_each_shape_is_shown_once_and_the_rest_is_counted() -> None:
    rows = [
        _row(1),
        *[DiffRow("same", "x", "x")] * 9,
        _row(2),
        _row(3),
        _row(4, 2.0),
        *[DiffRow("same", "x", "x")] * 9,
        _row(5),
    ]
    found = Diff(tuple(rows), {}, (1, 1), (), has_same_wiring=False)
    assert [index for index, new in enumerate(mark_first_changes(rows)) if new] == [0, 12]
    lines = [line.text for line in diff_lines(found)]
    assert "5 lines differ by 2 kinds of change; each kind is shown at least once." in lines
    hidden = sum(int(count) for line in lines for count in re.findall(r"(\d+) changed like", line))
    shown = sum(line.startswith("~") for line in lines)
    assert hidden + shown == 5


@pytest.mark.parametrize(
    ("one", "two", "alike"),
    [
        ("a = b + 1", "c = d + 1", True),
        ("a = b + 1", "c = d + 2", False),
        ("a = aten.cos(b)", "a = aten.sin(b)", False),
        ("a = aten.linear(b, w.q.weight)", "a = aten.linear(c, model.layers[3].k.weight)", True),
        ("a = b.view(batch, 4)", "a = b.expand(batch, 4)", False),
        ("a = b[0]", "a = b[1]", False),
        ("a = aten.sum(b, dim=1)", "a = aten.sum(b, axis=1)", False),
        ("a = block_a(w, x)", "a = block_b(w, x)", False),
        ("a = aten.gelu(b, 'tanh')", "a = aten.gelu(b, 'none')", False),
        ("a = b  # f32[4]", "a = b  # f32[5]", False),
    ],
)
def test_shapes(one: str, two: str, alike: bool) -> None:
    spaces = frozenset({"aten"})
    assert (normalize_line(one, spaces) == normalize_line(two, spaces)) is alike


def test_lines_that_assign_the_same_value_stand_beside_each_other() -> None:
    rows = list(build_rows(["a = p(x)", "b = q(a)", "c = r(b)"], ["z = s(x)", "y = t(z)", "c = r(y)"]))
    assert rows[-1] == DiffRow("changed", "c = r(b)", "c = r(y)")


def test_a_difference_without_any_repetition_is_whole() -> None:
    before = irregular(300)
    after = before.copy()
    for node in list(after.graph.nodes)[50:250:40]:
        node.target, node.args = aten.cos.default, node.args[:1]
    found = diff(before, after)
    assert [row for row in found.summary(0, gaps=False) if row.kind not in ("same", "skipped")]
    assert max(len(line.text) for line in diff_lines(found)) <= 120
