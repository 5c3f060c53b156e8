"""Aliases declared by the user: an output that lives in the storage of an input, or in memory allocated once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from inlay.analysis.state_updates import find_aliases
from inlay.errors import UsageError, suggest
from inlay.program.bindings import Alias, Binding, Bindings, Role
from inlay.program.weights import InMemoryTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.program.program import Program

DECLARED, PREALLOCATED = "declared", "preallocated"
RETURNED_KINDS = (DECLARED, PREALLOCATED)
"""Kinds of alias whose output is returned to the caller: it is the updated tensor."""


def declare_aliases(program: Program, alias: Mapping[str | int, str | int]) -> Program:
    """Return the program with outputs in the storage of inputs: `{"output": "input"}`, by name or position.

    >>> import torch
    >>> from inlay.testing import program_of
    >>> program = declare_aliases(program_of(lambda x, state: state + x, [torch.ones(2), torch.zeros(2)]), {0: 1})
    >>> program.bindings.outs[0].alias
    Alias(binding='values_1', kind='declared')

    The output is still returned; it is the updated input. Shapes, dtypes and devices must be the same, because a value
    is never cast when it is written to a state.
    """
    users = [row for row in program.bindings.outs if row.alias is None]
    inputs = list(program.bindings.with_role(Role.INPUT))
    taken = {row.alias.binding: row.target for row in program.bindings.outs if row.alias is not None}
    graph = program.copy().graph
    values: Any = graph.output_node().args[0]
    made = dict(zip((row.name for row in program.bindings.outs), values, strict=True))
    rows: list[Binding] = []
    declared = []
    for one, two in alias.items():
        output, state = _find(one, users, "output"), _find(two, inputs, "input")
        reason = _refuse(output, state, taken, made[output.name], program)
        if reason:
            raise UsageError(
                f"{output.name} ({output.type_text}) cannot live in {state.name} ({state.type_text}): {reason}."
            )
        taken[state.name] = output.name
        declared.append(made[output.name])
        name = f"{state.target}.out"
        rows.append(Binding(name, Role.OUTPUT, state.target, output.dtype, output.shape, Alias(state.name, DECLARED)))
    graph.output_node().args = ((*declared, *values),)
    table = Bindings((*program.bindings.ins, *rows, *program.bindings.outs))
    return replace(program, graph=graph, bindings=table)


def preallocate_outputs(program: Program) -> Program:
    """Return the program with a buffer for each output that has a fixed shape and shares no storage with an input.

    >>> from inlay.testing import program_of
    >>> preallocate_outputs(program_of(lambda x: x * 2, [torch.ones(2)])).bindings.outs[0].alias
    Alias(binding='preallocated_0', kind='preallocated')
    """
    made, tensors = program.copy(), dict(program.tensors)
    output, first = made.graph.output_node(), next(iter(made.graph.nodes))
    values: Any = output.args[0]
    rows = list(zip(program.bindings.outs, values, strict=True))
    known = [node for node in made.graph.nodes if node.op == "placeholder"]
    shared = find_aliases(dict.fromkeys([*known, *(value for row, value in rows if row.alias is not None)], 0))
    ins: list[Binding] = []
    outs: list[Binding] = []
    chosen: list[Any] = []
    for place, (row, value) in enumerate(rows):
        shape = [size for size in row.shape if isinstance(size, int)]
        if row.alias is not None or not row.is_tensor or len(shape) < len(row.shape) or value in shared:
            continue
        name, held = f"preallocated_{place}", value.meta["val"]
        with made.graph.inserting_before(first):
            made.graph.placeholder(name).meta["val"] = held.new_empty(shape)
        ins.append(Binding(name, Role.BUFFER, name, row.dtype, row.shape, persistent=False))
        outs.append(Binding(f"{name}.out", Role.OUTPUT, name, row.dtype, row.shape, Alias(name, PREALLOCATED)))
        tensors[name] = InMemoryTensor(torch.zeros(shape, dtype=held.dtype, device=held.device))
        chosen.append(value)
        shared |= find_aliases({value: 0})
    output.args = ((*chosen, *values),)
    bindings = Bindings((*ins, *program.bindings.ins, *outs, *program.bindings.outs))
    return replace(made, bindings=bindings, tensors=tensors)


def _find(key: str | int, rows: Sequence[Binding], what: str) -> Binding:
    if isinstance(key, int) or key.isdigit():
        if int(key) < len(rows):
            return rows[int(key)]
        raise UsageError(f"There is no {what} {key}; the program has {len(rows)} {what}s.")
    for row in rows:
        if key in (row.name, row.target):
            return row
    raise UsageError(f"There is no {what} {key}.", suggest(key, [row.name for row in rows]))


def _refuse(output: Binding, state: Binding, taken: Mapping[str, str], value: Any, program: Program) -> str:
    if state.name in taken:
        return f"{taken[state.name]} already lives there"
    if not output.is_tensor or not state.is_tensor:
        return "both must be tensors"
    if output.dtype != state.dtype:
        return "the dtypes differ, and values are not cast when written to a state"
    if output.shape != state.shape:
        return "the shapes differ"
    node = next(each for each in program.graph.nodes if each.name == state.name)
    if value.meta["val"].device != node.meta["val"].device:
        return "they are on different devices"
    return ""
