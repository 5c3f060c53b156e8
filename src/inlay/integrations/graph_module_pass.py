"""Inlay's transforms as `GraphModule → GraphModule` passes, for other pass managers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import TransformError
from inlay.program.bindings import Binding, Bindings, Role
from inlay.program.facts import Facts
from inlay.program.graphs import TypeFormatter, copy_graph, subgraphs, target_text, written_operands
from inlay.program.program import CallSpec, Program
from inlay.program.symbols import FakeValues
from inlay.transforms.base import Transform, find_transform
from inlay.transforms.pass_manager import check_metadata

if TYPE_CHECKING:
    from collections.abc import Callable


def graph_pass(transform: str | Transform) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """Return a pass over graphs of functional ATen operators with `meta["val"]`, such as those of torch.export.

    It returns a new module and does not change its argument. If nothing matched, it returns its argument.

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
        before = _to_program(module, step.name)
        applied = step.apply(before.copy())
        if not applied.sites:
            return module
        graph = applied.program.graph
        held: dict[str, Any] = dict(subgraphs(graph))
        for node in graph.nodes:
            if node.op == "get_attr" and node.target not in held:
                held[node.target] = _attribute(module, node.target)
        made = fx.GraphModule(held, graph, class_name=type(module).__name__)
        check_metadata(applied.program, before)  # after the module exists, which holds the attributes
        return made

    return run


def _to_program(module: fx.GraphModule, name: str) -> Program:
    """Convert a graph to a program in which every placeholder is an input."""
    graph = copy_graph(module.graph)
    fakes, nested = FakeValues.from_graph(graph), {target for target, _ in subgraphs(graph)}
    types, rows = TypeFormatter({}), []
    for node in graph.nodes:
        if written_operands(node):
            raise TransformError(
                f"{node.name} ({target_text(node.target)}) writes in place, but {name} requires a functional graph.",
                "Run torch.export and run_decompositions({}) first.",
            )
        if node.op == "get_attr" and node.target not in nested and "val" not in node.meta:
            node.meta["val"] = fakes.mode.from_tensor(_attribute(module, node.target), static_shapes=True)
        if node.op == "placeholder":
            rows.append(_binding(node.name, Role.INPUT, node.meta.get("val"), types))
    for index, value in enumerate(tree_leaves(next(iter(reversed(graph.nodes))).args[0])):
        held = value.meta.get("val") if isinstance(value, fx.Node) else value
        rows.append(_binding(f"output.{index}", Role.OUTPUT, held, types))
    return Program(name, graph, Bindings(tuple(rows)), {}, {}, CallSpec(None, None, ()), Facts())


def _binding(name: str, role: Role, value: Any, types: TypeFormatter) -> Binding:
    if isinstance(value, torch.Tensor):
        return Binding(name, role, name, str(value.dtype).removeprefix("torch."), types.shape(value))
    return Binding(name, role, name, "", ())


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module
