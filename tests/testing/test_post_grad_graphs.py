"""Post-grad shaping: the graphs that Inductor makes code of."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tools.fuzz_writes import operators  # noqa: F401 - registers torch.ops.inlay_fuzz

from inlay.errors import UsageError
from inlay.integrations.post_grad import FixFunctionalization
from inlay.program.graphs import all_nodes, target_text
from inlay.testing import post_grad_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def calls(graph: fx.Graph) -> Counter[str]:
    return Counter(target_text(node.target) for node in all_nodes(graph) if node.op == "call_function")


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def test_the_graph_is_what_is_lowered() -> None:
    (graph,) = post_grad_graphs(lambda x: product(product(x)), torch.ones(3, 3))
    assert calls(graph) == {"aten.mm.default": 2}
    assert all("val" in node.meta for node in graph.nodes if node.op == "call_function")


def test_a_cache_does_not_hide_it() -> None:
    for _ in range(2):
        assert len(post_grad_graphs(product, torch.ones(3, 3))) == 1


def test_pieces_and_backward_passes_are_graphs_of_their_own() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return y @ y.t()

    assert [calls(graph)["aten.mm.default"] for graph in post_grad_graphs(broken, torch.ones(3, 3))] == [1, 1]

    def trained(x: torch.Tensor, w: torch.Tensor) -> None:
        (x @ w).backward(torch.ones(3, 3))

    weight = torch.ones(3, 3, requires_grad=True)
    graphs = post_grad_graphs(trained, (torch.ones(3, 3), weight))
    assert [calls(graph)["aten.mm.default"] for graph in graphs] == [1, 1], "forward and backward"
    assert weight.grad is None, "the caller's tensor is not touched"


def test_a_branch_is_part_of_the_graph_that_calls_it() -> None:
    def either(x: torch.Tensor) -> Any:
        return torch.cond(x.shape[0] > x.sum(), product, lambda x: x @ x @ x, (x,))

    (graph,) = post_grad_graphs(either, torch.ones(3, 3))
    assert calls(graph)["aten.mm.default"] == 3


def put(cache: torch.Tensor, row: torch.Tensor) -> None:
    torch.ops.inlay_fuzz.put(cache[3], row)


def test_a_pass_is_seen() -> None:
    """A mutating operator: wrapped by functionalization, and what becomes of that after the passes."""
    given = (torch.zeros(32, 16, dtype=torch.int64), torch.ones(4, dtype=torch.int64))
    fix = FixFunctionalization()
    (graph,) = post_grad_graphs(put, given, options={"post_grad_custom_post_pass": fix})
    assert calls(graph)["inlay_fuzz.put.default"] == 1
    assert not [name for name in calls(graph) if "auto_functionalized" in name]
    assert not [name for name in calls(graph) if "clone" in name or "copy" in name], "in place"
    assert len(fix.reports) == 1


def test_a_pass_that_goes_wrong_is_seen() -> None:
    def spoil(graph: fx.Graph) -> None:
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        with graph.inserting_after(node):
            made = graph.call_function(torch.ops.aten.clone.default, (node,))
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        made.meta["val"] = node.meta["val"]

    (good,) = post_grad_graphs(product, torch.ones(3, 3))
    (bad,) = post_grad_graphs(product, torch.ones(3, 3), options={"post_grad_custom_post_pass": spoil})
    assert calls(bad) - calls(good) == {"aten.clone.default": 1}


def test_the_backend_of_inlay() -> None:
    """Its operators are spelled out below, so that Inductor fuses them."""

    def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * y

    with torch.no_grad():
        (graph,) = post_grad_graphs(
            gated, (torch.ones(3), torch.ones(3)), backend="inlay", options={"inner_backend": "inductor"}
        )
    assert not [name for name in calls(graph) if name.startswith("inlay.")]


def test_without_inductor_there_is_none() -> None:
    with pytest.raises(UsageError, match=r"No graph reached Inductor\. Use a backend that calls Inductor"):
        post_grad_graphs(product, torch.ones(3, 3), backend="eager")
