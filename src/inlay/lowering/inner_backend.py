"""Adapter: run a graph in this process, with eager torch, AOTAutograd or Inductor.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.lowering.state.in_place_writes import write_in_place
from inlay.lowering.state.index_put import canonicalize_updates
from inlay.lowering.state.state_copies import find_compiled_copies, find_functional_copies
from inlay.ops.registration import DECOMPOSITIONS
from inlay.program.bindings import Role
from inlay.program.graphs import copy_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inlay.program.program import Program
    from inlay.program.remarks import Remark

INNER_BACKENDS = ("eager", "aot_eager", "inductor")
"""Calls one by one, calls one by one after AOTAutograd has functionalized them, or compiled code."""


def compile_with(backend: str, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that computes `module`: its `forward`, or the result of AOTAutograd or Inductor."""
    if backend == "eager":
        run: Callable[..., Any] = module.forward
        return run
    if backend == "aot_eager":
        from torch._dynamo import lookup_backend

        return lookup_backend(backend)(module, list(inputs))
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    compiled: Any = compile_fx(module, list(inputs), decompositions={**select_decomp_table(), **DECOMPOSITIONS})
    return compiled  # type: ignore[no-any-return]


def is_restart(error: Exception) -> bool:
    """Whether an error is a compiler's request that Dynamo traces again or skips a frame."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return isinstance(error, (RestartAnalysis, SkipFrame))


@dataclass(frozen=True)
class InnerModule:
    """A program as a module, and the remarks on states that it copies."""

    module: fx.GraphModule
    remarks: list[Remark]


def build_inner_module(program: Program, output_aliases: Sequence[int | None], backend: str = "eager") -> InnerModule:
    """Return the program as a module that takes flat inputs, writes to those it mutates, and returns flat outputs.

    `output_aliases` contains, for every value to return, the index of the input that it is; None is the program's next
    output.
    """
    canonical, _ = canonicalize_updates(program)
    made = write_in_place(canonical)
    if backend != "eager":
        find = find_compiled_copies if backend == "inductor" else find_functional_copies
        made = replace(made, states=tuple(find(program)))
    graph = copy_graph(made.program.graph)
    root = graph.owning_module or torch.nn.Module()
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    output = graph.output_node()
    values: Any = output.args[0]
    inputs = [placeholders[row.name] for row in program.bindings.with_role(Role.INPUT)]
    computed = iter([value for row, value in zip(program.bindings.outs, values, strict=True) if row.alias is None])
    output.args = (tuple(next(computed) if each is None else inputs[each] for each in output_aliases),)
    for row in program.bindings.with_role(Role.CONSTANT):
        root.register_buffer(row.name, program.tensors[row.name].read(), persistent=False)
        node = placeholders[row.name]
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(row.name))
        graph.erase_node(node)
    return InnerModule(fx.GraphModule(root, graph, class_name="Inlay"), made.remarks)
