"""Find the states that a backend does not update in place although that would be sound, with the reason.

`find_state_updates` decides whether a state *may* be written in place. Whether it is depends on the backend. The eager
backend calls in-place operators, so it copies only where a new value as large as the state is computed out of place.
Compilers functionalize again. They keep these in place: an `index_put` into the whole state, a mutating operator, and a
state that one kernel recomputes completely. What they do with other updates is unknown and reported as a copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from inlay.analysis.auto_functionalized import is_auto_functionalized
from inlay.analysis.state_updates import StateUpdate, find_aliases, find_state_updates
from inlay.analysis.storage_slices import SCATTERS
from inlay.lowering.state.index_put import canonicalize_updates
from inlay.program.graphs import is_view, operands, target_text, view_base
from inlay.program.symbols import is_statically_true

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.analysis.state_updates import StateWrite
    from inlay.program.program import Program

aten = torch.ops.aten
_TINY = 64
"""Bytes up to which a copy costs less than the call that copies: counters, positions. They count as in place."""
_POINTWISE_OPS = (aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default, aten.full.default)
_ROWS = ("aten.index_", "aten.scatter")
_MASKED = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
"""Eager writes only the masked elements; compilers write all of them."""


_INDEXED_WRITES = (aten.index_copy_.default, aten.index_add_.default, aten.scatter_.src, aten.scatter_add_.default)
_STORED_VALUES = {aten.copy_.default: 0, aten.index_put_.default: 1, **dict.fromkeys(_INDEXED_WRITES, 2)}
"""Writes that store a value → the place of that value in their arguments."""


def find_eager_copies(states: Sequence[StateUpdate]) -> list[StateUpdate]:
    """Return these states, with a reason on each that the eager backend copies."""
    return [
        _with_reason(state, _find_full_value(state) or _partial_view_reason(state), certain=True) for state in states
    ]


def find_compiled_copies(program: Program) -> list[StateUpdate]:
    """Return the states of a program, with a reason on each that a compiling backend copies or may copy."""
    reasons = {
        state.binding.name: _compiler_reason(state) for state in find_state_updates(canonicalize_updates(program)[0])
    }
    found = []
    for state in find_state_updates(program):
        reason, view = reasons[state.binding.name], _partial_view_reason(state)
        if _is_tiny(state) and state.is_eligible and not view:
            found.append(replace(state, note=reason))
        else:
            found.append(_with_reason(state, reason or view, certain=False))
    return found


def find_functional_copies(program: Program) -> list[StateUpdate]:
    """Return the states of a program that runs as functionalized calls: each is computed anew and copied back."""
    reason = "functionalized: the calls run out of place, and the new state is copied back at the end"
    return [_with_reason(state, reason, certain=True) for state in find_state_updates(program)]


def _with_reason(state: StateUpdate, reason: str, *, certain: bool) -> StateUpdate:
    return state if state.reason or not reason else replace(state, reason=reason, is_certain=certain)


def _partial_view_reason(state: StateUpdate) -> str:
    """Return why more of a state is written than the model writes, or "": rows of a part behind two views."""
    for write in state.writes if state.is_eligible else ():
        if write.target is aten.copy_.default and write.args[0] is write.node:
            root = view_base(write.node)  # for a result of a wrapped operator, the wrapper
            if root.target in SCATTERS or target_text(root.target).startswith(_ROWS):
                return f"views: {root} writes to a part that cannot be traced to the state, so the whole part is copied"
    return ""


def _find_full_value(state: StateUpdate) -> str:
    """Return the reason if a write stores a value that was computed before and is as large as the state, or ""."""
    for write in state.writes if state.is_eligible else ():
        place = _STORED_VALUES.get(write.target)
        if place is None:
            continue
        whole = not write.storage_slice.views and write.target is aten.copy_.default
        if (whole or str(write.size) == str(_whole(state).numel())) and _is_new(write.args[place], state):
            return f"out of place: {write.args[place]} is a new tensor as large as the state"
    return ""


def _whole(state: StateUpdate) -> torch.Tensor:
    held: torch.Tensor = next(each for each in state.versions if each.op == "placeholder").meta["val"]
    return held


def _is_new(value: fx.Node, state: StateUpdate) -> bool:
    """Whether a value, or the tensor it is a view of, was computed and may be as large as the state."""
    root = view_base(value)
    return root.op == "call_function" and not _is_smaller(root, state)


def _is_smaller(node: fx.Node, state: StateUpdate) -> bool:
    """Whether a value is known to have fewer elements than the state, or is not a tensor."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or is_statically_true(value.numel() < _whole(state).numel())


def _compiler_reason(state: StateUpdate) -> str:
    """Return why compilers may copy a state whose updates are in canonical form; empty if they do not."""
    if state.reason:
        return state.reason
    others = [write for write in state.writes if not _is_row_write(write)]
    if not others:
        return _find_full_value(state)
    if len(others) < len(state.writes) or any(write.storage_slice.views for write in others):
        return f"no index_put: {others[0].form} is not an index_put into the whole state, which compilers keep in place"
    apart = next((node for write in others for node in _non_pointwise_calls(write.node, state)), None)
    if apart is not None:
        return f"out of place: {apart} cannot run in the pointwise kernel that writes the state"
    own = {*state.versions, *(write.call for write in others), others[0].node.graph.output_node()}
    new = [node for node, (_, count) in state.versions.items() if count]
    late = next((user for node in new for user in node.users if user not in own), None)
    return "" if late is None else f"read after the write: {late} reads the result of {others[-1].form}"


def _is_row_write(write: StateWrite) -> bool:
    """Whether compilers write only the elements of this write, independently of other writes to the state."""
    if is_auto_functionalized(write.call):
        return True
    if write.storage_slice.views or write.target not in (aten.index_copy_.default, aten.index_put_.default):
        return False
    indices = write.args[0] if write.target is aten.index_put_.default else ()
    # A mask becomes a `where` between the old and the new value of every element.
    return not any(each is not None and each.meta["val"].dtype in (torch.bool, torch.uint8) for each in indices)


def _is_tiny(state: StateUpdate) -> bool:
    return all(isinstance(size, int) for size in state.binding.shape) and state.binding.nbytes <= _TINY


def _is_pointwise(node: fx.Node) -> bool:
    return node.target in _POINTWISE_OPS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _non_pointwise_calls(value: fx.Node, state: StateUpdate) -> Iterator[fx.Node]:
    """Yield the calls that a compiler cannot fuse into the pointwise kernel that writes all of a state."""
    shared = find_aliases(dict.fromkeys(state.versions, 0))
    seen, todo = {value}, [value]
    while todo:
        node = todo.pop()
        if node in shared and node not in state.versions:
            yield node  # a view of the state in another order, or of a part of it
        elif node.op != "call_function" or _is_smaller(node, state):
            continue
        elif not is_view(node) and (node.target in _MASKED or not _is_pointwise(node)):
            yield node
        todo += [each for each in operands(node) if each not in seen]
        seen.update(operands(node))
