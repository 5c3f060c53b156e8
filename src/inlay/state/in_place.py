"""Programs whose state is written in place: what the eager engine runs, and what compilers are given."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.bindings import Alias, Bindings
from inlay.program.graphs import MODULE, SOURCE
from inlay.program.remarks import Remark, RemarkKind
from inlay.program.symbols import symbolic_sizes
from inlay.state.copied import under_eager
from inlay.state.declared import DECLARED
from inlay.state.updates import State, recognise, sharing
from inlay.state.wrapped import is_wrapper, read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.program.bindings import Binding
    from inlay.program.program import Program
    from inlay.state.places import Place

aten = torch.ops.aten
RECOGNISED = "kv_cache_update"


@dataclass(frozen=True, eq=False)
class InPlace:
    """A program that writes to its state itself, and what is known of each state when its calls are made one by one."""

    program: Program
    states: tuple[State, ...]
    declared: Mapping[int, str] = field(default_factory=dict)
    """Output that the user declared to be a state → that state."""

    @property
    def remarks(self) -> list[Remark]:
        """What could not be in place, why, and what it costs."""
        return remarks_on(self.states)


def in_place(program: Program) -> InPlace:
    """Write every state in place where that is sound; copy the others back at the end. The caller has nothing to do.

    For a state, the program returned hands back the binding itself. `program` is not changed.
    """
    made = program.copy()
    states = recognise(made)
    told = under_eager(states)
    values: Any = made.graph.output_node().args[0]
    declared = {
        index: state.binding.name
        for state in states
        if state.output.alias is not None and state.output.alias.why == DECLARED
        for index, value in enumerate(values)
        if value is values[state.position] and index != state.position
    }
    bases = {node.name: node for node in made.graph.nodes if node.op == "placeholder"}
    for call in [node for node in made.graph.nodes if is_wrapper(node)]:
        writers = [state for state in states if state.eligible and any(write.at is call for write in state.writes)]
        if writers:
            _unwrap(made.graph, call)
    for state in states:
        if state.eligible:
            _write(made.graph, state, bases[state.binding.name])
    _hand_back(made.graph, states, bases)
    made.graph.eliminate_dead_code()
    return InPlace(replace(made, bindings=_told(made.bindings, states)), tuple(told), declared)


def _unwrap(graph: fx.Graph, call: fx.Node) -> None:
    """Call a wrapped operator on the tensors themselves."""
    wrapped = read(call)
    assert wrapped is not None
    returned = len(wrapped.operator._schema.returns)

    def view(target: Any, base: fx.Node, *args: Any) -> fx.Node:
        node = graph.call_function(target, (base, *args))
        values = fx.map_arg(args, lambda each: each.meta["val"])
        with symbolic_sizes():
            node.meta = {"val": target(base.meta["val"], *values)} | _origin(call)
        return node

    with graph.inserting_before(call):
        args, kwargs = wrapped.call(wrapped.bases, wrapped.plain, view)
        new = graph.call_function(wrapped.operator, args, kwargs)
        value = call.meta["val"]
        new.meta = _origin(call) | {"val": value[0] if returned == 1 else value[:returned] if returned else None}
        for index in range(returned):
            for result in wrapped.values((index,)):
                part = new if returned == 1 else graph.call_function(operator.getitem, (new, index))
                part.meta = dict(result.meta) | part.meta
                result.replace_all_uses_with(part)
    for base, place in zip(wrapped.bases, wrapped.places, strict=True):
        for result in wrapped.values(place):
            result.replace_all_uses_with(base)
    for user in reversed(list(call.users)):
        graph.erase_node(user)
    graph.erase_node(call)


def _write(graph: fx.Graph, state: State, base: fx.Node) -> None:
    """Put the writes in, and views of the state where the program has values that it then holds."""
    for write in state.writes:
        if is_wrapper(write.at) or write.at is not write.node:
            continue
        with graph.inserting_before(write.node.next):
            part = _part(graph, base, write.place, write.node)
            call = graph.call_function(write.target, (part, *write.args), write.kwargs)
            call.meta = {"val": part.meta["val"]} | _origin(write.node)
    for node, (place, _) in state.versions.items():
        if node is not base and node.graph is graph and node.users:
            with graph.inserting_before(node.next):
                part = _part(graph, base, place, node)
            node.replace_all_uses_with(part)


def _part(graph: fx.Graph, base: fx.Node, place: Place, like: fx.Node) -> fx.Node:
    at = base
    for view in place.views:
        at = graph.call_function(view.target, (at, *view.args))
        args = fx.map_arg(at.args, lambda each: each.meta["val"])
        with symbolic_sizes():
            at.meta = {"val": view.target(*args)} | _origin(like)
    return at


def _origin(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in (SOURCE, MODULE) if key in node.meta}


def _hand_back(graph: fx.Graph, states: list[State], bases: dict[str, fx.Node]) -> None:
    """What is returned for a state is the state; what could not be written in place is copied there at the end."""
    output = graph.output_node()
    values: Any = list(output.args[0])  # type: ignore[arg-type]
    refused = {bases[state.binding.name]: 0 for state in states if not state.eligible}
    before = sharing(refused)
    with graph.inserting_before(output):
        for index, value in enumerate(values):
            if value in before:  # somebody asked for what the copies below are about to write over
                values[index] = graph.call_function(aten.clone.default, (value,))
                values[index].meta = dict(value.meta)
        for state in states:
            base = bases[state.binding.name]
            if not state.eligible:
                call = graph.call_function(aten.copy_.default, (base, values[state.position]))
                call.meta = {"val": base.meta["val"]}
            values[state.position] = base
    output.args = (tuple(values),)


def _told(bindings: Bindings, states: list[State]) -> Bindings:
    """The table with how each alias is known."""
    recognised = {state.output.name for state in states if state.eligible}

    def row(each: Binding) -> Binding:
        if each.alias is None or each.name not in recognised or each.alias.why == DECLARED:
            return each
        return replace(each, alias=Alias(each.alias.of, RECOGNISED))

    return Bindings(tuple(row(each) for each in bindings))


def _bytes(binding: Binding) -> str:
    """The size of a state, with symbols where it has any.

    >>> from inlay.program.bindings import Binding, Role
    >>> _bytes(Binding("cache", Role.INPUT, "cache", "float32", ("batch", 8, 1024)))
    'batch * 32,768 bytes'
    """
    symbols = [str(size) for size in binding.shape if not isinstance(size, int)]
    return " * ".join([*symbols, f"{binding.nbytes:,} bytes"])


def remarks_on(states: Sequence[State]) -> list[Remark]:
    """Which of these states are not in place, why, and what it costs."""
    return [_remark(state) for state in states if not state.eligible]


def _remark(state: State) -> Remark:
    copied = "is copied" if state.certain else "may be copied"
    reason = f"{state.reason}; {state.binding.text}, {_bytes(state.binding)}, {copied} at every call"
    return Remark(RemarkKind.REFUSED, "in_place", state.form, reason, nodes=(state.binding.name,))
