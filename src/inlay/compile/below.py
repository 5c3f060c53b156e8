"""Adapter: what runs a program in the end. The only file of this room that imports Inductor."""

from __future__ import annotations

import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_unflatten

from inlay.errors import ProgramError
from inlay.ops.define import DECOMPOSITIONS
from inlay.program.bindings import Role
from inlay.program.graphs import all_nodes, copy_graph
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


def aot_library(program: Program) -> Callable[[list[Any]], Sequence[Any]]:
    """A function from all inputs to all outputs but state: a library made by AOTInductor, on the caller's tensors."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    exported = program.to_exported()
    if any(node.target in DECOMPOSITIONS for node in all_nodes(program.graph)):
        exported = exported.run_decompositions(dict(DECOMPOSITIONS))
    inputs = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    examples = [inputs[row.name] for row in program.bindings.of(Role.INPUT)]
    exported.example_inputs = tree_unflatten(examples, program.calling.in_spec)
    # Folding takes a buffer of one value for a constant, also where the program writes to it: pytorch#165444.
    owned = any(row.role is Role.BUFFER for row in program.bindings.state)
    settings: dict[str, Any] = {"joint_graph_constant_folding": False} if owned else {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = aoti_compile_and_package(exported, package_path=f"{folder}/program.pt2", inductor_configs=settings)
        library: Any = aoti_load_package(file)
    rows = program.bindings.ins
    constants = _constants(program, library.get_constant_fqns())
    bound: list[int] = []

    def run(values: list[Any]) -> Sequence[Any]:
        held = {row.target: value for row, value in zip(rows, values, strict=True) if row.name in constants}
        places = [value.data_ptr() for value in held.values()]
        if places != bound:
            library.load_constants(held, check_full_update=False, user_managed=True)
            bound[:] = places
        given = [value for row, value in zip(rows, values, strict=True) if row.role is Role.INPUT]
        args, kwargs = tree_unflatten(given, program.calling.in_spec)
        return tree_leaves(library(*args, **kwargs))

    return run


def _constants(program: Program, known: Sequence[str]) -> set[str]:
    """The bindings that a library keeps as constants. A weight of a few values is part of its code instead."""
    owned = [row for row in program.bindings.ins if row.role is not Role.INPUT]
    kept = {row.name for row in owned if row.target in known}
    lost = [row for row in program.bindings.state if row in owned and row.name not in kept]
    if lost:
        raise ProgramError(f"AOTInductor made the state {lost[0].target} part of its code.", "Pass it as an argument.")
    return kept


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
