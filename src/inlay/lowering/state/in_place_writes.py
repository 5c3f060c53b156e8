"""Rewrite programs to write their state in place: the input of the eager backend and of compilers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.auto_functionalized import is_auto_functionalized, parse_auto_functionalized
from inlay.analysis.state_updates import StateUpdate, find_aliases
from inlay.lowering.state.declared_aliases import RETURNED_KINDS
from inlay.lowering.state.defunctionalization import call_in_place
from inlay.lowering.state.returned_parts import copy_returned_parts, insert_views
from inlay.lowering.state.state_copies import find_eager_copies
from inlay.program.bindings import Alias, Bindings
from inlay.program.remarks import Remark, RemarkKind
from inlay.rewrite.rewriter import Rewriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.analysis.state_updates import StateWrite
    from inlay.program.bindings import Binding
    from inlay.program.program import Program

aten = torch.ops.aten
KV_CACHE_UPDATE = "kv_cache_update"


@dataclass(frozen=True, eq=False)
class InPlaceProgram:
    """A program that writes its own state, and each state's update as the eager backend runs it."""

    program: Program
    states: tuple[StateUpdate, ...]
    declared_outputs: Mapping[int, str] = field(default_factory=dict)
    """Index of an output that the user declared to be a state → that state."""

    @property
    def remarks(self) -> list[Remark]:
        """Which states are not in place, why, and what it costs."""
        return copy_remarks(self.states)


def write_in_place(program: Program) -> InPlaceProgram:
    """Write every state in place where that is sound; copy the others back at the end of the program.

    The new program returns the binding itself for a state. `program` is not changed.
    """
    rewriter = Rewriter(program.copy())
    states = copy_returned_parts(rewriter)
    graph = rewriter.program.graph
    told = find_eager_copies(states)
    values: Any = graph.output_node().args[0]
    declared = {
        index: state.binding.name
        for state in states
        if state.output.alias is not None and state.output.alias.kind in RETURNED_KINDS
        for index, value in enumerate(values)
        if value is values[state.output_index] and index != state.output_index
    }
    eligible = [state for state in states if state.is_eligible]
    bases = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    _insert_writes(rewriter, eligible, bases)
    for state in eligible:
        _replace_versions(rewriter, state, bases[state.binding.name])
    for call in [node for node in graph.nodes if is_auto_functionalized(node)]:
        if any(write.call is call for state in eligible for write in state.writes):
            _unwrap(rewriter, call)
    made = rewriter.finish()
    _set_outputs(rewriter, states, bases, declared)
    rewriter.erase_unused(*reversed(list(graph.nodes)))
    return InPlaceProgram(replace(made, bindings=_mark_aliases(made.bindings, states)), tuple(told), declared)


def _insert_writes(rewriter: Rewriter, states: list[StateUpdate], bases: dict[str, fx.Node]) -> None:
    """Insert the writes, each after the value that it computes or stores.

    A value that is computed in place and also stored in other states is computed first.
    """
    writes = [(bases[state.binding.name], write) for state in states for write in state.writes]
    last: dict[fx.Node, fx.Node] = {}
    for base, write in sorted(writes, key=lambda each: _puts_own_value(each[1])):
        if is_auto_functionalized(write.call):
            continue
        with rewriter.inserting_before(last.get(write.node, write.node).next, write.node):
            part = insert_views(rewriter, base, write.storage_slice)
            last[write.node] = rewriter.call(write.target, (part, *write.args), write.kwargs)


def _puts_own_value(write: StateWrite) -> bool:
    """Whether a write stores a computed value, instead of computing it in place."""
    return write.node in write.args


def _replace_versions(rewriter: Rewriter, state: StateUpdate, base: fx.Node) -> None:
    """Replace values that equal a part of the state by views of the state, except in the output."""
    for node, (place, _) in state.versions.items():
        if node is not base and node.users:
            with rewriter.inserting_before(node.next, node):
                part = insert_views(rewriter, base, place)
            rewriter.replace_all({node: part}, keep={base.graph.output_node()})


def _unwrap(rewriter: Rewriter, call: fx.Node) -> None:
    """Call a wrapped operator on the original tensors instead of copies."""
    wrapped = parse_auto_functionalized(call)
    assert wrapped is not None
    call_in_place(wrapped, wrapped.bases, lambda target, *args: rewriter.call(target, args, origin=call))


def _set_outputs(
    rewriter: Rewriter, states: list[StateUpdate], bases: dict[str, fx.Node], declared: Mapping[int, str]
) -> None:
    """Return each state's binding as its output; copy the states that are not in place at the end."""
    graph, values = rewriter.program.graph, rewriter.current_outputs()
    before = find_aliases({bases[state.binding.name]: 0 for state in states if not state.is_eligible})
    with rewriter.inserting_before(graph.output_node()):
        for index, value in enumerate(values):
            if value in before:  # the copies below would overwrite this returned value
                values[index] = rewriter.call(aten.clone.default, (value,), origin=value)
        for state in states:
            base = bases[state.binding.name]
            if not state.is_eligible:
                rewriter.call(aten.copy_.default, (base, values[state.output_index]))
            values[state.output_index] = base
        for index, name in declared.items():
            values[index] = bases[name]
    rewriter.set_outputs(graph, values)


def _mark_aliases(bindings: Bindings, states: list[StateUpdate]) -> Bindings:
    """Return the table with the kind of each recognized alias."""
    recognised = {state.output.name for state in states if state.is_eligible}

    def row(each: Binding) -> Binding:
        if each.alias is None or each.name not in recognised or each.alias.kind in RETURNED_KINDS:
            return each
        return replace(each, alias=Alias(each.alias.binding, KV_CACHE_UPDATE))

    return Bindings(tuple(row(each) for each in bindings))


def _size_text(binding: Binding) -> str:
    """Return the size of a state as text, with its symbols.

    >>> from inlay.program.bindings import Binding, Role
    >>> _size_text(Binding("cache", Role.INPUT, "cache", "float32", ("batch", 8, 1024)))
    'batch * 32,768 bytes'
    """
    symbols = [str(size) for size in binding.shape if not isinstance(size, int)]
    return " * ".join([*symbols, f"{binding.nbytes:,} bytes"])


def copy_remarks(states: Sequence[StateUpdate]) -> list[Remark]:
    """Return a remark for each state that is not in place, or not known to be: why, and what it costs."""
    return [_remark(state) for state in states if state.reason or state.note]


def _remark(state: StateUpdate) -> Remark:
    copied = "is copied" if state.reason and state.is_certain else "may be copied"
    size = f"{state.binding.type_text}, {_size_text(state.binding)}, {copied} at every call"
    kind = RemarkKind.REFUSED if state.reason else RemarkKind.ANALYSIS
    return Remark(kind, "in_place", state.form, f"{state.reason or state.note}; {size}", nodes=(state.binding.name,))
