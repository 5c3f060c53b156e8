from __future__ import annotations

import pytest
import torch

from inlay.program.fold import fold
from tests.synthetic_programs import Builder, irregular, layered

aten = torch.ops.aten
pytestmark = pytest.mark.fast


@pytest.mark.parametrize("layers", [2, 3, 30, 200])
def test_equal_layers_are_one_kind(layers: int) -> None:
    folds = fold(layered(layers))
    assert [(kind.size, len(kind)) for kind in folds.kinds] == [(9, layers)]
    assert folds.layer_count == layers
    assert not folds.deviations


def test_blocks_are_cut_where_one_value_crosses() -> None:
    kind = fold(layered(8)).kinds[0]
    assert len(kind.output_positions) == 1
    carried = [node for node in kind.occurrences[3].inputs if node.op != "placeholder"]
    assert carried == [kind.occurrences[2].nodes[kind.output_positions[0]]]


def test_layers_that_differ_are_reported() -> None:
    folds = fold(layered(12, odd=(5,)))
    assert [len(kind) for kind in folds.kinds] == [11]
    (deviation,) = folds.deviations
    assert deviation.extra == {"aten.tanh.default": 1}
    assert folds.layer_count == 12
    assert folds.layer_of[deviation.nodes[0]] == 5


@pytest.mark.parametrize(
    ("odd", "counts"),
    [
        (tuple(range(1, 12, 2)), {6: 2}),  # ABABAB…: 6 of each
        (tuple(range(3, 12, 4)), {9: 1, 3: 1}),  # AAAB: 9 and 3
        (tuple(range(0, 12, 4)), {9: 1, 3: 1}),  # BAAA
        (tuple(range(6, 12)), {6: 2}),  # AAAAAABBBBBB
    ],
)
def test_several_kinds(odd: tuple[int, ...], counts: dict[int, int]) -> None:
    folds = fold(layered(12, odd=odd))
    found = sorted(len(kind) for kind in folds.kinds)
    assert found == sorted(count for count, times in counts.items() for _ in range(times))
    assert folds.layer_count == 12


def test_same_operators_wired_differently_are_not_one_kind() -> None:
    make = Builder()
    hidden = make.x
    for layer in range(8):
        one = make.call(aten.relu.default, hidden)
        two = make.call(aten.relu.default, one)
        three = make.call(aten.relu.default, two)
        first, second = (one, three) if layer == 4 else (two, three)
        hidden = make.call(aten.add.Tensor, make.call(aten.mul.Tensor, first, second), hidden)
    folds = fold(make.finish(hidden))
    assert [len(kind) for kind in folds.kinds] == [7]
    (deviation,) = folds.deviations
    assert "mul_tensor_4" in {node.name for node in deviation.nodes}
    assert deviation.text == "same operators, wired differently"


def test_constants_count() -> None:
    """1, 1.0 and True are equal in Python; a program that mixes them is not a repetition."""
    make = Builder()
    hidden = make.x
    for constant in (1, 1.0, 1, 1.0, 1, 1.0):
        for _ in range(4):
            hidden = make.call(aten.mul.Tensor, hidden, constant)
        hidden = make.call(aten.relu.default, hidden)
    kinds = fold(make.finish(hidden)).kinds
    assert sorted(len(kind) for kind in kinds) in ([3], [3, 3])


def test_nothing_to_fold() -> None:
    folds = fold(irregular(300))
    assert folds.covered_node_count < 60
    assert fold(layered(1)).kinds == ()


def test_occurrences_compute_the_same_function() -> None:
    """Every occurrence of a kind, run alone on the same inputs, gives the same outputs."""
    from torch import fx

    program = layered(6)
    kind = fold(program).kinds[0]
    generator = torch.Generator().manual_seed(0)
    sizes = [(8, 8) if node.op == "placeholder" else (3, 8) for node in kind.occurrences[0].inputs]
    values = [torch.randn(size, generator=generator) for size in sizes]
    results = []
    for each in kind.occurrences:
        graph = fx.Graph()
        mapping = {node: graph.placeholder(f"in_{index}") for index, node in enumerate(each.inputs)}
        for node in each.nodes:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
        graph.output(mapping[each.nodes[kind.output_positions[0]]])
        results.append(fx.GraphModule(torch.nn.Module(), graph)(*values))
    for result in results[1:]:
        assert torch.equal(result, results[0])
