"""Which states an engine does not update in place although that would be sound, and why.

`recognise` says whether a state *may* be written in place. Whether it is depends on who runs the program. The eager
engine calls in-place operators, so only a new value that is computed apart, as large as the state, is copied. Compilers
functionalise again: they keep an `index_put` into the whole state, a mutating operator, and a state of which every
value is computed anew by one kernel. What they make of anything else is not known, and is said to be copied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from inlay.program.graphs import is_view, operands, target_text
from inlay.program.symbols import is_known
from inlay.state.canonical import canonical_updates
from inlay.state.places import SCATTERS
from inlay.state.updates import State, recognise, sharing
from inlay.state.wrapped import is_wrapper

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.program.program import Program
    from inlay.state.updates import Write

aten = torch.ops.aten
_TINY = 64
"""Bytes up to which a copy costs less than the call that makes it: counters, positions."""
_BY_VALUE = (aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default, aten.full.default)
_ROWS = ("aten.index_", "aten.scatter")
_MASKED = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
"""Eager writes only what the mask chooses, and compilers write everything."""


def under_eager(states: Sequence[State]) -> list[State]:
    """Recognised states; one that the eager engine copies has a reason."""
    return [_told(state, _computed_apart(state) or _rewritten_part(state), certain=True) for state in states]


def under_compilers(program: Program) -> list[State]:
    """The states of a program; one that engines which compile it copy, or may copy, has a reason."""
    reasons = {state.binding.name: _compiled(state) for state in recognise(canonical_updates(program)[0])}
    states = recognise(program)
    return [_told(state, reasons[state.binding.name] or _rewritten_part(state), certain=False) for state in states]


def _told(state: State, reason: str, *, certain: bool) -> State:
    return state if state.reason or not reason else replace(state, reason=reason, certain=certain)


def _computed_apart(state: State) -> str:
    """Why the eager engine copies a state, if it does."""
    if state.reason:
        return ""
    return next((_apart(write.args[0]) for write in state.writes if _puts_all(write, state)), "")


def _rewritten_part(state: State) -> str:
    """Why more of a state is written than the model writes, if it is: rows of a part that is seen in two ways."""
    for write in state.writes if state.eligible else ():
        if write.target is aten.copy_.default and write.args[0] is write.node:
            root = _viewed(write.node)
            if root.target in SCATTERS or target_text(root.target).startswith(_ROWS):
                return f"views: {root} writes to a part that is not followed back to the state, and all of it is copied"
    return ""


def _viewed(value: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while value.op == "call_function" and is_view(value):
        value = value.args[0]  # type: ignore[assignment]
    return value


def _apart(value: fx.Node) -> str:
    return f"computed apart: {value} is a new value of all of it"


def _puts_all(write: Write, state: State) -> bool:
    """Whether a write puts a value there that was computed before, and is as large as the state."""
    if write.target is aten.copy_.default:
        value = write.args[0]
    elif write.target is aten.index_put_.default:
        value = write.args[1]
    else:
        return False
    whole = not write.place.views and write.target is aten.copy_.default
    return (whole or str(write.size) == str(_whole(state).numel())) and _is_new(value, state)


def _whole(state: State) -> torch.Tensor:
    held: torch.Tensor = next(each for each in state.versions if each.op == "placeholder").meta["val"]
    return held


def _is_new(value: fx.Node, state: State) -> bool:
    """Whether a value, or what it is a view of, was computed and is as large as the state."""
    root = _viewed(value)
    return root.op == "call_function" and not _is_smaller(root, state)


def _is_smaller(node: fx.Node, state: State) -> bool:
    """Whether a value is known to have fewer elements than the state, or is none."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or is_known(value.numel() < _whole(state).numel())


def _compiled(state: State) -> str:
    """Why compilers may copy a state whose updates are in canonical form; empty where they do not."""
    if state.reason:
        return state.reason
    others = [write for write in state.writes if not _is_row_write(write)]
    if _is_tiny(state):
        return ""
    if not others:
        return next((_apart(write.args[1]) for write in state.writes if _puts_all(write, state)), "")
    if len(others) < len(state.writes) or any(write.place.views for write in others):
        return f"no index_put: {others[0].form} is not one into the whole state, which compilers keep in place"
    apart = next((node for write in others for node in _not_by_value(write.node, state)), None)
    if apart is not None:
        return f"computed apart: {apart} is not computed value by value"
    own = {*state.versions, *(write.at for write in others), others[0].node.graph.output_node()}
    new = [node for node, (_, count) in state.versions.items() if count]
    late = next((user for node in new for user in node.users if user not in own), None)
    return "" if late is None else f"read after the write: {late} reads what {others[-1].form} computes"


def _is_row_write(write: Write) -> bool:
    """Whether compilers write no more than this write does, whatever else happens to the state."""
    if is_wrapper(write.at):
        return True
    if write.place.views or write.target not in (aten.index_copy_.default, aten.index_put_.default):
        return False
    indices = write.args[0] if write.target is aten.index_put_.default else ()
    # A mask becomes a choice between the old and the new value for every one of them.
    return not any(each is not None and each.meta["val"].dtype in (torch.bool, torch.uint8) for each in indices)


def _is_tiny(state: State) -> bool:
    return all(isinstance(size, int) for size in state.binding.shape) and state.binding.nbytes <= _TINY


def _is_by_value(node: fx.Node) -> bool:
    return node.target in _BY_VALUE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _not_by_value(value: fx.Node, state: State) -> Iterator[fx.Node]:
    """The calls that a compiler cannot put into the kernel that writes all of a state, value by value."""
    shared = sharing(dict.fromkeys(state.versions, 0))
    seen, todo = {value}, [value]
    while todo:
        node = todo.pop()
        if node in shared and node not in state.versions:
            yield node  # it looks at the state in another order, or at a part of it
        elif node.op != "call_function" or _is_smaller(node, state):
            continue
        elif not is_view(node) and (node.target in _MASKED or not _is_by_value(node)):
            yield node
        todo += [each for each in operands(node) if each not in seen]
        seen.update(operands(node))
