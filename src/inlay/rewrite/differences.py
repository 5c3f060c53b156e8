"""Partial matches: the nodes that were found, and every difference with its cost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.program.call_arguments import AXES
from inlay.program.graphs import MODULE, SOURCE, operands, target_text
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.rewrite.pattern_trees import PatternCall


@dataclass(frozen=True, eq=False)
class PatternDifference:
    """One difference between a pattern and a program, and the node to look at."""

    kind: Reason
    text: str
    node: fx.Node
    cost: float = 1.0

    @property
    def reason(self) -> str:
        """The reason as text, its kind first."""
        return self.kind.sentence(self.text)


@dataclass(frozen=True, eq=False)
class PartialMatch:
    """The best alignment of a pattern with a graph: the nodes that match, and the differences."""

    nodes: Mapping[PatternCall, fx.Node] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    extra_nodes: frozenset[fx.Node] = frozenset()
    """Nodes at positions where the pattern has no node, or another one."""
    differences: tuple[PatternDifference, ...] = ()
    cost: float = 0.0

    def bind(self, name: str, value: Any) -> PartialMatch:
        """Return the match with a variable bound to this value."""
        return PartialMatch(self.nodes, {**self.values, name: value}, self.extra_nodes, self.differences, self.cost)

    def with_node(self, call: PatternCall, node: fx.Node) -> PartialMatch:
        """Return the match with a call of the pattern assigned to this node."""
        return PartialMatch({**self.nodes, call: node}, self.values, self.extra_nodes, self.differences, self.cost)

    def with_difference(
        self, difference: PatternDifference, *extra_nodes: fx.Node, extra_cost: float = 0.0
    ) -> PartialMatch:
        """Return the match with one more difference, which costs its own cost plus `extra_cost`."""
        extra = self.extra_nodes.union(extra_nodes) if extra_nodes else self.extra_nodes
        cost = self.cost + difference.cost + extra_cost
        return PartialMatch(self.nodes, self.values, extra, (*self.differences, difference), cost)


CodeLocation = tuple[str, str]
"""Where in the model a node is, equal for all layers: module path without numbers, and source line."""


def code_location(node: fx.Node) -> CodeLocation:
    """Return where in the model a node is."""
    return meta_location(node.meta)


def meta_location(meta: Mapping[str, Any]) -> CodeLocation:
    """Return where in the model a node with this metadata is."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", str(meta.get(MODULE, ""))), str(meta.get(SOURCE, ""))


def constant_difference(name: str, expected: Any, found: Any, node: fx.Node) -> PatternDifference:
    """Return the difference of an argument that is not a value of the program: an axis, a dtype or another constant."""
    kind = Reason.AXIS if name in AXES else Reason.DTYPE if name == "dtype" else Reason.CONSTANT
    return PatternDifference(kind, f"{name} of {node} is {found}; expected {expected}", node)


def extra_node(node: fx.Node) -> PatternDifference:
    """Return the difference of a node that the pattern does not have; a cast is a difference in dtype."""
    value = node.meta.get("val")
    before = operands(node)[0].meta.get("val") if operands(node) else None
    cast = "_to_copy" in target_text(node.target) and getattr(before, "dtype", None) != getattr(value, "dtype", None)
    if cast:
        return PatternDifference(Reason.DTYPE, f"{node} casts {before.dtype} to {value.dtype}", node)  # type: ignore[union-attr]
    return PatternDifference(Reason.EXTRA, f"{node} ({target_text(node.target)}) stands in between", node)


def missing_node(call: PatternCall, value: Any, reader: fx.Node) -> PatternDifference:
    """Return the difference of a missing node; it names the node found instead, or the reader."""
    text = target_text(value.target) if isinstance(value, fx.Node) else repr(value)
    node = value if isinstance(value, fx.Node) and value.op == "call_function" else reader
    return PatternDifference(Reason.MISSING, f"{target_text(call.target)} expected, {text} found", node)


def missing_node_between(call: PatternCall, value: Any, reader: fx.Node) -> PatternDifference:
    """Return the difference of a skipped node: `reader` reads directly what should pass through the node."""
    return PatternDifference(
        Reason.MISSING, f"{target_text(call.target)} expected between {value} and {reader}", reader
    )
