"""Recognize how a program updates its state, and decide whether the update can happen in place.

A captured program is functional: it computes the new value of a state from the old one and returns it. Traced from the
new value back to the old, the update is a chain of writes, each to a part of the storage. The writes may happen in
place when no call reads an older value after it is overwritten, and no written value lies in the same storage.
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
    """One write to a state: the value it creates, the call, the part of the storage, the operator."""

    node: fx.Node
    """The functional value that becomes the state, or the part of it at `storage_slice`."""
    call: fx.Node
    """The call that writes: `node` itself, or the wrapped operator that it is a result of."""
    storage_slice: StorageSlice
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    size: Any
    """How many values are written, a number or an expression of symbols; None when unknown for the operator."""

    @property
    def form(self) -> str:
        """The short name of the operator."""
        return target_text(self.target).split(".")[1]


@dataclass(frozen=True, eq=False)
class StateUpdate:
    """A state binding, the writes to it, and the reason if they cannot happen in place."""

    binding: Binding
    output: Binding
    output_index: int
    """The index of the graph output that returns the new value."""
    writes: tuple[StateWrite, ...] = ()
    reason: str = ""
    is_certain: bool = True
    """Whether the reason is known to cost a copy. False where a backend only may copy."""
    note: str = ""
    """Why a backend may copy a state that is too small for the copy to count. It is still eligible."""
    versions: dict[fx.Node, tuple[StorageSlice, int]] = field(default_factory=dict, repr=False)
    """Nodes that equal a part of the state → that part, and the number of writes before it."""

    @property
    def is_eligible(self) -> bool:
        """Whether the update can happen in place."""
        return not self.reason

    @property
    def form(self) -> str:
        """The operators that write, in order."""
        return ", ".join(dict.fromkeys(write.form for write in self.writes)) or "none"


def find_state_updates(program: Program) -> list[StateUpdate]:
    """Return every state of a program, in the order of its binding table."""
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
    """An operator that writes to several tensors is in place for all of them or for none."""
    while alone := _find_partial_calls(states):
        states = [
            replace(each, reason=alone[each.binding.name]) if each.binding.name in alone else each for each in states
        ]
    return states


def _find_partial_calls(states: list[StateUpdate]) -> dict[str, str]:
    """Find eligible states whose operator also writes to another tensor: binding → reason."""
    writers: dict[fx.Node, list[StateUpdate]] = {}
    for state in states:
        for write in state.writes if state.is_eligible else ():
            if is_auto_functionalized(write.call):
                writers.setdefault(write.call, []).append(state)
    return {
        state.binding.name: f"partial call: {target_text(call.args[0])} also writes to a tensor that is not in place"
        for call, group in writers.items()
        if (wrapped := parse_auto_functionalized(call)) is None or len(group) < len(wrapped.bases)
        for state in group
    }


class _UpdateChain:
    """Traces a new value back to the old one."""

    def __init__(self, base: fx.Node) -> None:
        self.base = base
        self.slices: dict[fx.Node, StorageSlice] = {base: StorageSlice()}
        self.versions: dict[fx.Node, int] = {base: 0}
        """The number of writes before a node."""
        self.whole: dict[fx.Node, int] = {base: 0}
        """Nodes that equal the whole state, in its storage or not → the number of writes before it."""
        self.writes: list[StateWrite] = []

    def follow(self, value: fx.Node, place: StorageSlice) -> Iterator[StateWrite]:
        """Yield the writes that turn the contents of `place` into `value`."""
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
                self._note(value, place)  # a part is copied to itself, as in `cache[1:2] += 1`
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
        """Whether a value equals the current contents of a place: the state, or the same part of such a value."""
        if not place.views:
            return self.whole.get(value) == len(self.writes)
        return place.views[-1].matches(value) and self._is_current(value.args[0], StorageSlice(place.views[:-1]))

    def _derives_from(self, value: Any, place: StorageSlice) -> bool:
        """Whether a value is derived from the contents of the place by writes."""
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
        """Return a fake tensor of a part of the state, with its memory layout."""
        value: torch.Tensor = self.base.meta["val"]
        with symbolic_sizes():
            for view in place.views:
                value = view.target(value, *fx.map_arg(view.args, lambda each: each.meta["val"]))
        return value

    def _lies_alike(self, scatter: fx.Node, place: StorageSlice) -> bool:
        """Whether the operand of a scatter has the layout of the state; required only of `as_strided_scatter`."""
        whole: Any = scatter.args[0]
        return scatter.target is not aten.as_strided_scatter.default or (
            _layout(whole.meta["val"]) == _layout(self.held(place))
        )

    def _find_inverse_view(self, back: fx.Node, place: StorageSlice) -> fx.Node | None:
        """Return the view of the state that `back`, a view of the updated value, inverts; None if there is none."""
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
            raise IneligibleState(f"part: {target_text(call.args[0])} receives only a part of the state")
        yield from self.follow(operand, place)
        yield self._write(value, place, call.args[0], (), {})


def _is_round_trip(there: fx.Node, back: fx.Node, whole: torch.Tensor) -> bool:
    """Whether a view of a part of the state, followed by a second view, is the part itself."""
    try:
        with symbolic_sizes():
            seen = _apply_view(back, _apply_view(there, whole))
    except (RuntimeError, ValueError):  # the layouts differ, and the state does not allow this view
        return False
    return _layout(seen) == _layout(whole)


def _apply_view(view: fx.Node, value: torch.Tensor) -> torch.Tensor:
    others, named = fx.map_arg((view.args[1:], dict(view.kwargs)), lambda each: each.meta["val"])
    result: torch.Tensor = view.target(value, *others, **named)  # type: ignore[operator]
    return result


def _layout(value: torch.Tensor) -> list[str]:
    return [str(each) for each in (*value.shape, *value.stride(), value.storage_offset())]


def _count_written(target: Any, held: torch.Tensor, args: tuple[Any, ...]) -> Any:
    """Return the maximum number of values that a write changes; None for operators outside aten."""
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
                return held.numel()  # depends on data; computing the size would create an unbound symbol
            with symbolic_sizes():
                return aten.index.Tensor(held, indices).numel()
    return held.numel()


def _check_operands(chain: _UpdateChain, shared: dict[fx.Node, int]) -> None:
    """Refuse writes whose operands lie in the storage that is written to."""
    for write in chain.writes:
        operands = tree_leaves((write.args, write.kwargs))
        if (
            wrapped := parse_auto_functionalized(write.call) if is_auto_functionalized(write.call) else None
        ) is not None:
            own = mutated_base(write.node)
            operands = [*wrapped.read_only_nodes, *(base for base in wrapped.bases if base is not own)]
        for operand in operands:
            if isinstance(operand, fx.Node) and operand in shared:
                raise IneligibleState(f"overlap: {write.form} reads {operand}, which shares the storage it writes to")


def _check_layouts(chain: _UpdateChain) -> None:
    """A value that is read with as_strided must have the memory layout of the state."""
    for node in chain.versions:
        if has_strided_reader(node) and _layout(node.meta["val"]) != _layout(chain.held(chain.slices[node])):
            raise IneligibleState(f"layout: {node} is read with as_strided, and its layout differs from the state's")


def find_aliases(known: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return the known nodes and all views of them, with the number of writes before each.

    The results of a wrapped operator are new tensors, not views.
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
    """Every read of a value must come before the write that overwrites it."""
    order = {node: index for index, node in enumerate(chain.base.graph.nodes)}
    for one, two in pairwise(chain.writes):
        if order[one.call] >= order[two.call]:
            raise IneligibleState(f"order: {two.call} is computed before {one.call}, but must write after it")
    own = {write.call for write in chain.writes} | set(chain.versions)
    for node, version in shared.items():
        limit = order[chain.writes[version].call] if version < len(chain.writes) else len(order)
        for user in node.users:
            if user in own:
                continue
            if is_mutation(user):
                raise IneligibleState(f"other write: {user} also writes to {node}")
            if user.op == "output" and limit < len(order):
                raise IneligibleState(f"returned: the value of {node} before the write is returned")
            if order[user] >= limit:
                raise IneligibleState(f"read after the write: {user} reads the old value of {node}")
