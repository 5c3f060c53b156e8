"""A captured program with as many layers as a test needs: exporting a deep model takes minutes, copying layers none."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from inlay.program import Bindings, Fact, Program
from inlay.program.fold import fold
from inlay.program.graphs import MODULE

if TYPE_CHECKING:
    from torch import fx

    from inlay.program import Binding


def deepened(program: Program, layers: int) -> Program:
    """The program with its last layer repeated until there are `layers` of them, each with weights of its own."""
    copied = program.copy()
    (kind,) = fold(copied).kinds
    before, last = kind.occurrences[-2:]
    rows = {row.name: row for row in copied.bindings}
    own = [rows[two.name] for one, two in zip(before.inputs, last.inputs, strict=True) if _is_other(rows, one, two)]
    carried = {node: before.nodes.index(node) for node in last.inputs if node in before.nodes}
    readers = [(node, user) for node in last.outputs for user in node.users if user not in last.nodes]
    after = last.nodes[-1].next
    added: list[Binding] = []
    tensors = dict(copied.tensors)
    place = next(node for node in copied.graph.nodes if node.name == own[-1].name)
    nodes = list(last.nodes)
    for layer in range(len(kind), layers):
        mapping: dict[fx.Node, fx.Node] = {node: nodes[position] for node, position in carried.items()}
        for row in own:
            new = replace(row, name=_renumbered(row.name, layer), target=_renumbered(row.target, layer))
            tensors[new.name] = tensors[row.name]
            added.append(new)
            source = next(node for node in last.inputs if node.name == row.name)
            with copied.graph.inserting_after(place):
                place = mapping[source] = copied.graph.placeholder(new.name)
            place.meta = dict(source.meta)
        mapping |= {node: node for node in last.inputs if node not in mapping}
        with copied.graph.inserting_before(after):
            for node in last.nodes:
                made = mapping[node] = copied.graph.node_copy(node, mapping.__getitem__)
                made.meta[MODULE] = _renumbered(str(node.meta.get(MODULE, "")), layer)
        nodes = [mapping[node] for node in last.nodes]
    for node, user in readers:
        user.replace_input_with(node, nodes[last.nodes.index(node)])
    at = copied.bindings.rows.index(own[-1]) + 1
    table = Bindings((*copied.bindings.rows[:at], *added, *copied.bindings.rows[at:]))
    return replace(copied, bindings=table, tensors=tensors, facts=replace(copied.facts, layers=Fact(layers, "graph")))


def _is_other(rows: dict[str, Binding], one: fx.Node, two: fx.Node) -> bool:
    return one is not two and two.name in rows


def _renumbered(name: str, layer: int) -> str:
    return re.sub(r"(layers|h)([._])\d+", rf"\g<1>\g<2>{layer}", name, count=1)
