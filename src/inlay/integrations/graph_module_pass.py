"""Inlay's transforms as `GraphModule → GraphModule` passes, for other pass managers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.program.graph_import import find_attribute, import_graph
from inlay.program.graphs import subgraphs
from inlay.transforms.base import Transform, find_transform
from inlay.transforms.pass_manager import check_metadata

if TYPE_CHECKING:
    from collections.abc import Callable


def graph_pass(transform: str | Transform) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """Return a pass over graphs of functional ATen operators with `meta["val"]`, such as those of torch.export.

    It returns a new module and does not change its argument. If nothing matched, it returns its argument.

    >>> import torch
    >>> def gated(x):
    ...     return torch.nn.functional.silu(x) * (x + 1)
    >>> class Gated(torch.nn.Module):
    ...     def forward(self, x):
    ...         return gated(x)
    >>> exported = torch.export.export(Gated(), (torch.ones(3),)).run_decompositions({})
    >>> result = graph_pass("match_swiglu")(exported.graph_module)
    >>> [str(node.target) for node in result.graph.nodes if node.op == "call_function"]
    ['aten.add.Tensor', 'inlay.swiglu.default']
    """
    step = find_transform(transform)() if isinstance(transform, str) else transform

    def run(module: fx.GraphModule) -> fx.GraphModule:
        before = import_graph(module, step.name)
        applied = step.apply(before.copy())
        if not applied.sites:
            return module
        graph = applied.program.graph
        held: dict[str, Any] = dict(subgraphs(graph))
        for node in graph.nodes:
            if node.op == "get_attr" and node.target not in held:
                held[node.target] = find_attribute(module, node.target)
        made = fx.GraphModule(held, graph, class_name=type(module).__name__)
        check_metadata(applied.program, before)  # after the module exists, which holds the attributes
        return made

    return run
