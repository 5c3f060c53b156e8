"""State as module buffers, or as explicit bindings: the same program, owned by the module or by the caller."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_structure, tree_unflatten

from inlay.errors import UsageError
from inlay.program.bindings import Binding, Bindings, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from inlay.program.program import Program


def lift_mutated_buffers(program: Program) -> Program:
    """Every buffer that the program writes to becomes an argument, after the others, by name.

    The values they start with stay known: `program.tensors` has them.
    """
    written = [row for row in program.bindings.state if row.role is Role.BUFFER]
    if not written:
        return program
    arguments = {_argument(row): row.name for row in written}
    clash = sorted(set(arguments) & {row.target for row in program.bindings.of(Role.INPUT)})
    if clash:
        raise UsageError(f"The model has an argument {clash[0]} and writes to a buffer of that name.", "Rename one.")
    lifted = {row.name: replace(row, role=Role.INPUT) for row in written}
    ins = [row for row in program.bindings.ins if row.name not in lifted]
    return _rebound(program, [*ins, *lifted.values()], lambda kwargs: kwargs | arguments)


def inline_lifted_buffers(program: Program) -> Program:
    """The way back: arguments that were buffers are buffers again, and the program owns its state.

    `program.module()` is then a plain module that `torch.export` and saving understand.
    """
    held = set(program.tensors)
    lifted = [row for row in program.bindings.of(Role.INPUT) if row.name in held]
    if not lifted:
        return program
    inlined = {row.name: replace(row, role=Role.BUFFER) for row in lifted}
    others = [row for row in program.bindings.ins if row.name not in inlined]
    weights = [row for row in others if row.role is not Role.INPUT]
    ins = [*weights, *inlined.values(), *(row for row in others if row.role is Role.INPUT)]
    gone = {_argument(row) for row in lifted}
    return _rebound(program, ins, lambda kwargs: {key: each for key, each in kwargs.items() if key not in gone})


def _argument(row: Binding) -> str:
    return row.target.replace(".", "_")


def _rebound(
    program: Program,
    ins: Iterable[Binding],
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> Program:
    """The same graph with its placeholders in another order and another way to call it."""
    made = program.copy()
    ins = list(ins)
    placeholders = {node.name: node for node in made.graph.nodes if node.op == "placeholder"}
    first = next(node for node in made.graph.nodes if node.op != "placeholder")
    for row in ins:
        first.prepend(placeholders[row.name])
    in_spec = program.calling.in_spec
    args, kwargs = tree_unflatten(list(range(in_spec.num_leaves)), in_spec)
    changed = change(kwargs)
    names = [name for name in program.calling.arg_names if name in changed or name not in kwargs]
    names += [name for name in changed if name not in names]
    calling = replace(program.calling, in_spec=tree_structure((args, changed)), arg_names=tuple(names))
    return replace(made, bindings=Bindings((*ins, *program.bindings.outs)), calling=calling)
