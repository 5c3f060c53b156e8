"""Values that a program returns, and that would lie in a state once it is written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.state_updates import find_state_updates
from inlay.program.graphs import is_view

if TYPE_CHECKING:
    from inlay.analysis.state_updates import StateUpdate
    from inlay.rewrite.rewriter import Rewriter


def copy_returned_parts(rewriter: Rewriter) -> list[StateUpdate]:
    """The states of a program in which what is returned stays as it is when the program is called again.

    A value that is computed and put into a part of a state has a storage of its own. Computed in place it is that part,
    which the next call writes over: what is returned is a copy.
    """
    graph = rewriter.program.graph
    states = find_state_updates(rewriter.program)
    parts = {node for state in states for node, (place, _) in state.versions.items() if place.views}
    own = {state.output_index for state in states}
    values: Any = list(graph.output_node().args[0])  # type: ignore[arg-type]
    returned = [index for index, value in enumerate(values) if index not in own and view_root(value) in parts]
    if not returned:
        return states
    for index in returned:
        values[index] = _copy(rewriter, values[index])
    rewriter.set_outputs(graph, values)
    return find_state_updates(rewriter.program)


def _copy(rewriter: Rewriter, value: fx.Node) -> fx.Node:
    with rewriter.inserting_before(value.next, value):
        return rewriter.call(torch.ops.aten.clone.default, (value,))


def view_root(value: Any) -> Any:
    """What a value is a view of; for what a wrapped operator gives, the wrapper."""
    while isinstance(value, fx.Node) and value.op == "call_function" and is_view(value):
        if not isinstance(value.args[0], fx.Node):
            break
        value = value.args[0]
    return value
