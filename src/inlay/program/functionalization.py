"""Adapter: a traced graph with in-place operators → Program.

The only file that imports torch.export's verifiers. An input that the graph mutates becomes an output that aliases
the input, as in every captured model.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._export.verifier import TrainingIRVerifier
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec

from inlay.program.decomposition import decompose
from inlay.program.exported_program import argument_spec, call_graph, from_exported
from inlay.program.graphs import subgraphs
from inlay.program.program import CallSpec
from inlay.program.tracing_lock import tracing_lock
from inlay.program.weights import InMemoryTensor

if TYPE_CHECKING:
    from inlay.program.program import Program
    from inlay.program.symbols import FakeValues


def functionalize(module: fx.GraphModule, fakes: FakeValues, name: str) -> Program:
    """Convert a graph of ATen operators that may write in place to a Program; its inputs and outputs are flat.

    Symbolic sizes stay in the shape environment of `fakes`, so its owner gets every new guard.
    """
    exported = functionalize_to_exported(module, fakes)
    held = {
        target: InMemoryTensor(value) for target, value in exported.constants.items() if isinstance(value, torch.Tensor)
    }
    return from_exported(exported, name=name, tensors=held)


def functionalize_to_exported(module: fx.GraphModule, fakes: FakeValues) -> ExportedProgram:
    """Do the same, and return an ExportedProgram with the ranges of the shape environment."""
    constants = _lift_constants(module, fakes)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values: Any = module.graph.output_node().args[0]
    signature = ExportGraphSignature(
        [_input(node, constants) for node in placeholders],
        [OutputSpec(OutputKind.USER_OUTPUT, argument_spec(value, ""), None) for value in values],
    )
    given = [node.name for node in placeholders if node.name not in constants]
    with tracing_lock():
        whole = ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=signature,
            state_dict={},
            range_constraints={},
            module_call_graph=call_graph(CallSpec.flat(given, len(values))),
            constants=dict(constants),
            verifiers=[TrainingIRVerifier],
        )
        return decompose(whole)


def _input(node: fx.Node, constants: dict[str, torch.Tensor]) -> InputSpec:
    if node.name in constants:
        return InputSpec(InputKind.CONSTANT_TENSOR, argument_spec(node, node.name), node.name)
    return InputSpec(InputKind.USER_INPUT, argument_spec(node, node.name), None)


def _lift_constants(module: fx.GraphModule, fakes: FakeValues) -> dict[str, torch.Tensor]:
    """Replace tensor attributes of the graph by placeholders in front of the others; return them by name."""
    nested = {target for target, _ in subgraphs(module.graph)}
    constants: dict[str, torch.Tensor] = {}
    lifted: dict[str, fx.Node] = {}
    first = next(iter(module.graph.nodes))
    for node in [each for each in module.graph.nodes if each.op == "get_attr" and each.target not in nested]:
        if node.target not in lifted:
            value = getattr(module, node.target)
            with module.graph.inserting_before(first):
                made = lifted[node.target] = module.graph.placeholder(f"c_{node.target}")
            made.meta["val"] = fakes.mode.from_tensor(value, static_shapes=True)
            constants[made.name] = value
        node.replace_all_uses_with(lifted[node.target])
        module.graph.erase_node(node)
    return constants
