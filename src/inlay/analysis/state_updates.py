"""Recognise how a program updates its state, and judge whether that can happen in place.

A captured program is functional: it computes the state's new value from the old one and hands it back. Followed from
the new value to the old, that is a chain of writes, each to a part of the storage. They may happen in place when nobody
reads an older value after it is written over, and nothing that is written lies in the same storage.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.analysis.auto_functionalized import is_auto_functionalized, mutated_base, parse_auto_functionalized
from inlay.analysis.storage_slices import SCATTERS, StorageSlice, in_place_variant
from inlay.program.graphs import has_strided_reader, is_mutation, is_view, target_text
from inlay.program.symbols import symbolic_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from inlay.program.bindings import Binding
    from inlay.program.program import Program

aten = torch.ops.aten


class IneligibleState(Exception):  # noqa: N818 - a refusal is a result, not an error
    """Why a state cannot be updated in place."""


@dataclass(frozen=True, eq=False)
class StateWrite:
    """One write to a state: which value it makes, at which call, where to, by which operator."""

    node: fx.Node
    """The functional value that is then the state, or the part of it at `storage_slice`."""
    call: fx.Node
    """The call that writes: `node` itself, or the wrapped operator that it is a result of."""
    storage_slice: StorageSlice
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    size: Any
    """How many values are written, a number or an expression of symbols; None when an operator does not say."""

    @property
    def form(self) -> str:
        """The operator that the model used, as people know it."""
        return target_text(self.target).split(".")[1]


@dataclass(frozen=True, eq=False)
class StateUpdate:
    """A state binding, the writes to it, and why they cannot happen in place, if they cannot."""

    binding: Binding
    output: Binding
    output_index: int
    """Which of the graph's outputs hands the new value back."""
    writes: tuple[StateWrite, ...] = ()
    reason: str = ""
    is_certain: bool = True
    """Whether the reason is known to cost a copy; a backend that is not known not to copy is not certain."""
    versions: dict[fx.Node, tuple[StorageSlice, int]] = field(default_factory=dict, repr=False)
    """Nodes that are nothing but a part of the state as it is after so many writes."""

    @property
    def is_eligible(self) -> bool:
        """Whether the update can happen in place."""
        return not self.reason

    @property
    def form(self) -> str:
        """The operators that write, in order."""
        return ", ".join(dict.fromkeys(write.form for write in self.writes)) or "none"


def find_state_updates(program: Program) -> list[StateUpdate]:
    """Every state of a program, in the order of its binding table."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values: Any = program.graph.output_node().args[0]
    found = []
    for position, (row, value) in enumerate(zip(program.bindings.outs, values, strict=True)):
        if row.alias is not None:
            binding = program.bindings[row.alias.binding]
            found.append(_check_state(StateUpdate(binding, row, position), placeholders[binding.name], value))
    return _exclude_partial_calls(found)


def _check_state(state: StateUpdate, base: fx.Node, value: Any) -> StateUpdate:
    chain = _UpdateChain(base)
    try:
        if not isinstance(value, fx.Node) or value.op != "call_function":
            raise IneligibleState("replaced: the new value is not computed from the old one")
        for _ in chain.follow(value, StorageSlice()):
            pass
        shared = find_aliases(chain.versions)
        _check_operands(chain, shared)
        _check_readers(chain, shared)
        _check_layouts(chain)
    except IneligibleState as refusal:
        return replace(state, writes=tuple(chain.writes), reason=str(refusal))
    versions = {node: (chain.slices[node], count) for node, count in chain.versions.items()}
    return replace(state, writes=tuple(chain.writes), versions=versions)


def _exclude_partial_calls(states: list[StateUpdate]) -> list[StateUpdate]:
    """An operator that writes to several tensors goes in place for all of them or for none."""
    while alone := _find_partial_calls(states):
        states = [
            replace(each, reason=alone[each.binding.name]) if each.binding.name in alone else each for each in states
        ]
    return states


def _find_partial_calls(states: list[StateUpdate]) -> dict[str, str]:
    """Eligible states that an operator writes to beside something else: binding → reason."""
    writers: dict[fx.Node, list[StateUpdate]] = {}
    for state in states:
        for write in state.writes if state.is_eligible else ():
            if is_auto_functionalized(write.call):
                writers.setdefault(write.call, []).append(state)
    return {
        state.binding.name: f"together: {target_text(call.args[0])} also writes to something that is not state"
        for call, group in writers.items()
        if (wrapped := parse_auto_functionalized(call)) is None or len(group) < len(wrapped.bases)
        for state in group
    }


class _UpdateChain:
    """Follows a new value back to the old one."""

    def __init__(self, base: fx.Node) -> None:
        self.base = base
        self.slices: dict[fx.Node, StorageSlice] = {base: StorageSlice()}
        self.versions: dict[fx.Node, int] = {base: 0}
        """How many writes a node comes after."""
        self.whole: dict[fx.Node, int] = {base: 0}
        """Nodes that have the value of the whole state after so many writes, in its storage or not."""
        self.writes: list[StateWrite] = []

    def follow(self, value: fx.Node, place: StorageSlice) -> Iterator[StateWrite]:
        """The writes that turn what `place` held into `value`."""
        if self._is_current(value, place):
            self._note(value, place)
        elif value.target in SCATTERS and self._lies_alike(value, place):
            whole, part, *where = value.args
            yield from self.follow(whole, place)  # type: ignore[arg-type]
            yield from self.follow(part, place.extend(SCATTERS[value.target], tuple(where)))  # type: ignore[arg-type]
            self._note(value, place)
        elif value.target is operator.getitem and is_auto_functionalized(value.args[0]):
            yield from self._follow_auto_functionalized(value, place)
        elif (there := self._find_inverse_view(value, place)) is not None:
            yield from self.follow(value.args[0], place.extend(there.target, there.args[1:]))  # type: ignore[arg-type]
            self._note(value, place)
        elif (variant := in_place_variant(value.target)) and self._derives_from(value.args[0], place):
            yield from self.follow(value.args[0], place)  # type: ignore[arg-type]
            if variant is aten.copy_.default and self._is_current(value.args[1], place):
                self._note(value, place)  # a part is written back to where it is, as `cache[1:2] += 1` does
            else:
                yield self._write(value, place, variant, value.args[1:], dict(value.kwargs))
        else:
            yield self._write(value, place, aten.copy_.default, (value,), {})

    def _note(self, value: fx.Node, place: StorageSlice) -> None:
        if value is not self.base:
            self.slices[value] = place
            self.versions[value] = len(self.writes)
            if not place.views:
                self.whole[value] = len(self.writes)

    def _write(self, value: fx.Node, place: StorageSlice, target: Any, args: Any, kwargs: dict[str, Any]) -> StateWrite:
        held = value.meta["val"]
        whole = self.base.meta["val"]
        if held.dtype != whole.dtype:
            raise IneligibleState(f"dtype: {value} is {held.dtype}, the state is {whole.dtype}")
        at = value.args[0] if value.target is operator.getitem and target is not aten.copy_.default else value
        write = StateWrite(value, at, place, target, tuple(args), kwargs, _count_written(target, held, args))  # type: ignore[arg-type]
        self.writes.append(write)
        if not (target is aten.copy_.default and args and args[0] is value):
            self._note(value, place)
        elif not place.views:
            self.whole[value] = len(self.writes)
        return write

    def _is_current(self, value: Any, place: StorageSlice) -> bool:
        """Whether a value is what the place holds now: the state itself, or the same part of a value that is."""
        if not place.views:
            return self.whole.get(value) == len(self.writes)
        return place.views[-1].matches(value) and self._is_current(value.args[0], StorageSlice(place.views[:-1]))

    def _derives_from(self, value: Any, place: StorageSlice) -> bool:
        """Whether a value is made by writing to what the place held."""
        while isinstance(value, fx.Node):
            if self._is_current(value, place):
                return True
            if (there := self._find_inverse_view(value, place)) is not None:
                value = there.args[0]
            elif value.target in SCATTERS or in_place_variant(value.target):
                value = value.args[0]
            elif value.target is operator.getitem and is_auto_functionalized(value.args[0]):
                value = mutated_base(value)
            else:
                return False
        return False

    def held(self, place: StorageSlice) -> torch.Tensor:
        """A part of the state as it lies in memory."""
        value: torch.Tensor = self.base.meta["val"]
        with symbolic_sizes():
            for view in place.views:
                value = view.target(value, *fx.map_arg(view.args, lambda each: each.meta["val"]))
        return value

    def _lies_alike(self, scatter: fx.Node, place: StorageSlice) -> bool:
        """Whether what a scatter takes apart lies in memory as the state does, where it says which elements by that."""
        whole: Any = scatter.args[0]
        return scatter.target is not aten.as_strided_scatter.default or (
            _layout(whole.meta["val"]) == _layout(self.held(place))
        )

    def _find_inverse_view(self, back: fx.Node, place: StorageSlice) -> fx.Node | None:
        """`back` looks at an updated value differently; the call that looked at the state that way before it."""
        if back.op != "call_function" or not is_view(back) or back.target is operator.getitem:
            return None
        at: Any = back.args[0]
        while isinstance(at, fx.Node) and at.op == "call_function" and not is_view(at):
            if at.target not in SCATTERS and in_place_variant(at.target) is None:
                return None
            at = at.args[0]
        if not isinstance(at, fx.Node) or not is_view(at) or not self._is_current(at.args[0], place):
            return None
        return at if _is_round_trip(at, back, self.held(place)) else None

    def _follow_auto_functionalized(self, value: fx.Node, place: StorageSlice) -> Iterator[StateWrite]:
        call: Any = value.args[0]
        operand = mutated_base(value)
        if not self._derives_from(operand, place):
            yield self._write(value, place, aten.copy_.default, (value,), {})
            return
        if place.views or operand is None:
            raise IneligibleState(f"part: {target_text(call.args[0])} is given a part of the state")
        yield from self.follow(operand, place)
        yield self._write(value, place, call.args[0], (), {})


def _is_round_trip(there: fx.Node, back: fx.Node, whole: torch.Tensor) -> bool:
    """Whether looking at a part of the state one way and then the other gives the part itself."""
    try:
        with symbolic_sizes():
            seen = _apply_view(back, _apply_view(there, whole))
    except (RuntimeError, ValueError):  # the value lies in memory in another way than the state, which has no such view
        return False
    return _layout(seen) == _layout(whole)


def _apply_view(view: fx.Node, value: torch.Tensor) -> torch.Tensor:
    others, named = fx.map_arg((view.args[1:], dict(view.kwargs)), lambda each: each.meta["val"])
    result: torch.Tensor = view.target(value, *others, **named)  # type: ignore[operator]
    return result


def _layout(value: torch.Tensor) -> list[str]:
    return [str(each) for each in (*value.shape, *value.stride(), value.storage_offset())]


def _count_written(target: Any, held: torch.Tensor, args: tuple[Any, ...]) -> Any:
    """How many values a write changes at most."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
    match target._schema.name:
        case "aten::index_copy_" | "aten::index_add_":
            return values[2].numel()
        case "aten::scatter_" | "aten::scatter_add_":
            return values[1].numel()
        case "aten::index_put_":
            indices = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args[0]]
            if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices):
                return held.numel()  # data decides; to ask for the size would make a symbol that nobody binds
            with symbolic_sizes():
                return aten.index.Tensor(held, indices).numel()
    return held.numel()


def _check_operands(chain: _UpdateChain, shared: dict[fx.Node, int]) -> None:
    """Nothing that is written may lie in the storage that is written to."""
    for write in chain.writes:
        operands = tree_leaves((write.args, write.kwargs))
        if (
            wrapped := parse_auto_functionalized(write.call) if is_auto_functionalized(write.call) else None
        ) is not None:
            own = mutated_base(write.node)
            operands = [*wrapped.read_only_nodes, *(base for base in wrapped.bases if base is not own)]
        for operand in operands:
            if isinstance(operand, fx.Node) and operand in shared:
                raise IneligibleState(f"overlap: {write.form} reads {operand}, which lies in the storage it writes to")


def _check_layouts(chain: _UpdateChain) -> None:
    """Who reads a value by where its elements lie in memory must find them there."""
    for node in chain.versions:
        if has_strided_reader(node) and _layout(node.meta["val"]) != _layout(chain.held(chain.slices[node])):
            raise IneligibleState(
                f"layout: {node} is read with as_strided, and lies in memory otherwise than the state"
            )


def find_aliases(known: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Nodes that share the storage of known ones: views of them, with the number of writes they come after.

    What a wrapped operator gives is new.
    """
    shared = dict(known)
    todo = list(shared)
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.op != "call_function" or user in shared or is_auto_functionalized(user):
                continue
            if is_view(user):
                shared[user] = shared[node]
                todo.append(user)
    return shared


def _check_readers(chain: _UpdateChain, shared: dict[fx.Node, int]) -> None:
    """Who reads a value must do so before it is written over."""
    order = {node: index for index, node in enumerate(chain.base.graph.nodes)}
    for one, two in pairwise(chain.writes):
        if order[one.call] >= order[two.call]:
            raise IneligibleState(f"order: {two.call} is computed before {one.call}, which is written first")
    own = {write.call for write in chain.writes} | set(chain.versions)
    for node, version in shared.items():
        limit = order[chain.writes[version].call] if version < len(chain.writes) else len(order)
        for user in node.users:
            if user in own:
                continue
            if is_mutation(user):
                raise IneligibleState(f"written by another: {user} writes to {node}")
            if user.op == "output" and limit < len(order):
                raise IneligibleState(f"returned: {node} is returned as it was before the write")
            if order[user] >= limit:
                raise IneligibleState(f"read after the write: {user} reads {node} as it was before")
