"""Adapter: conversion between Program and torch.export.ExportedProgram.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from inlay.errors import CaptureError, ProgramError
from inlay.program.bindings import Alias, Binding, Bindings, Role
from inlay.program.facts import Facts
from inlay.program.graphs import MODULE, SOURCE, TypeFormatter, all_nodes, attach_subgraphs, copy_graph, subgraphs
from inlay.program.program import CallSpec, Program, Symbol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.program.weights import TensorRef

_ROLES = {
    InputKind.PARAMETER: Role.PARAMETER,
    InputKind.BUFFER: Role.BUFFER,
    InputKind.CONSTANT_TENSOR: Role.CONSTANT,
    InputKind.USER_INPUT: Role.INPUT,
}
_KINDS = {role: kind for kind, role in _ROLES.items()}
_SYMBOLIC_ARGUMENTS = {torch.SymInt: SymIntArgument, torch.SymFloat: SymFloatArgument, torch.SymBool: SymBoolArgument}


def from_exported(
    exported: ExportedProgram,
    *,
    name: str,
    tensors: Mapping[str, TensorRef],
    symbols: Mapping[str, str] | None = None,
    facts: Facts | None = None,
) -> Program:
    """Convert an ExportedProgram to a Program. Keys of `tensors` are qualified names, the targets of the signature."""
    graph = copy_graph(exported.graph)
    for node in all_nodes(graph):
        node.meta = select_meta(node)
    strip_metadata_asserts(graph)
    named, used = symbols or {}, free_symbols(graph)
    table = {
        str(raw): _symbol(str(raw), bounds, named, used[str(raw)][1])
        for raw, bounds in exported.range_constraints.items()
        if str(raw) in used
    }
    types = TypeFormatter({raw: symbol.name for raw, symbol in table.items()})
    calling = exported.module_call_graph[0].signature
    if calling is None:
        raise CaptureError("The exported program has no call signature.")
    bindings = _drop_unused(graph, _bindings(exported.graph_signature, graph, types, calling.out_spec))
    refs = {row.name: tensors[row.target] for row in bindings.with_role(Role.PARAMETER, Role.BUFFER, Role.CONSTANT)}
    spec = CallSpec(calling.in_spec, calling.out_spec, tuple(calling.forward_arg_names or ()))
    return Program(name, graph, bindings, refs, table, spec, facts or Facts())


def _drop_unused(graph: fx.Graph, bindings: Bindings) -> Bindings:
    """Remove weights that no operator reads: other names of tied parameters, unused buffers."""
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    held = {row.name for row in bindings.with_role(Role.PARAMETER, Role.BUFFER, Role.CONSTANT)}
    written = {row.name for row in bindings.state}
    unused = {name for name in held - written if not placeholders[name].users}
    for name in unused:
        graph.erase_node(placeholders[name])
    return Bindings(tuple(row for row in bindings if row.name not in unused))


def _symbol(raw: str, bounds: Any, named: Mapping[str, str], example: int) -> Symbol:
    low, high = int(bounds.lower), bounds.upper
    known = getattr(high, "is_Integer", isinstance(high, int))
    return Symbol(named.get(raw, raw), low, int(high) if known else None, example)


def strip_metadata_asserts(graph: fx.Graph) -> None:
    """Remove assertions about metadata from a graph and its nested graphs."""
    # They repeat the types of the nodes, and they count as consumers in pattern matching.
    check = torch.ops.aten._assert_tensor_metadata.default
    for _, module in subgraphs(graph):
        strip_metadata_asserts(module.graph)
    for node in list(graph.nodes):
        if node.target is check:
            graph.erase_node(node)


def select_meta(node: fx.Node) -> dict[str, Any]:
    """Return the metadata that programs keep: value, source line and module."""
    meta = {key: node.meta[key] for key in ("val", SOURCE, MODULE) if key in node.meta}
    if SOURCE not in meta and (source := source_line(node.meta.get("stack_trace"))):
        meta[SOURCE] = source
    if MODULE not in meta and (stack := node.meta.get("nn_module_stack")):
        # Nodes that torch.export inserts have a string instead of (name, class).
        meta[MODULE] = next((str(entry[0]) for entry in reversed(stack.values()) if isinstance(entry, tuple)), "")
    return meta


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LIBRARY_PREFIXES = (str(Path(torch.__file__).parent), "torch/", "<")


def source_line(trace: str | None) -> str:
    """Return the innermost line of a stack trace that is not in torch.

    >>> source_line('File "/a/model.py", line 3, in forward\\n x\\nFile "torch/nn/linear.py", line 9, in f')
    'model.py:3'
    """
    frames = _FRAME.findall(trace or "")
    own = [(file, line) for file, line in frames if not file.startswith(_LIBRARY_PREFIXES)]
    if not own:
        return ""
    file, line = own[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"


def _bindings(signature: ExportGraphSignature, graph: fx.Graph, types: TypeFormatter, out_spec: Any) -> Bindings:
    rows: list[Binding] = []
    by_target: dict[tuple[bool, str], str] = {}
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for spec in signature.input_specs:
        if spec.kind not in _ROLES:
            raise CaptureError(f"The model takes {spec.arg.name}, a {spec.kind.name.lower()}, which is not supported.")
        role, target = _ROLES[spec.kind], spec.target or spec.arg.name
        by_target[role is Role.INPUT, target] = spec.arg.name
        persistent = spec.persistent is not False and role is not Role.CONSTANT
        held = placeholders[spec.arg.name].meta.get("val")
        value = held if isinstance(held, (int, float, bool, str)) else None
        row = types.binding(spec.arg.name, role, held)
        rows.append(replace(row, target=target, persistent=persistent, value=value))
    values: Any = graph.output_node().args[0]
    paths = iter(output_names(out_spec))
    taken = {row.name for row in rows}
    for position, (spec_, value) in enumerate(zip(signature.output_specs, values, strict=True)):
        alias = None
        if spec_.kind is OutputKind.USER_OUTPUT:
            target = next(paths)
        elif spec_.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            target = spec_.target or ""
            alias = Alias(by_target[spec_.kind is OutputKind.USER_INPUT_MUTATION, target], "mutated")
        else:
            raise CaptureError(f"The model returns a {spec_.kind.name.lower()}, which is not supported.")
        name = f"{target}.out" if alias else target
        name = name if name not in taken else f"{name}.{position}"
        taken.add(name)
        row = types.binding(name, Role.OUTPUT, value.meta.get("val") if isinstance(value, fx.Node) else value)
        rows.append(replace(row, target=target, alias=alias))
    return Bindings(tuple(rows))


def output_names(out_spec: Any) -> list[str]:
    """Return names for the flat outputs, from the structure that the model returns.

    >>> output_names(pytree.tree_structure({"logits": 0, "hidden": (1, 2)}))
    ['logits', 'hidden.0', 'hidden.1']
    >>> output_names(pytree.tree_structure(0))
    ['output']
    """
    leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(out_spec.num_leaves), out_spec))
    names = [".".join(_key(key) for key in path) or "output" for path, _ in leaves]
    return [f"output.{name}" if name[0].isdigit() else name for name in names]


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def to_exported(program: Program, *, weights: bool = True) -> ExportedProgram:
    """Convert a Program to an ExportedProgram, with its weights bound or only with their types."""
    _check_name_clashes(program)
    graph = copy_graph(program.graph)
    root = fx.GraphModule(graph.owning_module or torch.nn.Module(), graph)
    attach_subgraphs(root.graph, dict(subgraphs(graph)))
    held = program.bindings.with_role(Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
    written = {row.name for row in program.bindings.state}
    if weights:
        values = {row.target: program.tensors[row.name].read() for row in held}
    else:
        types = {node.name: node.meta["val"] for node in graph.nodes if node.op == "placeholder"}
        # Uninitialized memory costs nothing. Fake tensors do not work: a compiler merges two of the same shape.
        values = {row.target: torch.empty(types[row.name].shape, dtype=types[row.name].dtype) for row in held}
    # State starts from the captured value each time, in memory that is not shared.
    values |= {row.target: values[row.target].clone() for row in held if row.name in written}
    persistent = {row.target for row in program.bindings.with_role(Role.PARAMETER, Role.BUFFER) if row.persistent}
    parameters = {row.target for row in program.bindings.with_role(Role.PARAMETER)}
    state = {
        target: torch.nn.Parameter(value, requires_grad=False) if target in parameters else value
        for target, value in values.items()
        if target in persistent
    }
    return ExportedProgram(
        root=root,
        graph=root.graph,
        graph_signature=_signature(program, root.graph),
        state_dict=state,
        range_constraints=_ranges(program),
        module_call_graph=call_graph(program.call_spec),
        constants={target: value for target, value in values.items() if target not in persistent},
    )


def call_graph(spec: CallSpec) -> list[ModuleCallEntry]:
    """Return the call graph of an ExportedProgram: one call of the whole module."""
    signature = ModuleCallSignature(
        inputs=[], outputs=[], in_spec=spec.in_spec, out_spec=spec.out_spec, forward_arg_names=list(spec.arg_names)
    )
    return [ModuleCallEntry(fqn="", signature=signature)]


def _check_name_clashes(program: Program) -> None:
    """Reject equal names of an argument and a buffer: ExportedProgram.module() of torch would write to the buffer."""
    inputs = {row.target for row in program.bindings.with_role(Role.INPUT)}
    written = {row.target for row in program.bindings.state}
    clash = inputs & written & {row.target for row in program.bindings.with_role(Role.BUFFER)}
    if clash:
        name = sorted(clash)[0]
        raise ProgramError(
            f"{name} is the name of an argument and of a buffer, and the model mutates one of them."
            " torch's ExportedProgram confuses them.",
            "Rename one of them in the model.",
        )


def _signature(program: Program, graph: fx.Graph) -> ExportGraphSignature:
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    ins = []
    for row in program.bindings.ins:
        target = None if row.role is Role.INPUT else row.target
        persistent = row.persistent if row.role is Role.BUFFER else None
        ins.append(InputSpec(_KINDS[row.role], argument_spec(placeholders[row.name], row.name), target, persistent))
    outs = []
    values: Any = graph.output_node().args[0]
    for row, value in zip(program.bindings.outs, values, strict=True):
        if row.alias is None:
            kind, target = OutputKind.USER_OUTPUT, None
        elif program.bindings[row.alias.binding].role is Role.INPUT:
            kind, target = OutputKind.USER_INPUT_MUTATION, row.alias.binding
        else:
            kind, target = OutputKind.BUFFER_MUTATION, row.target
        outs.append(OutputSpec(kind, argument_spec(value, ""), target))
    return ExportGraphSignature(input_specs=ins, output_specs=outs)


def argument_spec(value: Any, name: str) -> Any:
    """Return the argument of a torch.export signature for a value."""
    if not isinstance(value, fx.Node):
        return ConstantArgument(name=name, value=value)
    held = value.meta.get("val")
    if isinstance(held, torch.Tensor):
        return TensorArgument(name=value.name)
    for kind, made in _SYMBOLIC_ARGUMENTS.items():
        if isinstance(held, kind):
            return made(name=value.name)
    return ConstantArgument(name=value.name, value=held)


def _ranges(program: Program) -> dict[Any, Any]:
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    free = free_symbols(program.graph)
    return {
        free[raw][0]: ValueRanges(symbol.low, int_oo if symbol.high is None else symbol.high)
        for raw, symbol in program.symbols.items()
        if raw in free
    }


def free_symbols(graph: fx.Graph) -> dict[str, tuple[Any, int]]:
    """Return the symbols in the node types of a graph, by name, with their sizes at capture."""
    free: dict[str, tuple[Any, int]] = {}
    for node in all_nodes(graph):
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, torch.Tensor) else (value,):
                if isinstance(size, torch.SymInt):
                    for symbol in size.node.expr.free_symbols:
                        hint = size.node.hint if size.node.expr == symbol else None
                        known = free.get(str(symbol), (symbol, 0))[1]
                        free[str(symbol)] = (symbol, known or int(hint or 0))
    return free
