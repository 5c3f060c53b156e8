"""Copy returned values that would lie in a state once it is written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.state_updates import find_state_updates
from inlay.lowering.state.declared_aliases import RETURNED_KINDS
from inlay.program.graphs import is_view

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.analysis.state_updates import StateUpdate
    from inlay.analysis.storage_slices import StorageSlice
    from inlay.rewrite.rewriter import Rewriter


def copy_returned_parts(rewriter: Rewriter) -> list[StateUpdate]:
    """Clone such values, so that later calls do not overwrite them, and return the states of the program.

    A value that is computed and stored in a part of a state has its own storage. Computed in place, it is that part,
    which the next call overwrites. So a copy is returned.
    """
    graph = rewriter.program.graph
    states = find_state_updates(rewriter.program)
    places = {node: place for state in states for node, (place, _) in state.versions.items()}
    values: Any = list(graph.output_node().args[0])  # type: ignore[arg-type]
    own = {state.output_index for state in states}
    declared = {values[state.output_index] for state in states if state.output.alias.kind in RETURNED_KINDS}  # type: ignore[union-attr]
    returned = [
        index
        for index, value in enumerate(values)
        if index not in own and value not in declared and _is_part(value, places)
    ]
    if not returned:
        return states
    for index in returned:
        with rewriter.inserting_before(values[index].next, values[index]):
            values[index] = rewriter.call(torch.ops.aten.clone.default, (values[index],))
    rewriter.set_outputs(graph, values)
    return find_state_updates(rewriter.program)


def insert_views(rewriter: Rewriter, base: fx.Node, place: StorageSlice) -> fx.Node:
    """Insert the views of a state that make one of its parts."""
    for view in place.views:
        base = rewriter.call(view.target, (base, *view.args))
    return base


def _is_part(value: Any, places: Mapping[fx.Node, StorageSlice]) -> bool:
    """Whether a value is a part of a state, or a view of one. A whole state may itself be a view of a part of it."""
    while isinstance(value, fx.Node) and value not in places and value.op == "call_function" and is_view(value):
        value = value.args[0]
    return value in places and bool(places[value].views)
