"""Aliases declared by the user: an output that lives in the storage of an input."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError, suggest
from inlay.program.bindings import Alias, Binding, Bindings, Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.program.program import Program

DECLARED = "declared"


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
    values: Any = program.graph.output_node().args[0]
    made = dict(zip((row.name for row in program.bindings.outs), values, strict=True))
    rows: list[Binding] = []
    for one, two in alias.items():
        output, state = _find(one, users, "output"), _find(two, inputs, "input")
        reason = _refuse(output, state, taken, made[output.name], program)
        if reason:
            raise UsageError(
                f"{output.name} ({output.type_text}) cannot live in {state.name} ({state.type_text}): {reason}."
            )
        taken[state.name] = output.name
        name = f"{state.target}.out"
        rows.append(Binding(name, Role.OUTPUT, state.target, output.dtype, output.shape, Alias(state.name, DECLARED)))
    graph = program.copy().graph
    node = graph.output_node()
    kept: Any = node.args[0]
    by_name = dict(zip((row.name for row in program.bindings.outs), kept, strict=True))
    declared = [by_name[_find(one, users, "output").name] for one in alias]
    node.args = ((*declared, *kept),)
    table = Bindings((*program.bindings.ins, *rows, *program.bindings.outs))
    return replace(program, graph=graph, bindings=table)


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
