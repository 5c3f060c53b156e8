"""Pattern transforms: reasons, overlaps, nested graphs, mutation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from inlay.program.graphs import TypeFormatter
from inlay.program.symbols import FakeValues
from inlay.program.text.printer import dump
from inlay.program.type_checks import CallTypes, type_mismatch
from inlay.rewrite import Reason
from inlay.testing import program_of
from inlay.transforms import PatternTransform
from inlay.transforms.base import TransformOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.rewrite import Match

pytestmark = pytest.mark.fast


class ReluTanh(PatternTransform):
    name = "relu_tanh"

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"x": torch.ones(5, dtype=dtype)}

    def pattern(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu().tanh().relu()

    def replacement(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.relu().tanh()


def _run(function: Any, *args: Any, rule: PatternTransform | None = None) -> Any:
    program = program_of(function, args)
    return program, (rule or ReluTanh()).apply(program)


def test_a_pattern_may_depend_on_its_class_and_options() -> None:
    """Traced patterns are shared between instances: only if they are the same."""

    class Powers(PatternTransform):
        name = "powers"

        class Options(TransformOptions):
            power: int = 2

        options: Options

        def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
            return {"x": torch.ones(5, dtype=dtype)}

        def activation(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

        def pattern(self, x: torch.Tensor) -> torch.Tensor:
            return self.activation(x).pow(self.options.power)

        def replacement(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.stack([self.activation(x)] * self.options.power).prod(0)

    class OfTanh(Powers):
        name = "powers_of_tanh"

        def activation(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    x = torch.randn(4)
    assert _run(lambda x: x.relu().pow(2), x, rule=Powers())[1].sites == 1
    assert _run(lambda x: x.tanh().pow(2), x, rule=Powers())[1].sites == 0
    assert _run(lambda x: x.tanh().pow(2), x, rule=OfTanh())[1].sites == 1
    assert _run(lambda x: x.relu().pow(2), x, rule=OfTanh())[1].sites == 0
    assert _run(lambda x: x.relu().pow(2), x, rule=Powers(Powers.Options(power=3)))[1].sites == 0
    assert _run(lambda x: x.relu().pow(3), x, rule=Powers(Powers.Options(power=3)))[1].sites == 1


def test_overlapping_sites_resolve_and_the_loser_is_told() -> None:
    program, outcome = _run(lambda x: x.relu().tanh().relu().tanh().relu(), torch.randn(4))
    assert outcome.sites == 1
    (miss,) = outcome.misses
    assert miss.reason.startswith("overlapped by the site at relu_1")
    assert program.op_counts() == {"aten.relu.default": 2, "aten.tanh.default": 2}


def test_the_first_of_two_patterns_that_match() -> None:
    class TwoWays(ReluTanh):
        def pattern_short(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh().relu()

        def replacement_args(self, pattern: str) -> Mapping[str, Any]:
            return {"is_short": pattern == "pattern_short"}

        def replacement(self, x: torch.Tensor, *, is_short: bool) -> torch.Tensor:  # type: ignore[override]
            return x.sigmoid() if is_short else x.tanh()

    program, outcome = _run(lambda x: x.relu().tanh().relu(), torch.randn(4), rule=TwoWays())
    assert outcome.sites == 1
    assert program.op_counts() == {"aten.tanh.default": 1}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (lambda y: (y.tanh().relu(), y))(x.relu()), "another consumer: relu"),
        (lambda x: x.sigmoid().tanh().relu(), "missing node: aten.relu.default expected, aten.sigmoid.default found"),
    ],
)
def test_reasons(function: Any, reason: str) -> None:
    _, outcome = _run(function, torch.randn(4))
    assert not outcome.sites
    assert any(reason in miss.reason for miss in outcome.misses), [miss.reason for miss in outcome.misses]


def test_refusals_are_kept() -> None:
    class Refuses(ReluTanh):
        def check(self, match: Match) -> None:
            match.require(match.value("x").dim() == 2, Reason.SHAPE, "only matrices")

    program, outcome = _run(lambda x: x.relu().tanh().relu(), torch.randn(4), rule=Refuses())
    assert not outcome.sites
    assert [(miss.is_mismatch, miss.reason) for miss in outcome.misses] == [(False, "shape: only matrices")]
    assert program.op_counts()["aten.relu.default"] == 2


def test_mutation_in_between_is_refused() -> None:
    @torch.library.custom_op("inlay_test::bump", mutates_args={"x"})
    def bump(x: torch.Tensor) -> None:
        x.add_(1)

    program = program_of(lambda x: x.relu().tanh().relu(), [torch.randn(4)])
    tanh = next(node for node in program.graph.nodes if node.target is torch.ops.aten.tanh.default)
    before = ReluTanh().apply(program.copy())
    assert before.sites == 1
    source = next(iter(program.graph.nodes))
    with program.graph.inserting_before(tanh):
        node = program.graph.call_function(torch.ops.inlay_test.bump.default, (source,))
        node.meta["val"] = None
    outcome = ReluTanh().apply(program)
    assert not outcome.sites
    assert ["mutation between" in miss.reason for miss in outcome.misses] == [True]


class TwoProducts(PatternTransform):
    name = "two_products"

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        return {name: torch.ones(5, 5, dtype=dtype) for name in "xvw"}

    def pattern(self, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ v, x @ w

    def replacement(self, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.bmm(torch.stack([x, x]), torch.stack([v, w])).unbind()


def test_one_call_where_the_pattern_has_two() -> None:
    class Gates(PatternTransform):
        name = "gates"

        def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
            return {"x": torch.ones(5, dtype=dtype), "y": torch.ones(5, dtype=dtype)}

        def pattern(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.relu() * y.relu()

        def replacement(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clamp(min=0) * y.clamp(min=0)

    program, outcome = _run(lambda x: (lambda y: y * y)(x.relu()), torch.randn(4), rule=Gates())
    assert not outcome.sites
    assert [miss.text for miss in outcome.misses] == ["relu would match two nodes of the pattern"]
    assert program.op_counts() == {"aten.relu.default": 1, "aten.mul.Tensor": 1}


def test_a_result_that_is_computed_from_another() -> None:
    class BothSteps(ReluTanh):
        def pattern(self, x: torch.Tensor) -> Any:
            first = x.relu()
            return first.tanh(), first

        def replacement(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            first = x.clamp(min=0)
            return first.tanh(), first

    def both(x: torch.Tensor) -> Any:
        first = x.relu()
        return first.tanh(), first + 1

    program, outcome = _run(both, torch.randn(4), rule=BothSteps())
    assert outcome.sites == 1
    x = torch.randn(4)
    for one, two in zip(program.module()(x), both(x), strict=True):
        assert torch.equal(one, two)


def _reads_early(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
    first = (x @ v).relu()
    return first, x @ w


def test_a_result_that_is_read_before_the_last_call() -> None:
    program, outcome = _run(_reads_early, *(torch.randn(5, 5) for _ in "xvw"), rule=TwoProducts())
    assert outcome.sites == 1
    args = [torch.randn(5, 5) for _ in "xvw"]
    for one, two in zip(program.module()(*args), _reads_early(*args), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, v, w: x @ (x @ v).relu(),
        lambda x, v, w: ((x @ v).relu(), x @ w.relu()),
    ],
    ids=["the second needs the first", "the second needs what comes after a reader of the first"],
)
def test_a_result_that_is_read_too_early(function: Any) -> None:
    program, outcome = _run(function, *(torch.randn(5, 5) for _ in "xvw"), rule=TwoProducts())
    assert not outcome.sites
    assert any("an input of the pattern, is computed" in miss.reason for miss in outcome.misses)
    assert program.op_counts()["aten.matmul.default"] == 2


def test_nested_graphs_are_rewritten() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.relu().tanh().relu(), lambda y: y.relu(), (x,))

    program, outcome = _run(branches, torch.randn(4))
    assert outcome.sites == 1
    x = torch.rand(4)
    assert torch.equal(program.module()(x), x.relu().tanh())


def test_a_pattern_that_gives_another_type_is_refused() -> None:
    """The walker compares calls, not types: the pattern is computed on the site's own inputs to be sure."""

    class Product(PatternTransform):
        name = "product"

        def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
            return {"x": torch.ones(3, 5, dtype=dtype), "y": torch.ones(3, 5, dtype=dtype)}

        def pattern(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x.relu() * y).relu()

        def replacement(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return y.relu() * x.relu()

    program = program_of(lambda x, y: (x.relu() * y).relu(), [torch.randn(3, 5), torch.randn(3, 5)])
    node = next(node for node in program.graph.nodes if node.name == "relu_1")
    node.meta["val"] = node.meta["val"].double()
    before = dump(program)
    outcome = Product().apply(program)
    assert not outcome.sites
    assert any("the pattern gives" in miss.reason for miss in outcome.misses)
    assert dump(program) == before


def test_operands_of_commutative_operators_may_change_places() -> None:
    class Sum(PatternTransform):
        name = "sum"

        def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
            return {"x": torch.ones(5, dtype=dtype), "y": torch.ones(5, dtype=dtype)}

        def pattern(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.tanh() * y + x

        def replacement(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.addcmul(x, x.tanh(), y)

    for function in (lambda x, y: x + y * x.tanh(), lambda x, y: x + x.tanh() * y, lambda x, y: y * x.tanh() + x):
        _, outcome = _run(function, torch.randn(4), torch.randn(4), rule=Sum())
        assert outcome.sites == 1
    for function in (lambda x, y: y + y * x.tanh(), lambda x, y: torch.add(x.tanh() * y, x, alpha=2)):
        _, outcome = _run(function, torch.randn(4), torch.randn(4), rule=Sum())
        assert outcome.sites == 0


def test_a_site_that_reads_another_site() -> None:
    class Gate(PatternTransform):
        name = "gate"

        def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
            return {"x": torch.ones(5, dtype=dtype), "y": torch.ones(5, dtype=dtype)}

        def pattern(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.tanh() * y

        def replacement(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return y * x.tanh()

    program, outcome = _run(lambda x, y: (x.tanh() * y).tanh() * x, torch.randn(4), torch.randn(4), rule=Gate())
    assert outcome.sites == 2
    x, y = torch.rand(4), torch.rand(4)
    assert torch.equal(program.module()(x, y), (x.tanh() * y).tanh() * x)


def test_one_value_for_two_arguments() -> None:
    """The trace of a replacement is kept for sites of the same types: it must not remember that two were one."""

    class Product(PatternTransform):
        name = "product"

        def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
            return {"x": torch.ones(5, dtype=dtype), "y": torch.ones(5, dtype=dtype)}

        def pattern(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.relu() * y.tanh()

        def replacement(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return y.tanh() * x.relu()

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.relu() * x.tanh(), x.relu() * y.tanh()

    program, outcome = _run(function, torch.randn(4), torch.randn(4), rule=Product())
    assert outcome.sites == 2
    x, y = torch.randn(4), torch.randn(4)
    for one, two in zip(program.module()(x, y), function(x, y), strict=True):
        assert torch.equal(one, two)


def test_a_value_inside_the_pattern_is_no_argument() -> None:
    class Square(PatternTransform):
        name = "square"

        def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
            return {"x": torch.ones(5, dtype=dtype), "y": torch.ones(5, dtype=dtype)}

        def pattern(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.tanh() * y

        def replacement(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return y * x.tanh()

    _, outcome = _run(lambda x: (lambda y: y * y)(x.tanh()), torch.randn(4), rule=Square())
    assert not outcome.sites
    assert any("is both y and inside the pattern" in miss.reason for miss in outcome.misses)


class Turned(PatternTransform):
    """The same values, column by column in memory."""

    name = "turned"

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"x": torch.ones(3, 5, dtype=dtype)}

    def pattern(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu().tanh()

    def replacement(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.relu().tanh().t().contiguous().t()


@pytest.mark.parametrize(
    ("after", "copies"),
    [
        (lambda y: y, 1),
        (lambda y: y + 1, 1),
        (lambda y: (y * 2).exp().neg(), 1),
        (lambda y: y.as_strided((5,), (1,), 4).sum(), 1),
        (lambda y: (y * 2).as_strided((5,), (1,), 4).sum(), 1),
        (lambda y: (y.as_strided((5,), (1,), 4).sum(), y), 1),
        (lambda y: y.sum(0), 0),
        (lambda y: (y + 1).sum(), 0),
        (lambda y: y @ y.t(), 0),
    ],
)
def test_a_replacement_in_another_layout(after: Any, copies: int) -> None:
    """Whoever sees how a value lies in memory sees it as before; nobody else pays for a copy."""
    x = torch.randn(3, 5)
    program, outcome = _run(lambda x: after(x.relu().tanh()), x, rule=Turned())
    assert outcome.sites == 1, outcome.misses
    wanted, found = after(x.relu().tanh()), program.module()(x)
    for one, two in zip(tree_leaves(wanted), tree_leaves(found), strict=True):
        torch.testing.assert_close(two, one)
        assert two.stride() == one.stride()
    assert program.op_counts().get("aten.clone.default", 0) == copies


def _two_layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = torch.nn.functional.dropout((x @ w).view(4, 4).mT.relu(), training=False).to(torch.float32)[1:].cumsum(0)
        x = torch.cat([x, x[:1]]).clone()
    return x + x.new_zeros(4, 4)


def test_types_of_new_calls() -> None:
    """A type that was computed for a call that is alike is the one its own fake kernel gives, in its own storage."""
    program = program_of(_two_layers, (torch.randn(4, 4), torch.randn(4, 4)))
    calls, fakes = CallTypes(program), FakeValues.from_graph(program.graph)
    storages: dict[Any, str] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        for value in (calls.compute_value(node), calls.compute_value(node)):
            alone = fakes.compute_value(node)
            assert type_mismatch(value, alone, program.types) == ("", "")
            own = [x.meta["val"].untyped_storage()._cdata for x in node.all_input_nodes]
            if alone.untyped_storage()._cdata in own:  # a view
                assert value.untyped_storage()._cdata == alone.untyped_storage()._cdata
            else:
                assert storages.setdefault(value.untyped_storage(), node.name) == node.name
                assert value.untyped_storage()._cdata not in own
    assert len(calls._computed) < len([node for node in program.graph.nodes if node.op == "call_function"])


def test_sizes_that_data_decide_are_each_their_own() -> None:
    graph = torch.fx.Graph()
    fakes = FakeValues([])
    inputs = [graph.placeholder(name) for name in "ab"]
    for node in inputs:
        node.meta["val"] = fakes.tensor(torch.float32, (5,))
    program = SimpleNamespace(graph=graph, types=TypeFormatter({}))
    calls = CallTypes(program)  # type: ignore[arg-type]
    found = [calls.compute_value(graph.call_function(torch.ops.aten.nonzero.default, (node,))) for node in inputs]
    assert str(found[0].shape[0]) != str(found[1].shape[0])


class OneTooMany(ReluTanh):
    name = "one_too_many"

    def replacement(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return x.relu().tanh(), x


def test_a_replacement_that_gives_another_number_of_values() -> None:
    program, outcome = _run(lambda x: x.relu().tanh().relu(), torch.randn(4), rule=OneTooMany())
    assert outcome.sites == 0
    (miss,) = outcome.misses
    assert (miss.kind, miss.text) == (Reason.REPLACEMENT, "the replacement gives 2 values, but the pattern 1")
    assert program.op_counts() == {"aten.relu.default": 2, "aten.tanh.default": 1}


class RowByRow(Turned):
    name = "row_by_row"

    def replacement(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.relu().tanh().contiguous()


@pytest.mark.parametrize(("after", "sites"), [(lambda y: y, 0), (lambda y: y.sum(0), 1)], ids=["returned", "summed"])
def test_a_layout_that_a_copy_does_not_bring_back(after: Any, sites: int) -> None:
    """What is returned column by column stays so; where nobody sees it, the replacement may be row by row."""
    _, outcome = _run(lambda x: after(x.t().relu().tanh()), torch.randn(5, 3), rule=RowByRow())
    assert outcome.sites == sites
    assert [miss.kind for miss in outcome.misses] == [Reason.REPLACEMENT] * (1 - sites)
