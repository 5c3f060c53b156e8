"""Build a Program from a generated graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.program.bindings import Bindings, Role
from inlay.program.facts import Facts
from inlay.program.graphs import TypeFormatter, attach_subgraphs, subgraphs
from inlay.program.program import CallSpec, Program, Symbol
from inlay.program.weights import InMemoryTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import fx


def build_program(
    graph: fx.Graph, parameters: Mapping[str, torch.Tensor] | None = None, symbols: Mapping[str, Symbol] | None = None
) -> Program:
    """Return a Program for a graph; placeholders become parameters or inputs, returned values become outputs."""
    tensors = {name: InMemoryTensor(value) for name, value in (parameters or {}).items()}
    types = TypeFormatter({raw: symbol.name for raw, symbol in (symbols or {}).items()})
    ins = [node for node in graph.nodes if node.op == "placeholder"]
    outs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    rows = [
        types.binding(node.name, Role.PARAMETER if node.name in tensors else Role.INPUT, node.meta["val"])
        for node in ins
    ]
    rows += [types.binding(f"out_{index}", Role.OUTPUT, node.meta["val"]) for index, node in enumerate(outs)]
    names = tuple(row.name for row in rows if row.role is Role.INPUT)
    calling = CallSpec.flat(names, len(outs))
    attach_subgraphs(graph, dict(subgraphs(graph)))
    return Program("fuzz", graph, Bindings(tuple(rows)), tensors, symbols or {}, calling, Facts())
