"""Programs whose state is written in place: what the eager engine runs, and what compilers are given."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.auto_functionalized import is_auto_functionalized, parse_auto_functionalized
from inlay.analysis.state_updates import StateUpdate, find_aliases, find_state_updates
from inlay.lowering.state.declared_aliases import DECLARED
from inlay.lowering.state.defunctionalization import call_in_place
from inlay.lowering.state.state_copies import find_eager_copies
from inlay.program.bindings import Alias, Bindings
from inlay.program.graphs import MODULE, SOURCE
from inlay.program.remarks import Remark, RemarkKind
from inlay.program.symbols import symbolic_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.analysis.storage_slices import StorageSlice
    from inlay.program.bindings import Binding
    from inlay.program.program import Program

aten = torch.ops.aten
KV_CACHE_UPDATE = "kv_cache_update"


@dataclass(frozen=True, eq=False)
class InPlaceProgram:
    """A program that writes to its state itself, and what is known of each state when its calls are made one by one."""

    program: Program
    states: tuple[StateUpdate, ...]
    declared_outputs: Mapping[int, str] = field(default_factory=dict)
    """Output that the user declared to be a state → that state."""

    @property
    def remarks(self) -> list[Remark]:
        """What could not be in place, why, and what it costs."""
        return copy_remarks(self.states)


def write_in_place(program: Program) -> InPlaceProgram:
    """Write every state in place where that is sound; copy the others back at the end. The caller has nothing to do.

    For a state, the program returned hands back the binding itself. `program` is not changed.
    """
    made = program.copy()
    states = find_state_updates(made)
    told = find_eager_copies(states)
    values: Any = made.graph.output_node().args[0]
    declared = {
        index: state.binding.name
        for state in states
        if state.output.alias is not None and state.output.alias.kind == DECLARED
        for index, value in enumerate(values)
        if value is values[state.output_index] and index != state.output_index
    }
    bases = {node.name: node for node in made.graph.nodes if node.op == "placeholder"}
    for call in [node for node in made.graph.nodes if is_auto_functionalized(node)]:
        writers = [state for state in states if state.is_eligible and any(write.call is call for write in state.writes)]
        if writers:
            _unwrap(made.graph, call)
    for state in states:
        if state.is_eligible:
            _write(made.graph, state, bases[state.binding.name])
    _set_outputs(made.graph, states, bases)
    made.graph.eliminate_dead_code()
    return InPlaceProgram(replace(made, bindings=_mark_aliases(made.bindings, states)), tuple(told), declared)


def _unwrap(graph: fx.Graph, call: fx.Node) -> None:
    """Call a wrapped operator on the tensors themselves."""
    wrapped = parse_auto_functionalized(call)
    assert wrapped is not None

    def view(target: Any, base: fx.Node, *args: Any) -> fx.Node:
        node = graph.call_function(target, (base, *args))
        values = fx.map_arg(args, lambda each: each.meta["val"])
        with symbolic_sizes():
            node.meta = {"val": target(base.meta["val"], *values)} | _source_meta(call)
        return node

    call_in_place(wrapped, wrapped.bases, view)


def _write(graph: fx.Graph, state: StateUpdate, base: fx.Node) -> None:
    """Put the writes in, and views of the state where the program has values that it then holds."""
    for write in state.writes:
        if is_auto_functionalized(write.call) or write.call is not write.node:
            continue
        with graph.inserting_before(write.node.next):
            part = _insert_views(graph, base, write.storage_slice, write.node)
            call = graph.call_function(write.target, (part, *write.args), write.kwargs)
            call.meta = {"val": part.meta["val"]} | _source_meta(write.node)
    for node, (place, _) in state.versions.items():
        if node is not base and node.graph is graph and node.users:
            with graph.inserting_before(node.next):
                part = _insert_views(graph, base, place, node)
            node.replace_all_uses_with(part)


def _insert_views(graph: fx.Graph, base: fx.Node, place: StorageSlice, like: fx.Node) -> fx.Node:
    at = base
    for view in place.views:
        at = graph.call_function(view.target, (at, *view.args))
        args = fx.map_arg(at.args, lambda each: each.meta["val"])
        with symbolic_sizes():
            at.meta = {"val": view.target(*args)} | _source_meta(like)
    return at


def _source_meta(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in (SOURCE, MODULE) if key in node.meta}


def _set_outputs(graph: fx.Graph, states: list[StateUpdate], bases: dict[str, fx.Node]) -> None:
    """What is returned for a state is the state; what could not be written in place is copied there at the end."""
    output = graph.output_node()
    values: Any = list(output.args[0])  # type: ignore[arg-type]
    refused = {bases[state.binding.name]: 0 for state in states if not state.is_eligible}
    before = find_aliases(refused)
    with graph.inserting_before(output):
        for index, value in enumerate(values):
            if value in before:  # somebody asked for what the copies below are about to write over
                values[index] = graph.call_function(aten.clone.default, (value,))
                values[index].meta = dict(value.meta)
        for state in states:
            base = bases[state.binding.name]
            if not state.is_eligible:
                call = graph.call_function(aten.copy_.default, (base, values[state.output_index]))
                call.meta = {"val": base.meta["val"]}
            values[state.output_index] = base
    output.args = (tuple(values),)


def _mark_aliases(bindings: Bindings, states: list[StateUpdate]) -> Bindings:
    """The table with how each alias is known."""
    recognised = {state.output.name for state in states if state.is_eligible}

    def row(each: Binding) -> Binding:
        if each.alias is None or each.name not in recognised or each.alias.kind == DECLARED:
            return each
        return replace(each, alias=Alias(each.alias.binding, KV_CACHE_UPDATE))

    return Bindings(tuple(row(each) for each in bindings))


def _size_text(binding: Binding) -> str:
    """The size of a state, with symbols where it has any.

    >>> from inlay.program.bindings import Binding, Role
    >>> _size_text(Binding("cache", Role.INPUT, "cache", "float32", ("batch", 8, 1024)))
    'batch * 32,768 bytes'
    """
    symbols = [str(size) for size in binding.shape if not isinstance(size, int)]
    return " * ".join([*symbols, f"{binding.nbytes:,} bytes"])


def copy_remarks(states: Sequence[StateUpdate]) -> list[Remark]:
    """Which of these states are not in place, why, and what it costs."""
    return [_remark(state) for state in states if not state.is_eligible]


def _remark(state: StateUpdate) -> Remark:
    copied = "is copied" if state.is_certain else "may be copied"
    reason = f"{state.reason}; {state.binding.type_text}, {_size_text(state.binding)}, {copied} at every call"
    return Remark(RemarkKind.REFUSED, "in_place", state.form, reason, nodes=(state.binding.name,))
