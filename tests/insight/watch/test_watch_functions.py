"""Watching passes that are functions of a graph: what they changed, what they left, and that nothing else changes."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import fwd_only
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from inlay.insight.watch import PassRecord, changes, folder, observer, watch_patterns
from inlay.integrations.post_grad import record_post_grad_graphs
from inlay.watch_startup import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import fx

pytestmark = pytest.mark.fast
aten = torch.ops.aten


@torch.library.custom_op("watch_functions::fill", mutates_args=("out",))
def fill(out: torch.Tensor, x: torch.Tensor) -> None:
    """Copy x to out."""
    out.copy_(x)


def _model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    fill(out, x.sin())
    return out.neg() + y.neg()


def _erase_first(graph: fx.Graph, target: Any) -> None:
    node = graph.find_nodes(op="call_function", target=target)[0]
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def drop_one_negation(graph: fx.Graph) -> None:
    _erase_first(graph, aten.neg.default)


def do_nothing(graph: fx.Graph) -> None:
    pass


class DropNegation(CustomGraphPass):
    """A pass as vLLM writes them."""

    def __call__(self, graph: fx.Graph) -> None:
        drop_one_negation(graph)

    def uuid(self) -> None:
        return None


class Manager(DropNegation):
    """Passes that are called one by one."""

    def __init__(self, *passes: Callable[[fx.Graph], None]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)


def _module(function: Callable[..., Any] = lambda x, y: x.neg() + y.neg()) -> fx.GraphModule:
    with FakeTensorMode():
        return fwd_only(function, [torch.empty(4), torch.empty(4)])


def _apply(function: Callable[..., Any], module: fx.GraphModule | None = None) -> list[PassRecord]:
    with watch_patterns() as records:
        GraphTransformObserver(module or _module(), "given").apply_graph_pass(function)
    assert not [record.error for record in records if record.error]
    return records


def test_what_a_function_changed_and_left() -> None:
    (record,) = _apply(drop_one_negation)
    assert (record.name, record.num_patterns, record.matches, record.findings) == (
        *("test_watch_functions.drop_one_negation", 0, 0, ()),
    )
    assert record.changes == {"removed aten.neg.default": 1, "changed aten.add.Tensor": 1}
    assert record.left["aten.neg.default"] == ("neg_1 = aten.neg.default(y_1)",)


def test_a_function_that_changes_nothing() -> None:
    (record,) = _apply(do_nothing)
    assert record.changes == {}


def test_added_calls_and_modules() -> None:
    def add_exp(module: fx.GraphModule) -> None:
        node = next(iter(module.graph.find_nodes(op="call_function", target=aten.neg.default)))
        with module.graph.inserting_after(node):
            module.graph.call_function(aten.exp.default, (node,))

    with watch_patterns() as records:
        GraphTransformObserver(_module(), "given").apply_gm_pass(add_exp)
    assert [record.changes for record in records] == [{"added aten.exp.default": 1}]


def test_many_calls_are_counted() -> None:
    def many(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x.neg()
        return x + y

    (record,) = _apply(do_nothing, _module(many))
    assert (len(record.left["aten.neg.default"]), record.num_left["aten.neg.default"]) == (8, 12)
    assert folder.left_calls(record, "aten.neg.default")[-1] == "left: 4 more calls of aten.neg.default"


def test_passes_of_a_manager_are_recorded_one_by_one() -> None:
    class Later(DropNegation):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)

    records = _apply(Manager(Manager(DropNegation()), Manager(Later(), Manager())))
    assert [(record.name, record.changes.get("removed aten.neg.default")) for record in records] == [
        *(("DropNegation", 1), ("Later", 1), ("Manager", None)),
    ]


def test_a_function_that_edits_and_calls_a_pass() -> None:
    """It is recorded if the changes are surely its own."""
    records = _apply(Manager(Manager(), drop_one_negation))
    assert [(len(record.changes), record.changes.get("removed aten.neg.default")) for record in records] == [
        *((0, None), (2, 1)),
    ]


def test_the_functions_of_a_compilation_and_the_same_graph() -> None:
    graphs: list[fx.Graph] = []

    def compile_model() -> None:
        torch.compiler.reset()
        with suppress(torch._dynamo.exc.BackendCompilerFailed), record_post_grad_graphs(graphs, stop=True):
            torch.compile(_model)(torch.randn(4), torch.randn(4))

    passes = (drop_one_negation, Manager())
    with config.patch(force_disable_caches=True, post_grad_custom_post_pass=passes), torch.no_grad():
        compile_model()
        with watch_patterns() as records:
            compile_model()
    assert str(graphs[0]) == str(graphs[1])
    assert "fill" in str(graphs[0])
    assert not [record.error for record in records if record.error]
    found = {record.name: record for record in records}
    assert "Manager" in found
    record = found["test_watch_functions.drop_one_negation"]
    assert record.changes["removed aten.neg.default"] == 1
    (left,) = (calls for name, calls in record.left.items() if name.startswith("higher_order.auto_functionalized"))
    assert len(left) == 1
    assert "(watch_functions.fill.default)(" in left[0]
    assert left[0].endswith(f"(test_watch_functions.py:{_model.__code__.co_firstlineno + 2})")


def test_originals_come_back() -> None:
    owners: list[tuple[Any, str]] = [
        (GraphTransformObserver, "apply_graph_pass"),
        (GraphTransformObserver, "apply_gm_pass"),
    ]
    owners += [(DropNegation, "__call__"), (Manager, "__call__")]
    originals = [vars(owner)[name] for owner, name in owners]
    with watch_patterns():
        assert not any(vars(owner)[name] in originals for owner, name in owners)
    assert [vars(owner)[name] for owner, name in owners] == originals
    assert "__call__" in CustomGraphPass.__abstractmethods__


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError, match="planted"), watch_patterns() as records:
        GraphTransformObserver(_module(), "given").apply_graph_pass(fail)
    assert records == []
    monkeypatch.setattr(observer, "list_calls", fail)
    with watch_patterns() as records:
        DropNegation()(_module().graph)
    assert [(record.changes, record.error) for record in records] == [({}, "ZeroDivisionError: planted")]


def test_threads() -> None:
    modules = [_module() for _ in range(12)]
    threads = [
        threading.Thread(target=lambda part=modules[start::3]: [DropNegation()(each.graph) for each in part])
        for start in range(3)
    ]
    with watch_patterns() as records:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert [record.changes["removed aten.neg.default"] for record in records] == [1] * 12


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(observer, "MAX_RECORDS", 2)
    monkeypatch.setattr(folder, "MAX_RECORDS", 3)
    monkeypatch.setattr(folder, "_counts", type(folder._counts)())
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with watch_patterns() as records:
        for _ in range(5):
            DropNegation()(_module().graph)
    assert [record.dropped for record in records] == [0, 3]
    for _ in range(5):
        folder._write(records[0])
    summed = folder.sum_records(folder.read_records(tmp_path))
    assert (summed["DropNegation"].changes["removed aten.neg.default"], summed["DropNegation"].dropped) == (3, 2)


def test_arguments_are_compared_as_text() -> None:
    """Equality of symbolic sizes would add guards."""
    graph = _module().graph
    before = changes.list_calls(graph)
    assert not changes.compare_calls(before, changes.list_calls(graph))
    node = next(node for node in graph.nodes if node.op == "call_function")
    node.args = (*node.args,)
    assert not changes.compare_calls(before, changes.list_calls(graph)), "another object of the same text"
    node.args = (node.args[0], 3)
    assert changes.compare_calls(before, changes.list_calls(graph)).total() == 1


def test_a_change_far_behind_in_a_long_list() -> None:
    """What is printed is shortened, what is compared is not."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.view.default, (x, [1] * 200))
    before = changes.list_calls(graph)
    node.args = (x, [*[1] * 199, 2])
    assert changes.compare_calls(before, changes.list_calls(graph)) == {"changed aten.view.default": 1}
