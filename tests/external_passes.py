"""Passes as other people write them, for `package.module:callable`: they know nothing of Inlay."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

aten = torch.ops.aten


def _swap(graph: fx.Graph, old: Any, new: Any) -> int:
    """Make every call of `old` a new call of `new`, without a type."""
    count = 0
    for node in list(graph.nodes):
        if node.target is old:
            with graph.inserting_before(node):
                made = graph.call_function(new, node.args, node.kwargs)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            count += 1
    return count


def returns_module(gm: fx.GraphModule) -> fx.GraphModule:
    _swap(gm.graph, aten.relu.default, aten.gelu.default)
    gm.recompile()
    return gm


def in_place(gm: fx.GraphModule) -> None:
    _swap(gm.graph, aten.relu.default, aten.gelu.default)


def nothing(gm: fx.GraphModule) -> fx.GraphModule:
    return gm


def over_graph(graph: fx.Graph) -> None:
    _swap(graph, aten.relu.default, aten.gelu.default)


class Based(PassBase):
    def call(self, graph_module: fx.GraphModule) -> PassResult:
        found = _swap(graph_module.graph, aten.relu.default, aten.gelu.default)
        return PassResult(graph_module, bool(found))


based = Based()


class PostGrad:
    """What Inductor calls a custom graph pass: a graph goes in, and a `uuid` says which pass it is."""

    def __call__(self, graph):  # type: ignore[no-untyped-def]
        _swap(graph, aten.relu.default, aten.gelu.default)

    def uuid(self) -> str:
        return "1"


def inductor_pass() -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Real(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            _swap(graph, aten.relu.default, aten.gelu.default)

        def uuid(self) -> str:
            return "1"

    return Real()


class Patterns:
    """Applied, not called; says how often it matched."""

    def apply(self, gm: fx.GraphModule) -> int:
        return _swap(gm.graph, aten.relu.default, aten.gelu.default)


class Counted:
    """A pass that keeps its count, as vLLM's pattern passes do; this one adds to it in every run."""

    def __init__(self) -> None:
        self.matched_count = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.matched_count += _swap(graph, aten.relu.default, aten.gelu.default)


def _registered(search: Any, replacement: Any, *example: torch.Tensor) -> Any:
    from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

    made = PatternMatcherPass()
    register_replacement(search, replacement, list(example), fwd_only, made)
    return made


def relu_patterns() -> Any:
    """A real collection of Inductor's, for what a captured program has."""
    return _registered(lambda x: aten.relu(x), lambda x: aten.sigmoid(x), torch.empty(2, 3))


def post_grad_patterns() -> Any:
    """One for what Inductor decomposes a program to: no captured program has these operators."""

    def search(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = aten.mm(x, weight)
        return hidden / (torch.exp(-hidden) + 1)

    return _registered(search, lambda x, weight: aten.mm(x, weight), torch.empty(2, 3), torch.empty(3, 4))


def with_functions(gm: fx.GraphModule) -> fx.GraphModule:
    """Plain torch functions and methods, as symbolic_trace would give them."""
    for node in list(gm.graph.nodes):
        if node.target is aten.relu.default:
            with gm.graph.inserting_before(node):
                one = gm.graph.call_function(torch.nn.functional.gelu, node.args)
                two = gm.graph.call_method("add", (one, 0.5))
            node.replace_all_uses_with(two)
            gm.graph.erase_node(node)
    return gm


def retraced(gm: fx.GraphModule) -> fx.GraphModule:
    """A new GraphModule: other names, no types, one more dead node."""
    graph = fx.Graph()
    held: dict[fx.Node, Any] = {}
    for index, node in enumerate(gm.graph.nodes):
        if node.op == "placeholder":
            held[node] = graph.placeholder(f"in_{index}")
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], held.__getitem__))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), held.__getitem__)
            held[node] = graph.call_function(node.target, args, kwargs)
            graph.call_function(aten.neg.default, (held[node],))
    return fx.GraphModule(gm, graph)


def keeps_a_stale_type(gm: fx.GraphModule) -> None:
    """Changes what a node computes and leaves the type it had."""
    for node in gm.graph.nodes:
        if node.target is aten.relu.default:
            node.target = aten.to.dtype
            node.args = (*node.args, torch.float64)


def drops_an_input(gm: fx.GraphModule) -> fx.GraphModule:
    first = next(node for node in gm.graph.nodes if node.op == "placeholder" and not node.users)
    gm.graph.erase_node(first)
    return gm


def swaps_inputs(gm: fx.GraphModule) -> None:
    one, two, *_ = [node for node in gm.graph.nodes if node.op == "placeholder"]
    two.append(one)


def drops_an_output(gm: fx.GraphModule) -> None:
    output = next(iter(reversed(gm.graph.nodes)))
    output.args = (output.args[0][:-1],)


def widens_an_output(gm: fx.GraphModule) -> None:
    output = next(iter(reversed(gm.graph.nodes)))
    *rest, last = output.args[0]
    with gm.graph.inserting_before(output):
        wide = gm.graph.call_function(aten._to_copy.default, (last,), {"dtype": torch.float64})
    output.args = ((*rest, wide),)


def writes_to_an_input(gm: fx.GraphModule) -> None:
    x = next(node for node in gm.graph.nodes if node.name == "x")
    relu = next(node for node in gm.graph.nodes if node.target is aten.relu.default)
    with gm.graph.inserting_before(relu):
        view = gm.graph.call_function(aten.view.default, (x, [-1]))
        gm.graph.call_function(aten.add_.Tensor, (view, 1))


def brings_a_tensor(gm: fx.GraphModule) -> None:
    gm.register_buffer("mine", torch.ones(1))
    relu = next(node for node in gm.graph.nodes if node.target is aten.relu.default)
    with gm.graph.inserting_before(relu):
        mine = gm.graph.get_attr("mine")
        relu.args = (gm.graph.call_function(aten.add.Tensor, (relu.args[0], mine)),)


def calls_a_module(gm: fx.GraphModule) -> None:
    gm.add_submodule("act", torch.nn.GELU())
    relu = next(node for node in gm.graph.nodes if node.target is aten.relu.default)
    with gm.graph.inserting_before(relu):
        relu.args = (gm.graph.call_module("act", relu.args),)


def returns_a_string(gm: fx.GraphModule) -> str:
    return "done"


def breaks(gm: fx.GraphModule) -> fx.GraphModule:
    _swap(gm.graph, aten.relu.default, aten.gelu.default)
    raise KeyError("flashinfer_rmsnorm")


class NeedsArguments:
    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        return gm


NUMBER = 3
