"""Convert state between module buffers, owned by the module, and explicit bindings, owned by the caller."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_structure, tree_unflatten

from inlay.errors import UsageError, suggest
from inlay.program.bindings import Binding, Bindings, Role, tensor_text
from inlay.program.decoder import is_stateless_decoder
from inlay.program.graphs import is_mutation
from inlay.program.weights import InMemoryTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from inlay.program.program import Program
    from inlay.program.weights import TensorRef


def lift_mutated_buffers(program: Program) -> Program:
    """Turn every buffer that the program writes to into a keyword argument, after the others.

    Their initial values stay in `program.tensors`.
    """
    written = [row for row in program.bindings.state if row.role is Role.BUFFER]
    if not written:
        return program
    arguments = {_argument(row): row.name for row in written}
    clash = sorted(set(arguments) & {row.target for row in program.bindings.with_role(Role.INPUT)})
    if clash:
        raise UsageError(f"The model has an argument {clash[0]} and writes to a buffer of that name.", "Rename one.")
    lifted = {row.name: replace(row, role=Role.INPUT) for row in written}
    ins = [row for row in program.bindings.ins if row.name not in lifted]
    return _rebind(program, [*ins, *lifted.values()], lambda kwargs: kwargs | arguments)


def drop_overwritten_buffers(program: Program) -> Program:
    """Drop the buffers of a decoder that every call overwrites before it reads them.

    Their old values decide nothing, so they are no state: the rotary frequencies of LongRoPE, for example. Other
    programs keep them, because their owner may read the new values.
    """
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    gone = {row.name for row in program.bindings.state if row.role is Role.BUFFER and row.name not in read}
    outs = [row for row in program.bindings.outs if row.alias is None or row.alias.binding not in gone]
    kept = Bindings((*(row for row in program.bindings.ins if row.name not in gone), *outs))
    if not gone or not is_stateless_decoder(kept):
        return program
    made = program.copy()
    output = made.graph.output_node()
    returned: Any = output.args[0]
    output.args = (tuple(each for each, row in zip(returned, program.bindings.outs, strict=True) if row in outs),)
    for node in reversed(made.graph.nodes):
        if node.name in gone or (node.op == "call_function" and not node.users and not is_mutation(node)):
            made.graph.erase_node(node)
    return replace(made, bindings=kept, tensors={key: ref for key, ref in made.tensors.items() if key not in gone})


def inline_lifted_buffers(program: Program, values: Mapping[str, torch.Tensor] | None = None) -> Program:
    """Turn lifted arguments into buffers again, so that the program owns its state.

    Arguments named in `values` become buffers too, with copies of these values as initial values. `program.module()` is
    then a plain module that can be exported with `torch.export` and saved.
    """
    program = _with_values(program, values or {})
    held = set(program.tensors)
    lifted = [row for row in program.bindings.with_role(Role.INPUT) if row.name in held]
    if not lifted:
        return program
    inlined = {row.name: replace(row, role=Role.BUFFER) for row in lifted}
    others = [row for row in program.bindings.ins if row.name not in inlined]
    weights = [row for row in others if row.role is not Role.INPUT]
    ins = [*weights, *inlined.values(), *(row for row in others if row.role is Role.INPUT)]
    gone = {_argument(row) for row in lifted}
    return _rebind(program, ins, lambda kwargs: {key: each for key, each in kwargs.items() if key not in gone})


def _with_values(program: Program, values: Mapping[str, torch.Tensor]) -> Program:
    """Return the program with a value for each of these arguments."""
    rows = {row.target: row for row in program.bindings.with_role(Role.INPUT)}
    held: dict[str, TensorRef] = {}
    for name, value in values.items():
        if name not in rows:
            raise UsageError(f"The program has no argument {name}.", suggest(name, rows))
        row, dtype = rows[name], str(value.dtype).removeprefix("torch.")
        if (dtype, tuple(value.shape)) != (row.dtype, row.shape):
            raise UsageError(f"{name} must be {row.type_text}; got {tensor_text(dtype, tuple(value.shape))}.")
        held[row.name] = InMemoryTensor(value.detach().clone())
    return replace(program, tensors={**program.tensors, **held})


def zero_state(bindings: Bindings) -> dict[str, torch.Tensor]:
    """Return zero tensors of the right types for all state that the caller must pass, by argument name.

    >>> from inlay.testing import program_of
    >>> program = program_of(lambda x, state: state.add_(x), [torch.ones(2), torch.zeros(2)])
    >>> zero_state(program.bindings)
    {'values_1': tensor([0., 0.])}
    """
    made = {}
    for row in bindings.state:
        if row.role is Role.INPUT:
            unknown = [size for size in row.shape if not isinstance(size, int)]
            if unknown:
                raise UsageError(
                    f"{row.target} is {row.type_text}; its size {unknown[0]} is not fixed: the caller chooses it."
                )
            made[row.target] = torch.zeros(row.shape, dtype=getattr(torch, row.dtype))  # type: ignore[arg-type]
    return made


def _argument(row: Binding) -> str:
    return row.target.replace(".", "_")


def _rebind(program: Program, ins: Iterable[Binding], change: Callable[[dict[str, Any]], dict[str, Any]]) -> Program:
    """Return the same graph with its placeholders in another order and another call signature."""
    made = program.copy()
    ins = list(ins)
    placeholders = {node.name: node for node in made.graph.nodes if node.op == "placeholder"}
    first = next(node for node in made.graph.nodes if node.op != "placeholder")
    for row in ins:
        first.prepend(placeholders[row.name])
    in_spec = program.call_spec.in_spec
    args, kwargs = tree_unflatten(list(range(in_spec.num_leaves)), in_spec)
    changed = change(kwargs)
    names = [name for name in program.call_spec.arg_names if name in changed or name not in kwargs]
    names += [name for name in changed if name not in names]
    calling = replace(program.call_spec, in_spec=tree_structure((args, changed)), arg_names=tuple(names))
    return replace(made, bindings=Bindings((*ins, *program.bindings.outs)), call_spec=calling)
