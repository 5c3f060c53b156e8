"""Watching pattern passes: counts, reasons, and that nothing else changes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.pattern_matcher import (
    Arg,
    CallFunction,
    Ignored,
    KeywordArg,
    PatternMatcherPass,
    fwd_only,
    register_graph_pattern,
    register_replacement,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from inlay.insight.watch import PassRecord, misses, observer, watch_patterns
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

pytestmark = pytest.mark.fast
aten = torch.ops.aten


def _norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * w


def _fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * w  # any other function: only matches are of interest


def _pass(check: Callable[[Any], bool] = lambda match: True, name: str | None = "norms") -> PatternMatcherPass:
    made = PatternMatcherPass(pass_name=name)
    with FakeTensorMode():
        example = [torch.empty(4, 8), torch.empty(8)]
        register_replacement(_norm, _fused, example, fwd_only, [made], extra_check=check)
    return made


def _graph(function: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    with FakeTensorMode():
        return fwd_only(function, [torch.empty(shape) for shape in shapes])


def _watch(made: PatternMatcherPass, module: fx.GraphModule) -> PassRecord:
    with watch_patterns() as records:
        made.apply(module)
    (record,) = records
    assert not record.error, record.error
    return record


def _other_eps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)) * w


def _other_axis(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)) * w


def _swapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _negated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return -(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * w


def _read_twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = x.pow(2).mean(-1, keepdim=True)
    return (x * torch.rsqrt(mean + 1e-6)) * w, mean.exp()


def _cube(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)) * w


def _square_root(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * w


@pytest.mark.parametrize(
    ("function", "kind", "node", "text"),
    [
        (_other_eps, Reason.CONSTANT, "add", "other of add is 1e-05; expected 1e-06"),
        (_other_axis, Reason.AXIS, "mean", "dim of mean is [0]; expected [-1]"),
        (_swapped, Reason.MISSING, "mul_1", "the operands of mul_1 are swapped"),
        (_negated, Reason.EXTRA, "neg", "neg (aten.neg.default) stands in between"),
        (_read_twice, Reason.ANOTHER_CONSUMER, "mean", "mean is also read by exp"),
        (_cube, Reason.CONSTANT, "pow_1", "exponent of pow_1 is 3; expected 2"),
        (_square_root, Reason.MISSING, "sqrt", "aten.rsqrt.default expected, aten.sqrt.default found"),
    ],
)
def test_the_reason_of_a_miss(function: Any, kind: Reason, node: str, text: str) -> None:
    record = _watch(_pass(), _graph(function, (4, 8), (8,)))
    assert (record.name, record.num_patterns, record.matches, record.places) == ("norms", 1, 0, ())
    finding = record.near_misses[0]
    assert (finding.transform, finding.kind, finding.node) == ("_norm", kind, node)
    assert text in finding.text


def test_matches_are_counted_and_are_not_misses() -> None:
    def two(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _norm(_norm(x, w).sin(), w)

    record = _watch(_pass(), _graph(two, (4, 8), (8,)))
    assert (record.matches, dict(record.patterns), record.findings) == (2, {"_norm": 2}, ())


def test_what_is_far_from_the_pattern_is_no_near_miss() -> None:
    record = _watch(_pass(), _graph(lambda x, w: (x * w).sin() + x, (4, 8), (8,)))
    assert (record.matches, record.near_misses) == (0, ())


def test_operators_of_every_graph_alone_are_no_near_miss() -> None:
    """The graph has three products and an addition: with one operator missing it is a near miss, with two not."""

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (torch.erf(x * 0.7) + 1)

    def gelu_of_sine(x: torch.Tensor) -> torch.Tensor:
        return gelu(torch.sin(x))

    def products(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (x * 0.7 + 1)

    def both(x: torch.Tensor, y: torch.Tensor) -> Any:
        return gelu_of_sine(x), products(y)

    def pass_of(pattern: Any) -> PatternMatcherPass:
        made = PatternMatcherPass(pass_name="gelu")
        with FakeTensorMode():
            register_replacement(pattern, torch.cos, [torch.empty(4, 8)], fwd_only, [made])
        return made

    (miss,) = _watch(pass_of(gelu), _graph(products, (4, 8))).near_misses
    assert "aten.erf.default expected" in miss.text
    assert _watch(pass_of(gelu_of_sine), _graph(products, (4, 8))).findings == ()
    record = _watch(pass_of(gelu_of_sine), _graph(both, (4, 8), (4, 8)))
    assert (record.matches, len(record.findings)) == (1, 1)


def test_one_operator_between_common_ones() -> None:
    def search(x: torch.Tensor) -> torch.Tensor:
        return x.permute(1, 0).relu().permute(1, 0)

    made = PatternMatcherPass(pass_name="between")
    with FakeTensorMode():
        register_replacement(search, torch.cos, [torch.empty(4, 8)], fwd_only, [made])
    (miss,) = _watch(made, _graph(lambda x: x.permute(1, 0).tanh().permute(1, 0), (4, 8))).near_misses
    assert "aten.relu.default expected" in miss.text


def test_one_operator_twice() -> None:
    """Two calls lack, of one operator."""

    def gates(c: torch.Tensor, f: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return c * torch.sigmoid(f) + torch.sigmoid(i) * g

    def other(c: torch.Tensor, f: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return c * torch.tanh(f) + torch.tanh(i) * g

    made = PatternMatcherPass(pass_name="gates")
    with FakeTensorMode():
        example = [torch.empty(4, 8) for _ in range(4)]
        register_replacement(gates, lambda c, f, i, g: c + f + i + g, example, fwd_only, [made])
    (miss,) = _watch(made, _graph(other, *[(4, 8)] * 4)).near_misses
    assert "aten.sigmoid.default expected" in miss.text


def test_a_check_of_the_author() -> None:
    def refuses(match: Any) -> bool:
        return False

    finding = _watch(_pass(refuses), _graph(_norm, (4, 8), (8,))).near_misses[0]
    assert finding.kind is Reason.REFUSED
    assert "its extra_check returned False (test_a_check_of_the_author.<locals>.refuses, test_watch.py:" in finding.text


def test_of_patterns_with_other_constants_the_closest_is_named() -> None:
    """Inductor first matches without constants, so every pattern of a family is refused by its own constants."""

    def family(eps: float, scale: float, power: int = 2) -> Callable[..., torch.Tensor]:
        return lambda x, w: (x.pow(power).sum(power - 2) + eps) * scale - w * eps

    made = PatternMatcherPass(pass_name="family")
    with FakeTensorMode():
        for number, search in enumerate((family(1e-3, 9.0, 3), family(1e-5, 2.0), family(1e-6, 3.0))):
            search.__name__ = search.__qualname__ = f"search_{number}"
            register_replacement(search, _fused, [torch.empty(8, 8), torch.empty(8)], fwd_only, [made])
    finding, *others = _watch(made, _graph(family(1e-6, 4.0), (8, 8), (8,))).near_misses
    assert (finding.transform, finding.node, others) == ("search_2", "mul", [])
    assert "other of mul is 4.0; expected 3.0" in finding.text
    far = PatternMatcherPass(pass_name="far")
    with FakeTensorMode():
        register_replacement(family(1e-3, 9.0, 3), _fused, [torch.empty(8, 8), torch.empty(8)], fwd_only, [far])
    (finding,) = _watch(far, _graph(family(1e-6, 4.0), (8, 8), (8,))).near_misses
    assert "Inductor's matcher says: constant_args: " in finding.text


def test_a_write_between() -> None:
    def written(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        y.add_(1)
        return (x * torch.rsqrt(mean + 1e-6)) * w

    module = _graph(written, (4, 8), (8,), (3,))
    finding = _watch(_pass(), module).near_misses[0]
    assert (finding.kind, finding.node) == (Reason.MUTATION, "add_")


def test_written_patterns() -> None:
    """Ignored arguments, `_users`, positional arguments, two objects of one name."""
    made = PatternMatcherPass(pass_name="written")
    twice = CallFunction(aten.exp.default, KeywordArg("x"), _users=2)
    pattern = CallFunction(aten.add.Tensor, CallFunction(aten.mul.Tensor, twice, Ignored()), twice)

    @register_graph_pattern(pattern, pass_dict=made)
    def handler(match: Any, x: Any) -> None:
        pass

    def matching(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = x.exp()
        return value * y + value

    def read_once(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.exp() * y + x.exp()

    assert _watch(made, _graph(matching, (3,), (3,))).matches == 1
    record = _watch(made, _graph(read_once, (3,), (3,)))
    assert record.matches == 0
    assert record.near_misses[0].transform == "test_written_patterns.handler"
    assert "exp expected, exp_1 found" in record.near_misses[0].text
    sums = PatternMatcherPass(pass_name="sums")

    @register_graph_pattern(
        CallFunction(aten.exp.default, CallFunction(aten.sum.dim_IntList, Arg(), [1])), pass_dict=sums
    )
    def sum_handler(match: Any, x: Any) -> None:
        pass

    finding = _watch(sums, _graph(lambda x: x.sum([1], keepdim=True).exp(), (3, 4))).near_misses[0]
    assert "keepdim of sum_1 is True; expected none" in finding.text


def test_replace_pattern_of_torch_fx() -> None:
    def pattern(x: Any) -> Any:
        return aten.mul.Tensor(aten.neg.default(x), 2)

    def other(x: Any) -> Any:
        return aten.exp.default(x)

    module = _graph(lambda x: (x.neg() * 2).sin() + x.neg() * 3, (4,))
    with watch_patterns() as records:
        replaced = torch.fx.replace_pattern(module, pattern, other)
    (record,) = records
    assert record.matches == len(replaced) == 1
    assert record.name == "test_watch.test_replace_pattern_of_torch_fx"
    finding = record.near_misses[0]
    assert (finding.transform, finding.kind) == ("test_replace_pattern_of_torch_fx.pattern", Reason.CONSTANT)
    assert "other of mul_1 is 3; expected 2" in finding.text


def test_originals_come_back() -> None:
    originals = PatternMatcherPass.apply, SubgraphMatcher.match
    with watch_patterns():
        with watch_patterns():
            assert PatternMatcherPass.apply is not originals[0]
        assert PatternMatcherPass.apply is not originals[0]
    assert (PatternMatcherPass.apply, SubgraphMatcher.match) == originals
    with pytest.raises(RuntimeError, match="inside"), watch_patterns():
        raise RuntimeError("inside")
    assert PatternMatcherPass.apply is originals[0]


def test_another_library_wraps_it_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wrapped stays, is called once, and can be watched again."""
    monkeypatch.setattr(observer, "_embedded", set())
    monkeypatch.setattr(PatternMatcherPass, "apply", PatternMatcherPass.apply)
    calls = []
    with watch_patterns() as first:
        inner = PatternMatcherPass.apply

        def wrapped(self: Any, gm: Any) -> int:
            calls.append(gm)
            return inner(self, gm)

        PatternMatcherPass.apply = wrapped  # type: ignore[method-assign]
    made = _pass()
    assert made.apply(_graph(_norm, (4, 8), (8,))) == 1
    with watch_patterns() as second:
        assert made.apply(_graph(_norm, (4, 8), (8,))) == 1
    assert PatternMatcherPass.apply is wrapped
    assert (len(calls), len(first), len(second)) == (2, 0, 1)


@pytest.mark.parametrize("function", [_norm, _negated, _read_twice])
def test_the_graph_is_the_same_as_without(function: Any) -> None:
    plain, watched = _graph(function, (4, 8), (8,)), _graph(function, (4, 8), (8,))
    made = _pass()
    entries = [id(entry) for each in made.patterns.values() for entry in each]
    made.apply(plain)
    _watch(made, watched)
    assert str(plain.graph) == str(watched.graph)
    assert [set(node.meta) for node in watched.graph.nodes] == [set(node.meta) for node in plain.graph.nodes]
    assert [id(entry) for each in made.patterns.values() for entry in each] == entries


def test_an_error_of_the_search_does_not_reach_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(misses, "copy_graph", fail)
    module = _graph(_negated, (4, 8), (8,))
    with watch_patterns() as records:
        assert _pass().apply(module) == 0
    assert records[0].error == "ZeroDivisionError: planted"


def test_an_error_of_the_pass_is_raised_as_it_is() -> None:
    def fails(match: Any) -> bool:
        raise KeyError("of the author")

    with pytest.raises(KeyError, match="of the author"), watch_patterns():
        _pass(fails).apply(_graph(_norm, (4, 8), (8,)))


def test_threads() -> None:
    """Tracing in several threads is not possible in torch, so the graphs and the pass are made before."""
    made = PatternMatcherPass(pass_name="negations")
    register_graph_pattern(CallFunction(aten.exp.default, CallFunction(aten.neg.default, Arg())), pass_dict=made)(
        lambda match, x: None
    )
    graphs = [_graph(lambda x: x.neg().exp() + x.neg().sin(), (3,)) for _ in range(12)]
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda part=graphs[start::3]: counts.extend(map(made.apply, part)))
        for start in range(3)
    ]
    with watch_patterns() as records:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert counts == [1] * 12
    assert [record.matches for record in records] == [1] * 12
    assert not [record.error for record in records if record.error]


def test_a_pass_without_a_name_is_called_as_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _pass(name=None)
    monkeypatch.setitem(globals(), "UNNAMED", [None, made])
    assert _watch(made, _graph(_norm, (4, 8), (8,))).name == "test_watch.UNNAMED[1]"


def test_counts_of_a_compilation_are_those_of_torch() -> None:
    """Inductor's own passes: a dropout that is removed, a product and an addition, attention."""

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)).div(2.0).softmax(-1)
        return (scores @ v).flatten(1) @ b.t() + b.sum(1)

    sizes = ((2, 3, 4, 4), (2, 3, 4, 4), (2, 3, 4, 4), (5, 48))
    counters.clear()
    torch.compiler.reset()
    with config.patch(force_disable_caches=True), watch_patterns() as records, torch.no_grad():
        torch.compile(model)(*(torch.randn(size) for size in sizes))
    assert not [record.error for record in records if record.error]
    assert sum(record.matches for record in records) == counters["inductor"]["pattern_matcher_count"] > 0
    names = {record.name: record.matches for record in records}
    assert names["joint_graph.patterns"] + names.get("joint_graph.early_patterns", 0) > 0
    assert {record.compile_id for record in records} == {"0/0"}
