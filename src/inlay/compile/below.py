"""Adapter: what runs a graph in this process: torch itself, or code that Inductor makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.ops.define import DECOMPOSITIONS
from inlay.program.bindings import Role
from inlay.program.graphs import copy_graph
from inlay.state import canonical_updates, in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inlay.program.program import Program

BELOW = ("eager", "inductor")
"""What may run the program."""


def run_below(below: str, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Something that computes `module`: itself, or code that Inductor makes of it."""
    if below == "eager":
        run: Callable[..., Any] = module.forward
        return run
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    compiled: Any = compile_fx(module, list(inputs), decompositions={**select_decomp_table(), **DECOMPOSITIONS})
    return compiled  # type: ignore[no-any-return]


def runnable(program: Program, same: Sequence[int | None]) -> fx.GraphModule:
    """The program as a module that takes its flat inputs, writes to those it mutates, and returns its flat outputs.

    `same` says for every value to return which input it is; None takes the program's next output.
    """
    made = in_place(canonical_updates(program)[0])
    graph = copy_graph(made.program.graph)
    root = graph.owning_module or torch.nn.Module()
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    output = graph.output_node()
    values: Any = output.args[0]
    inputs = [placeholders[row.name] for row in program.bindings.of(Role.INPUT)]
    computed = iter([value for row, value in zip(program.bindings.outs, values, strict=True) if row.alias is None])
    output.args = (tuple(next(computed) if each is None else inputs[each] for each in same),)
    for row in program.bindings.of(Role.CONSTANT):
        root.register_buffer(row.name, program.tensors[row.name].read(), persistent=False)
        node = placeholders[row.name]
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(row.name))
        graph.erase_node(node)
    return fx.GraphModule(root, graph, class_name="Inlay")
